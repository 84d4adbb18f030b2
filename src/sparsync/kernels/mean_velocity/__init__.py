"""Put momentum into a mean that came as a sum in bf16: velocity and gradient in one pass."""

import torch
from torch import Tensor

from sparsync.kernels.cpu import usable
from sparsync.kernels.mean_velocity import reference


def move(total: Tensor, scale: float, velocity: Tensor, beta: float, out: Tensor) -> None:
    """Do as ``reference.move``, by what is fastest."""
    if total.dtype == torch.bfloat16 and out.dtype == torch.float32 and usable(velocity, out, total):
        from sparsync.kernels.mean_velocity.cpu import move as move_by_loop

        move_by_loop(total, scale, velocity, beta, out)
    else:
        reference.move(total, scale, velocity, beta, out)


__all__ = ["move"]
