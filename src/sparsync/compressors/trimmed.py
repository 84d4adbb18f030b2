"""Exact top-k, searched between the mean and the largest magnitude."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.compressors.base import Context, Selecting, State
from sparsync.kernels import Rows, above, largest
from sparsync.layout import Segment

RATIOS = (0.8, 0.6, 0.4, 0.2, 0.0)


@dataclass(frozen=True)
class TrimmedK(Selecting):
    """Trimmed top-k, from "RedSync" (Fang et al.): thresholds step down until k entries survive, then exact top-k.

    It chooses what ``TopK`` chooses, equals included. Use it to compare with RedSync: where one pass has left the peak
    of every row behind, as here, ``TopK`` finds the same entries with less work.

    Args:
        density: share of the entries to send, in (0, 1].
    """

    def choose(self, u: Tensor, rows: Rows, segment: Segment, ctx: Context, state: State) -> Tensor:
        runs, k = segment.runs(ctx.asleep), segment.k
        numel = sum(stop - start for start, stop in runs)
        if k >= numel:
            return above(u, rows, 0.0)
        mean = sum(torch.linalg.vector_norm(u[start:stop], 1).item() for start, stop in runs) / numel
        peak = rows.peak.max().item()
        for ratio in RATIOS:
            threshold = mean + ratio * (peak - mean)
            if above(u, rows, threshold).numel() >= k:
                hot = rows.peak >= threshold  # survivors are in these rows only
                return largest(u, Rows(rows.start[hot], rows.stop[hot], rows.peak[hot]), k)
        return largest(u, rows, k)  # fewer than k lie above the mean: everything survives
