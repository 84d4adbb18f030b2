"""About the k largest entries, found in one pass with a threshold that is carried over from the step before."""

from dataclasses import astuple, dataclass

from torch import Tensor

from sparsync.compressors.base import Context, State
from sparsync.compressors.carried_threshold import CarriedThreshold
from sparsync.compressors.selecting import segment_scales
from sparsync.kernels import Memory
from sparsync.kernels.accumulate import Rows
from sparsync.kernels.path import UNLIMITED
from sparsync.kernels.strips import STATE
from sparsync.kernels.threshold import candidates
from sparsync.kernels.threshold.launch import select
from sparsync.kernels.threshold.reference import (
    LOWEST,
    Threshold,
    edge_for,
    estimate,
    jumped,
    next_threshold,
)
from sparsync.kernels.topk import above
from sparsync.layout import Layout, Segment
from sparsync.sparse import SparseGrad


@dataclass(frozen=True)
class ThresholdK(CarriedThreshold):
    """The k largest entries of every segment, but for a few that are nearly equal, and never more than k: one pass
    collects what is above a threshold carried over from the step before, and a histogram of that tells where the k
    largest begin.

    The first threshold comes from a sample, and so do the first after k changed and the one after a jump of the
    gradient.

    Args:
        density: share of the entries to send, in (0, 1].
    """

    graph_safe = True

    @property
    def kernel_limit(self) -> int:
        return UNLIMITED

    def launch(self, grad: Tensor, memory: Memory, layout: Layout, ctx: Context, state: State) -> SparseGrad:
        return select(grad, memory, layout, state, ctx.values, segment_scales(grad, layout, ctx))

    def low(self, segment: Segment, state: State) -> int:
        own = state[segment.name]
        return int(own["floor"]) if int(own["k"]) == segment.k < segment.numel else 0

    def choose(self, u: Tensor, rows: Rows, segment: Segment, ctx: Context, state: State) -> Tensor:
        runs = segment.runs(ctx.unused)
        if segment.k >= segment.numel or not runs:
            return above(u, rows, 0.0)
        own, k = state[segment.name], segment.k
        threshold = Threshold(*(int(own[name]) for name in STATE))
        if threshold.k != k:
            threshold = Threshold(estimate(u, runs, k), k, k // 2, k)
        found = candidates(u, rows, max(LOWEST, threshold.bits))
        edge = edge_for(found.reached, k)
        sent = found.pick(edge, segment.capacity, ctx.step)
        if threshold.bits and not jumped(int(found.reached[0]), k):
            threshold = next_threshold(threshold, found.reached, edge)
        else:
            threshold = Threshold(estimate(u, runs, k) or threshold.bits, k, k // 2, k)
        for name, value in zip(STATE, astuple(threshold), strict=True):
            own[name].fill_(value)
        return sent
