"""Entries beyond a quantile of the normal distribution that has the gradient's mean and deviation."""

from dataclasses import dataclass
from math import ceil

from torch import Tensor

from sparsync.compressors.base import Context, State
from sparsync.compressors.selecting import Selecting, segment_scales
from sparsync.kernels import Memory
from sparsync.kernels.accumulate import Rows
from sparsync.kernels.gaussian.launch import select
from sparsync.kernels.gaussian.reference import search
from sparsync.kernels.path import UNLIMITED
from sparsync.kernels.topk import above, largest, limit
from sparsync.kernels.topk.launch import ENTRIES
from sparsync.layout import Layout, Segment
from sparsync.sparse import SparseGrad


@dataclass(frozen=True)
class GaussianK(Selecting):
    """Gaussian-k, from "Understanding Top-k Sparsification in Distributed Deep Learning" (Shi et al.), Algorithm 1.

    As printed, its count is anything from nothing at all (equal entries) to ``capacity``, and half of k on a perfect
    normal. Use it so to reproduce that paper, with ``refine`` when the count must be right; to train, ``ThresholdK``
    needs no estimate and fewer passes.

    Args:
        density: share of the entries to send, in (0, 1].
        two_sided: take the quantile 1 - k/(2d), as magnitudes ask for, instead of the printed 1 - k/d.
        refine: when the last count is more than 10 % off k (rounded up), send exactly the k largest instead. On a GPU
            such a segment is read several times more, and nothing waits for the host.
    """

    graph_safe = True

    two_sided: bool = False
    refine: bool = False

    def capacity(self, k: int, numel: int) -> int:
        return min(numel, k + ceil(k / 10) if self.refine else 8 * k)

    @property
    def kernel_limit(self) -> int:
        return ENTRIES if self.refine else UNLIMITED

    def launch(self, grad: Tensor, memory: Memory, layout: Layout, ctx: Context, state: State) -> SparseGrad:
        scales = segment_scales(grad, layout, ctx)
        return select(grad, memory, layout, self.two_sided, self.refine, ctx.values, scales)

    def choose(self, u: Tensor, rows: Rows, segment: Segment, ctx: Context, state: State) -> Tensor:
        runs = segment.runs(ctx.unused)
        if segment.k >= sum(stop - start for start, stop in runs):
            return above(u, rows, 0.0)
        found, counts = search(u, rows, runs, segment.k, self.two_sided)
        if self.refine and not 0.9 * segment.k <= counts[-1] <= segment.capacity:
            return largest(u, rows, segment.k)
        return limit(found, segment.capacity, ctx.step)
