"""Entries beyond a quantile of the normal distribution that has the gradient's mean and deviation."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt
from statistics import NormalDist

import torch
from torch import Tensor

from sparsync.compressors.base import Context, Selecting, State, segment_scales
from sparsync.kernels import Memory, Rows, above, largest, limit
from sparsync.kernels.launch_gaussian import select_gaussian
from sparsync.kernels.search import searchable
from sparsync.kernels.workspace import CODECS as FUSED
from sparsync.kernels.workspace import usable
from sparsync.kernels.workspace_gaussian import FLAT
from sparsync.layout import Layout, Segment
from sparsync.sparse import SparseGrad

MASKS = 4  # so the threshold is adjusted three times at most
CHUNK = 1 << 16  # entries; their float64 copy stays in the cache


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

    two_sided: bool = False
    refine: bool = False

    def capacity(self, k: int, numel: int) -> int:
        return min(numel, k + ceil(k / 10) if self.refine else 8 * k)

    def compress(self, grad: Tensor, memory: Memory | None, layout: Layout, ctx: Context, state: State) -> SparseGrad:
        assert memory is not None
        ready = (searchable if self.refine else usable)(grad, memory)
        fused = ready and ctx.values in FUSED and bool(layout.segments)
        if fused and not ctx.whole and not ctx.unused:
            scales = segment_scales(grad, layout, ctx)
            return select_gaussian(grad, memory, layout, self.two_sided, self.refine, ctx.values, scales)
        return super().compress(grad, memory, layout, ctx, state)

    def choose(self, u: Tensor, rows: Rows, segment: Segment, ctx: Context, state: State) -> Tensor:
        runs = segment.runs(ctx.unused)
        if segment.k >= sum(stop - start for start, stop in runs):
            return above(u, rows, 0.0)
        found, counts = self.search(u, rows, runs, segment.k)
        if self.refine and not 0.9 * segment.k <= counts[-1] <= segment.capacity:
            return largest(u, rows, segment.k)
        return limit(found, segment.capacity, ctx.step)

    def search(self, u: Tensor, rows: Rows, runs: Sequence[tuple[int, int]], k: int) -> tuple[Tensor, list[int]]:
        """The paper's loop: ascending indices of the last mask, whatever its count, and the count of every mask."""
        numel, mean, deviation = _moments(u, runs)
        tail = k / (2 * numel) if self.two_sided else k / numel
        threshold = mean + deviation * NormalDist().inv_cdf(1 - tail)
        found = _beyond(u, rows, threshold)
        counts = [found.numel()]
        while len(counts) < MASKS and not 2 * k / 3 <= counts[-1] <= 4 * k / 3:
            threshold *= 0.5 if counts[-1] < 2 * k / 3 else 1.5
            found = _beyond(u, rows, threshold)
            counts.append(found.numel())
        return found, counts


def _moments(u: Tensor, runs: Sequence[tuple[int, int]]) -> tuple[int, float, float]:
    """Number, mean and standard deviation of the entries of ``runs``."""
    sums = torch.stack([_sums(u[start:stop]) for start, stop in runs])
    total, energy = sums.sum(0).tolist()
    numel = sum(stop - start for start, stop in runs)
    mean, energy = total / numel, energy / numel
    variance = energy - mean * mean
    return numel, mean, sqrt(variance) if variance > FLAT * energy else 0.0


def _sums(u: Tensor) -> Tensor:
    """The sums of entries and of their squares, in float64."""
    if u.device.type != "cpu":  # converts as it reads
        norm = torch.linalg.vector_norm(u, dtype=torch.float64)
        return torch.stack([u.sum(dtype=torch.float64), norm * norm])
    chunks = (chunk.double() for chunk in torch.split(u, CHUNK))
    return torch.stack([torch.stack([x.sum(), torch.dot(x, x)]) for x in chunks]).sum(0)


def _beyond(u: Tensor, rows: Rows, threshold: float) -> Tensor:
    """Indices of magnitudes above ``threshold``, not at it: what reaches the next number that ``u`` can hold."""
    bound = torch.tensor(threshold, dtype=u.dtype)
    return above(u, rows, torch.nextafter(bound, torch.tensor(inf, dtype=u.dtype)).item())
