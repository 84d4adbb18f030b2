"""Base of compressors whose kernels carry a threshold over from the step before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.compressors.base import State
from sparsync.compressors.selecting import Selecting
from sparsync.kernels.strips import STATE
from sparsync.kernels.topk.launch import ENTRIES
from sparsync.layout import Layout


@dataclass(frozen=True)
class CarriedThreshold(Selecting):
    """Holds the thresholds. On the CPU those of an exact compressor stay as they were: it needs none there."""

    fuses_precondition = True
    takes_parts = True

    @property
    def kernel_limit(self) -> int:
        return ENTRIES

    def init(self, layout: Layout) -> State:
        """Per segment: the threshold's bits (0: not known yet), the k it was made for, and candidates to expect."""
        return {
            s.name: {name: torch.zeros((), dtype=torch.int64, device="cpu") for name in STATE} for s in layout.segments
        }

    def accepts(self, bag: Mapping[str, Tensor]) -> bool:
        """Return whether the threshold's bits are those of a magnitude, which kernels have in 32 bits, and nothing
        that is counted is negative."""
        return int(bag["floor"]) < 2**31 and all(int(bag[name]) >= 0 for name in STATE)

    def rescale(self, state: State, ratio: float) -> None:
        for own in state.values():
            scaled = own["floor"].to(torch.int32).view(torch.float32) * ratio
            own["floor"].copy_(scaled.view(torch.int32))
