"""What the exact kernels need beside the fused ones' workspace: made when they are first used."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsync.kernels.memory import Memory
from sparsync.kernels.workspace import Workspace, usable
from sparsync.layout import Layout

DIGIT = 11
MAGNITUDE = 31
INFINITE = 0x7F800000  # a floor that nothing reaches
ENTRIES = 2**31  # a gradient must have fewer: they are counted in 32 bits


def searchable(grad: Tensor, memory: Memory) -> bool:
    """Whether the exact kernels can take this gradient."""
    return usable(grad, memory) and grad.numel() < ENTRIES


class Digits:
    """Ranges of keys and sums of their digits, for every round and segment.

    Args:
        layout: of the flat gradient.
        device: where it is.
        fallbacks: how often a segment was searched for in the residual so far, one int64 on the device.
    """

    def __init__(self, layout: Layout, device: torch.device, fallbacks: Tensor | None = None) -> None:
        segments = len(layout.segments)
        self.index_bits = (layout.numel - 1).bit_length()
        self.highest = (1 << self.index_bits) - 1
        self.rounds = -(-(MAGNITUDE + self.index_bits) // DIGIT)
        self.ranges = torch.zeros((self.rounds + 1) * segments * 5, dtype=torch.int64, device=device)
        self.sums = torch.zeros(self.rounds * segments << DIGIT, dtype=torch.int32, device=device)
        self.fallbacks = fallbacks if fallbacks is not None else torch.zeros((), dtype=torch.int64, device=device)


class Search(Digits):
    """The same, and what the floors of ``space`` must be.

    Args:
        space: of the same gradient.
        fallbacks: as there.
    """

    def __init__(self, space: Workspace, fallbacks: Tensor | None = None) -> None:
        super().__init__(space.layout, space.device, fallbacks)
        self.space, device = space, space.device
        sparse = [segment.k < segment.numel for segment in space.layout.segments]
        self._wanted = torch.tensor([segment.k for segment in space.layout.segments], device=device)
        self._sparse = torch.tensor(sparse, device=device)

    def forget_floors(self) -> None:
        """Raise floors that are not known, or were made for another k, above everything: then the fallback finds one.

        Where all is sent there is no floor, nor one left of sparser days.
        """
        floors, made_for = self.space.state.unbind(1)[:2]
        floors.masked_fill_(~self._sparse, 0)
        floors.masked_fill_(self._sparse & ((made_for != self._wanted) | (floors == 0)), INFINITE)


def search_of(memory: Memory, space: Workspace) -> Search:
    """The search that lives beside this memory's workspace."""
    known = memory.workspace.get("search")
    if known is None or known.space is not space:
        known = memory.workspace["search"] = Search(space, known.fallbacks if known is not None else None)
    return known
