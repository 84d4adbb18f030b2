"""What a message is made for, and bits in 32-bit words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 4  # bytes


@dataclass(frozen=True)
class Shape:
    """What fixes the size of a message: the gradient's length, room for entries, segments, and the residual's dtype."""

    numel: int
    capacity: int
    segments: int
    dtype: torch.dtype


def words_for(bits: int) -> int:
    """Whole 32-bit words that hold ``bits``."""
    return -(-bits // 32)


def unpack_bits(words: Tensor) -> Tensor:
    """The bits of 32-bit words as booleans, lowest first."""
    lane = 1 << torch.arange(32, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(1) & lane).view(-1) != 0
