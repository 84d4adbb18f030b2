"""Entries beyond a quantile of the normal distribution that has the gradient's mean and deviation."""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from sparsync.compressors.base import Context, State
from sparsync.compressors.selecting import Selecting, segment_scales
from sparsync.kernels import Memory
from sparsync.kernels.accumulate import Rows
from sparsync.kernels.gaussian.launch import GaussianKind, select
from sparsync.kernels.gaussian.reference import CARRIED, MASKS, enough, hold, search
from sparsync.kernels.path import UNLIMITED
from sparsync.kernels.topk import above, largest, limit
from sparsync.kernels.topk.launch import ENTRIES
from sparsync.layout import Layout, Segment
from sparsync.sparse import SparseGrad


@dataclass(frozen=True)
class GaussianK(Selecting):
    """Gaussian-k, from "Understanding Top-k Sparsification in Distributed Deep Learning" (Shi et al.), Algorithm 1.

    As printed, its count is anything from nothing at all (equal entries) to ``capacity``, and half of k on a perfect
    normal. Its authors' code is ``two_sided`` with three ``masks``. Use it so to reproduce that paper, with ``refine``
    when the count must be right; to train, ``ThresholdK`` needs no estimate and fewer passes.

    Args:
        density: share of the entries to send, in (0, 1].
        two_sided: take the quantile 1 - k/(2d), as magnitudes ask for, instead of the printed 1 - k/d.
        refine: when the last count is more than 10 % off k (rounded up), send exactly the k largest instead, which in
            training is nearly always so. ``"carried"``: the threshold that lets k through is searched, by counting at
            24 around the quantile times the factor that the step before ended with, so that it is hardly ever so; as
            of many equal entries a threshold takes all or none, two thirds of k are enough then, as in the paper's
            loop. On a GPU a segment whose k largest go is read several times more, and nothing waits for the host.
            State counts these ``fallbacks``.
        masks: how many the loop makes at most, 3 or 4.
    """

    graph_safe = True

    two_sided: bool = False
    refine: bool | str = False
    masks: int = MASKS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refine not in (False, True, CARRIED):
            raise ValueError(f"refine must be False, True or {CARRIED!r}, got {self.refine!r}")
        if self.masks not in (MASKS - 1, MASKS):
            raise ValueError(f"masks must be {MASKS - 1} or {MASKS}, got {self.masks!r}")

    def capacity(self, k: int, numel: int) -> int:
        return min(numel, k + ceil(k / 10) if self.refine else 8 * k)

    @property
    def kernel_limit(self) -> int:
        return ENTRIES if self.refine else UNLIMITED

    def init(self, layout: Layout) -> State:
        """Per segment, where the count is held: the quantile's factor, and how often the k largest went instead."""
        if not self.refine:
            return {}
        one, none = torch.ones((), dtype=torch.float64, device="cpu"), torch.zeros((), dtype=torch.int64, device="cpu")
        return {s.name: {"factor": one.clone(), "fallbacks": none.clone()} for s in layout.segments}

    def launch(self, grad: Tensor, memory: Memory, layout: Layout, ctx: Context, state: State) -> SparseGrad:
        scales = segment_scales(grad, layout, ctx)
        kind = GaussianKind(self.two_sided, bool(self.refine), self.refine == CARRIED, self.masks)
        return select(grad, memory, layout, kind, state, ctx.values, scales)

    def choose(self, u: Tensor, rows: Rows, segment: Segment, ctx: Context, state: State) -> Tensor:
        runs = segment.runs(ctx.unused)
        if segment.k >= sum(stop - start for start, stop in runs):
            return above(u, rows, 0.0)
        if self.refine == CARRIED:
            last = state[segment.name]["factor"]
            found, factor = hold(u, rows, runs, segment.k, self.two_sided, float(last), segment.capacity)
            last.fill_(factor)
        else:
            found, _ = search(u, rows, runs, segment.k, self.two_sided, self.masks)
        right = enough(found.numel(), segment.k, self.refine == CARRIED) and found.numel() <= segment.capacity
        if self.refine and not right:
            state[segment.name]["fallbacks"].add_(1)
            return largest(u, rows, segment.k)
        return limit(found, segment.capacity, ctx.step)
