"""Entries above a threshold that is carried over from the step before and held where about k entries pass it."""

from dataclasses import dataclass
from math import ceil, log

import torch
from torch import Tensor

from sparsync.compressors.base import Context, Selecting, State
from sparsync.kernels import Rows, above, limit, sampled_threshold
from sparsync.layout import Layout, Segment


@dataclass(frozen=True)
class ThresholdK(Selecting):
    """About the k largest entries of every segment, found in one pass with last step's threshold.

    The first step, and any step after the count left [k/2, 2k], takes its threshold from a sample. In between a
    controller moves it: where magnitudes have an exponential tail, the count falls as threshold^(-ln(n/k)), so the
    step it takes is (count/k)^(1/ln(n/k)).

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
        """A threshold of 0 is one that is not known yet; ``k`` is the budget it was made for."""
        unknown = torch.tensor([0.0, 0.0], dtype=torch.float64)
        return {s.name: {"threshold": unknown[0].clone(), "k": unknown[1].clone()} for s in layout.segments}

    def rescale(self, state: State, ratio: float) -> None:
        for own in state.values():
            own["threshold"] *= ratio

    def choose(self, u: Tensor, rows: Rows, segment: Segment, ctx: Context, state: State) -> Tensor:
        own, k = state[segment.name], segment.k
        if k >= segment.numel:
            return above(u, rows, 0.0)
        threshold = own["threshold"].item()
        if threshold == 0 or own["k"].item() != k:
            threshold = sampled_threshold(u, segment.runs(ctx.asleep), k)
        found = above(u, rows, threshold)
        count = found.numel()
        if k / 2 - 2 <= count <= 2 * k + 2:
            threshold *= (max(count, 0.5) / k) ** (1 / max(1.0, log(segment.numel / k)))
        else:
            threshold = sampled_threshold(u, segment.runs(ctx.asleep), k)
        own["threshold"].fill_(threshold)
        own["k"].fill_(k)
        return limit(found, segment.capacity, ctx.step)
