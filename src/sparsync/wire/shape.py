"""What a message is made for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

WORD = 4  # bytes


@dataclass(frozen=True)
class Shape:
    """What a message is made for.

    Args:
        numel: length of the flat gradient.
        capacity: room for entries.
        segments: how many.
        dtype: of the residual.
        slots: of every segment, its entries in a message and its ``(start, stop)`` ranges in the flat gradient.
    """

    numel: int
    capacity: int
    segments: int
    dtype: torch.dtype
    slots: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()

    @property
    def runs(self) -> list[tuple[int, int]]:
        """All segments' ranges, one after another."""
        return [run for _, runs in self.slots for run in runs]
