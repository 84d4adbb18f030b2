"""gTop-k whose messages are signs, among virtual workers: partial sums are made of signs again at every merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsync.collectives import GTopK
from sparsync.collectives.base import MeanOf, Reduced, bad_ranks_of, round_sums
from sparsync.collectives.comm.channel import Channel
from sparsync.collectives.gtopk import merge, stack_rounds
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad
from sparsync.wire import Wire
from sparsync.workspace import Workspace

SIGNED_GTOPK = "signed-gtopk"  # as trainings call it


@dataclass(frozen=True)
class SignedGTopK(GTopK):
    """gTop-k with values that travel as signs and one scale a message.

    A sum of two such messages has no common scale. Of its k largest entries signs with their mean magnitude go on; the
    difference stays in the residual of the rank that merged, so that nothing is lost. Which entries are the k largest
    is known only as far as these scales tell: of a message all are alike.
    """

    graph_safe = True

    def check(self, wire: Wire, dense: bool, random: bool) -> None:
        super().check(replace(wire, values="fp32"), dense, random)

    def reduce(self, sent: SparseGrad, layout: Layout, channel: Channel, workspace: Workspace) -> Reduced:
        raise NotImplementedError("signs travel in gTop-k between virtual workers alone")

    def reduce_local(
        self, sents: Sequence[SparseGrad], layout: Layout, wire: Wire, divisor: int | None = None
    ) -> list[Reduced]:
        partial, rounds = list(sents), [list[SparseGrad]() for _ in sents]
        reach, exact = 1, replace(wire, values="fp32")
        while reach < len(sents):
            ranks = range(0, len(sents) - reach, 2 * reach)
            merged = merge([(partial[rank], partial[rank + reach]) for rank in ranks], layout, exact)
            signed = _signed([total for total, _ in merged], layout, wire)
            for rank, (total, left), values in zip(ranks, merged, signed, strict=True):
                partial[rank] = replace(total, values=values)
                rounds[rank].append(_kept(left, total, values))
            reach *= 2
        bad = bad_ranks_of(sents)[:1]
        return [Reduced(MeanOf([partial[0]], divisor or len(sents)), stack_rounds(own), bad) for own in rounds]


def _signed(totals: Sequence[SparseGrad], layout: Layout, wire: Wire) -> Tensor:
    """Return the values of sums as signs, a row for each; every row and segment has a scale of its own."""
    values = torch.stack([total.values for total in totals])
    indices = torch.stack([total.indices for total in totals if total.indices is not None])
    places, rows = (torch.arange(size, dtype=torch.int64, device=values.device) for size in reversed(values.shape))
    real = places < torch.stack([total.count for total in totals]).unsqueeze(1)
    parts = len(layout.segments) + 1  # padding is in none of them
    segments = torch.where(real, layout.segment_of(indices), parts - 1) + parts * rows.unsqueeze(1)
    return round_sums(values.view(-1), segments.view(-1), parts * len(totals), wire).view_as(values)


def _kept(left: SparseGrad, total: SparseGrad, values: Tensor) -> SparseGrad:
    """Return what a merge leaves with the rank that made it: the entries that were dropped, and what signs left of the
    others. Of an index at most one of the two is not 0: in whatever order they are added, it comes to the same."""
    assert left.indices is not None
    assert total.indices is not None
    rest = torch.where(values.isfinite(), total.values - values, 0)  # of one that overflowed senders keep their parts
    indices, both = torch.cat([left.indices, total.indices]), torch.cat([left.values, rest])
    return replace(left, indices=indices, values=both, count=torch.tensor(both.numel(), device="cpu"))
