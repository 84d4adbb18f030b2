"""About the k largest entries, found in one pass with a floor that is carried over from the step before."""

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from sparsync.compressors.base import Context, State, segment_scales
from sparsync.compressors.floored import Floored
from sparsync.kernels import Memory, Rows, above, histogram, limit
from sparsync.kernels.floors import LOWEST, Floor, edge_for, guess, jumped, magnitude, steer
from sparsync.kernels.launch import select
from sparsync.kernels.reference import reach
from sparsync.kernels.workspace import CODECS as FUSED
from sparsync.kernels.workspace import STATE as FIELDS
from sparsync.kernels.workspace import usable
from sparsync.layout import Layout, Segment
from sparsync.sparse import SparseGrad


@dataclass(frozen=True)
class ThresholdK(Floored):
    """The k largest entries of every segment, but for a few that are nearly equal, and never more than k: one pass
    collects what is above a floor carried over from the step before, and a histogram of that tells where the k largest
    begin.

    The first floor comes from a sample, and so does the first after k changed and the one after a jump of the gradient.

    Args:
        density: share of the entries to send, in (0, 1].
    """

    def compress(self, grad: Tensor, memory: Memory | None, layout: Layout, ctx: Context, state: State) -> SparseGrad:
        assert memory is not None
        if usable(grad, memory) and ctx.values in FUSED and not ctx.whole and not ctx.unused:
            return select(grad, memory, layout, state, ctx.values, segment_scales(grad, layout, ctx))
        return super().compress(grad, memory, layout, ctx, state)

    def choose(self, u: Tensor, rows: Rows, segment: Segment, ctx: Context, state: State) -> Tensor:
        if segment.k >= segment.numel or not rows.peak.numel():
            return above(u, rows, 0.0)
        own, runs, k = state[segment.name], segment.runs(ctx.unused), segment.k
        floor = Floor(*(int(own[name]) for name in FIELDS))
        if floor.k != k:
            floor = Floor(guess(u, runs, k), k, k // 2, k)
        found = above(u, rows, magnitude(max(LOWEST, floor.bits)))
        bins, reached = histogram(u, found, max(LOWEST, floor.bits))
        edge = edge_for(reached, k)
        going = reach(bins, edge)
        sent = found.index_select(0, going)
        if sent.numel() > segment.capacity:  # of the lowest bin, only as many as are missing
            level = bins.index_select(0, going)
            sure, rest = sent[level > edge], sent[level == edge]
            sent = torch.cat([sure, limit(rest, segment.capacity - sure.numel(), ctx.step)]).sort().values
        if floor.bits and not jumped(found.numel(), k):
            floor = steer(floor, reached, edge)
        else:
            floor = Floor(guess(u, runs, k) or floor.bits, k, k // 2, k)
        for name, value in zip(FIELDS, astuple(floor), strict=True):
            own[name].fill_(value)
        return sent
