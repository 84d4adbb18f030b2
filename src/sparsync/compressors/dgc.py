"""Entries above a threshold that is estimated anew in every step, from a random sample."""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from sparsync.compressors.base import Context, State
from sparsync.compressors.carried_threshold import CarriedThreshold
from sparsync.compressors.selecting import segment_scales
from sparsync.kernels import Memory
from sparsync.kernels.accumulate import Rows
from sparsync.kernels.dgc.launch import select
from sparsync.kernels.dgc.reference import ROUNDS, SHARE, dgc_sample, seed_of
from sparsync.kernels.topk import above, largest
from sparsync.layout import Layout, Segment, locate
from sparsync.sparse import SparseGrad

LEAST, MOST = 0.8, 1.3  # counts that are accepted, as shares of k


@dataclass(frozen=True)
class DGCK(CarriedThreshold):
    """The selection of "Deep Gradient Compression" (Lin et al.): between 0.8 k and 1.3 k of the largest entries.

    Use it to compare with DGC: its random sample is meant for devices on which exact top-k is slow, and on a CPU, after
    the pass that leaves the rows' peaks behind, ``TopK`` costs no more and its count is exact. The sample depends on
    (seed, step, segment) alone: a CUDA graph that repeats a step repeats its sample.

    Args:
        density: share of the entries to send, in (0, 1].
        sample: share of the entries the threshold is estimated from, in (0, 1]; never fewer than 2/density entries.
    """

    sample: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.sample, int | float) and 0 < self.sample <= 1):
            raise ValueError(f"sample must be above 0 and at most 1, got {self.sample!r}")

    def capacity(self, k: int, numel: int) -> int:
        return min(numel, ceil(MOST * k))

    def launch(self, grad: Tensor, memory: Memory, layout: Layout, ctx: Context, state: State) -> SparseGrad:
        scales = segment_scales(grad, layout, ctx)
        return select(grad, memory, layout, state, ctx.values, scales, self._plan, ctx.seed, ctx.step)

    def choose(self, u: Tensor, rows: Rows, segment: Segment, ctx: Context, state: State) -> Tensor:
        runs, k = segment.runs(ctx.unused), segment.k
        numel = sum(stop - start for start, stop in runs)
        if k >= numel:
            return above(u, rows, 0.0)
        wanted, rank = self._sizes(k, numel)
        drawn = dgc_sample(seed_of(ctx.seed, segment.name), ctx.step, numel, wanted, u.device)
        threshold = torch.topk(u[locate(drawn, runs)].abs(), rank).values[-1]
        found = above(u, rows, threshold.item())
        for _ in range(ROUNDS):
            if found.numel() >= LEAST * k or threshold == 0:
                break
            threshold = threshold * SHARE  # rounded to the residual's own dtype each time
            found = above(u, rows, threshold.item())
        # The k largest of the survivors are the k largest of all.
        return found if found.numel() <= segment.capacity else largest(u, rows, k)

    def _sizes(self, k: int, numel: int) -> tuple[int, int]:
        """Return how many entries are drawn, and the threshold's rank among them."""
        wanted = min(numel, max(ceil(self.sample * numel), ceil(2 * numel / k)))
        return wanted, max(1, round(wanted * k / numel))

    def _plan(self, segment: Segment) -> tuple[int, int, int]:
        if segment.k >= segment.numel:
            return 0, 0, 0
        return *self._sizes(segment.k, segment.numel), ceil(LEAST * segment.k)
