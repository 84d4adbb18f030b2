"""Base of compressors whose kernels carry a floor over from the step before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.compressors.base import Context, Selecting, State
from sparsync.kernels import Memory
from sparsync.kernels.search import searchable
from sparsync.kernels.workspace import CODECS, STATE
from sparsync.layout import Layout


@dataclass(frozen=True)
class Floored(Selecting):
    """Holds the floors. On the CPU those of an exact compressor stay as they were: it needs none there."""

    def init(self, layout: Layout) -> State:
        """Per segment: the floor's bits (0: not known yet), the k it was made for, and candidates to expect."""
        return {s.name: {name: torch.zeros((), dtype=torch.int64) for name in STATE} for s in layout.segments}

    def rescale(self, state: State, ratio: float) -> None:
        for own in state.values():
            scaled = own["floor"].to(torch.int32).view(torch.float32) * ratio
            own["floor"].copy_(scaled.view(torch.int32))


def on_device(grad: Tensor, memory: Memory, layout: Layout, ctx: Context) -> bool:
    """Whether the exact kernels do what is asked for."""
    known = ctx.values in CODECS and not ctx.whole and not ctx.unused
    return known and searchable(grad, memory) and bool(layout.segments)
