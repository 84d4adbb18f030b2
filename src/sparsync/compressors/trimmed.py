"""Exact top-k, searched between the mean and the largest magnitude."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.compressors.base import Context, State
from sparsync.compressors.carried_threshold import CarriedThreshold
from sparsync.compressors.selecting import segment_scales
from sparsync.kernels import Memory
from sparsync.kernels.accumulate import Rows
from sparsync.kernels.topk import above, largest
from sparsync.kernels.topk.launch import select
from sparsync.layout import Layout, Segment
from sparsync.sparse import SparseGrad

RATIOS = (0.8, 0.6, 0.4, 0.2, 0.0)


@dataclass(frozen=True)
class TrimmedK(CarriedThreshold):
    """Trimmed top-k, from "RedSync" (Fang et al.): thresholds step down until k entries survive, then exact top-k.

    It chooses what ``TopK`` chooses, equals included. Use it to compare with RedSync: where one pass has left the peak
    of every row behind, as here, ``TopK`` finds the same entries with less work. On a GPU both run the same kernels.

    Args:
        density: share of the entries to send, in (0, 1].
    """

    graph_safe = True

    def launch(self, grad: Tensor, memory: Memory, layout: Layout, ctx: Context, state: State) -> SparseGrad:
        return select(grad, memory, layout, state, ctx.values, segment_scales(grad, layout, ctx))

    def choose(self, u: Tensor, rows: Rows, segment: Segment, ctx: Context, state: State) -> Tensor:
        runs, k = segment.runs(ctx.unused), segment.k
        numel = sum(stop - start for start, stop in runs)
        if k >= numel:
            return above(u, rows, 0.0)
        mean = sum(torch.linalg.vector_norm(u[start:stop], 1).item() for start, stop in runs) / numel
        peak = rows.peak.max().item()
        for ratio in RATIOS:
            threshold = mean + ratio * (peak - mean)
            if above(u, rows, threshold).numel() >= k:
                hot = rows.peak >= threshold  # survivors are in these rows only
                return largest(u, rows.subset(hot), k)
        return largest(u, rows, k)  # fewer than k lie above the mean: everything survives
