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

    graph_safe = False

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
            for rank in range(0, len(sents) - reach, 2 * reach):
                ((total, left),) = merge([(partial[rank], partial[rank + reach])], layout, exact)
                partial[rank], rest = _signed(total, layout, wire)
                kept[rank] += [left, replace(total, values=rest)]
            reach *= 2
        bad = bad_ranks_of(sents)[:1]
        return [Reduced(MeanOf([partial[0]], divisor or len(sents)), _joined(own), bad) for own in kept]


def _signed(total: SparseGrad, layout: Layout, wire: Wire) -> tuple[SparseGrad, Tensor]:
    """Return a sum as signs, and what these leave of it."""
    assert wire.codec.round is not None
    assert total.indices is not None
    real = torch.arange(total.values.numel(), device=total.values.device) < total.count
    segments = torch.where(real, layout.segment_of(total.indices), len(layout.segments))  # padding is in none
    values = wire.codec.round(total.values, segments, len(layout.segments) + 1, inf)
    return replace(total, values=values), total.values - values


def _joined(parts: Sequence[SparseGrad]) -> SparseGrad | None:
    """Return all that a rank keeps, of every merge."""
    if not parts:
        return None
    indices = torch.cat([part.indices for part in parts if part.indices is not None])
    values = torch.cat([part.values for part in parts])
    return replace(parts[0], indices=indices, values=values, count=torch.tensor(values.numel()))
