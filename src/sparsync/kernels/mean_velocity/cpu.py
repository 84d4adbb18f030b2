"""Put momentum into a mean by a loop that numba compiles."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsync.kernels.cpu import array, compiled


@compiled("void(int16[::1], float32, float32[::1], float32, float32[::1])")
def _move(total, scale, velocity, beta, out):
    for i in range(total.shape[0]):
        value = np.int32(np.int32(total[i]) << 16).view(np.float32)  # bf16 is the upper half of fp32
        moved = velocity[i] * beta + value * scale
        velocity[i] = moved
        out[i] = moved


def move(total: Tensor, scale: float, velocity: Tensor, beta: float, out: Tensor) -> None:
    """Do as ``reference.move``, of a sum in bf16."""
    _move(array(total.view(torch.int16)), np.float32(scale), array(velocity), np.float32(beta), array(out))
