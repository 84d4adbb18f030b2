"""Random words from a counter: the same on every device."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

MASK_32 = 0xFFFFFFFF
STRIDE = 0x9E3779B9
FACTORS = (0x85EBCA6B, 0xC2B2AE35)

T = TypeVar("T", int, Tensor)


def scramble(x: T) -> T:
    """Return 32 bits that look random, one to one with those of ``x``."""
    x = ((x ^ (x >> 16)) * FACTORS[0]) & MASK_32
    x = ((x ^ (x >> 13)) * FACTORS[1]) & MASK_32
    return x ^ (x >> 16)
