"""gTop-k whose messages are signs, among virtual workers: partial sums are made of signs again at every merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from sparsync.collectives import GTopK
from sparsync.collectives.base import MeanOf, Reduced, bad_ranks_of
from sparsync.collectives.comm.channel import Channel
from sparsync.collectives.gtopk import merge
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
        partial, kept = list(sents), [list[SparseGrad]() for _ in sents]
        reach, exact = 1, replace(wire, values="fp32")
        while reach < len(sents):
            ranks = range(0, len(sents) - reach, 2 * reach)
            merged = merge([(partial[rank], partial[rank + reach]) for rank in ranks], layout, exact)
            signed = _signed([total for total, _ in merged], layout, wire)
            for rank, (total, left), values in zip(ranks, merged, signed, strict=True):
                partial[rank] = replace(total, values=values)
                kept[rank] += [left, replace(total, values=total.values - values)]
            reach *= 2
        bad = bad_ranks_of(sents)[:1]
        return [Reduced(MeanOf([partial[0]], divisor or len(sents)), _joined(own), bad) for own in kept]


def _signed(totals: Sequence[SparseGrad], layout: Layout, wire: Wire) -> Tensor:
    """Return the values of sums as signs, a row for each; every row and segment has a scale of its own."""
    assert wire.codec.round is not None
    values = torch.stack([total.values for total in totals])
    indices = torch.stack([total.indices for total in totals if total.indices is not None])
    places, rows = (torch.arange(size, dtype=torch.int64, device=values.device) for size in reversed(values.shape))
    real = places < torch.stack([total.count for total in totals]).unsqueeze(1)
    parts = len(layout.segments) + 1  # padding is in none of them
    segments = torch.where(real, layout.segment_of(indices), parts - 1) + parts * rows.unsqueeze(1)
    return wire.codec.round(values.view(-1), segments.view(-1), parts * len(totals), inf).view_as(values)


def _joined(parts: Sequence[SparseGrad]) -> SparseGrad | None:
    """Return all that a rank keeps, of every merge."""
    if not parts:
        return None
    indices = torch.cat([part.indices for part in parts if part.indices is not None])
    values = torch.cat([part.values for part in parts])
    return replace(parts[0], indices=indices, values=values, count=torch.tensor(values.numel(), device="cpu"))
