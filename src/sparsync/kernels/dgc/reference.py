"""DGC's random sample: the same entries on every device, from (seed, step, segment)."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from sparsync.kernels.rng import MASK_32, STRIDE, scramble

SHARE, ROUNDS = 0.8, 10  # a threshold that too few reach is multiplied by the former, so often


def seed_of(seed: int, name: str) -> int:
    """Return the part of a segment's key that no step changes."""
    return zlib.crc32(f"{seed} {name}".encode())


def dgc_sample(base: int, step: int, numel: int, wanted: int, device: torch.device) -> Tensor:
    """Return ``wanted`` random positions below ``numel``, or all of them; ``base`` is from ``seed_of``."""
    number = torch.arange(wanted, dtype=torch.int64, device=device)
    if wanted == numel:
        return number
    key = scramble((base + step * STRIDE) & MASK_32)
    one = scramble((number * STRIDE + key) & MASK_32)
    two = scramble((one + key + 1) & MASK_32)
    return (one << 30 | two >> 2) % numel
