"""Entries above a threshold that is carried over from the step before and held where about k entries pass it."""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from sparsync.compressors.base import Context, Selecting, State
from sparsync.kernels import Rows, above, limit, sampled_threshold
from sparsync.layout import Layout, Segment

SMOOTHING = 0.3  # weight of the newest inflow in its running mean


@dataclass(frozen=True)
class ThresholdK(Selecting):
    """About the k largest entries of every segment, found in one pass with the threshold of the step before.

    Behind a threshold the residual ends: what was above it is gone. So the next count is what the coming gradient lifts
    over it (the inflow, a running mean) plus what the threshold is lowered into. The threshold is set where both
    together make k; while the inflow alone makes more, it rises. The first threshold comes from a sample, and so does
    the first after k changed.

    Args:
        density: share of the entries to send, in (0, 1].
        slack: room in the message beyond k, as a share of k; what does not fit stays in the residual.
    """

    slack: float = 0.125

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.slack >= 0:
            raise ValueError(f"slack must be 0 or more, got {self.slack!r}")

    def capacity(self, k: int, numel: int) -> int:
        return k + ceil(self.slack * k)

    def init(self, layout: Layout) -> State:
        """Per segment: threshold (0: not known yet), the k it was made for, inflow, and the count without inflow."""
        names = ("threshold", "k", "inflow", "expected")
        return {s.name: {name: torch.zeros((), dtype=torch.float64) for name in names} for s in layout.segments}

    def rescale(self, state: State, ratio: float) -> None:
        for own in state.values():
            own["threshold"] *= ratio

    def choose(self, u: Tensor, rows: Rows, segment: Segment, ctx: Context, state: State) -> Tensor:
        if segment.k >= segment.numel or not rows.peak.numel():
            return above(u, rows, 0.0)
        own, runs, k = state[segment.name], segment.runs(ctx.asleep), segment.k
        fresh = own["threshold"].item() == 0 or own["k"].item() != k
        threshold = sampled_threshold(u, runs, k) if fresh else own["threshold"].item()
        found = above(u, rows, threshold)
        sent = limit(found, segment.capacity, ctx.step)
        inflow = found.numel() - own["expected"].item()
        inflow = k / 2 if fresh else (1 - SMOOTHING) * own["inflow"].item() + SMOOTHING * max(0.0, inflow)

        left = found.numel() - sent.numel()
        missing = k - left - inflow
        if missing > 0:  # down to where that many more rows have their peak
            rank = int((rows.peak >= threshold).sum()) + ceil(missing)
            inside = rank <= rows.peak.numel()
            threshold = torch.topk(rows.peak, rank).values[-1].item() if inside else sampled_threshold(u, runs, k)
            expected = left + missing
        else:
            if found.numel() > k:  # up to where k would have passed, or fewer while ever more come in
                rank = max(1, round(k * min(1.0, k / (inflow + left))))
                threshold = torch.topk(u[found].abs(), rank, sorted=False).values.min().item()
            expected = left * min(1.0, k / max(1, found.numel()))
        for name, value in (("threshold", threshold), ("k", k), ("inflow", inflow), ("expected", expected)):
            own[name].fill_(value)
        return sent
