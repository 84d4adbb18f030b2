"""Make the update that a gradient asks for: velocity over the square root of the second moment, times the rate."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsync.kernels.device import usable_on
from sparsync.kernels.memory import Memory, Update
from sparsync.kernels.path import UNLIMITED, KernelPath, choose_path
from sparsync.kernels.precondition import reference
from sparsync.kernels.precondition.reference import Tables
from sparsync.workspace import Workspace


class UpdateBuffer:
    """The update that a half-precision gradient asks for, in full precision."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.values = torch.empty(numel, dtype=torch.float32, device=device)


def came_in(grad: Tensor, memory: Memory, workspace: Workspace) -> Tensor:
    """Return what enters the residual: the gradient, or the update that it asks for, which ``memory`` then has no more;
    with a falling rate the residual has become smaller meanwhile.

    That takes the gradient's own place, or is in fp32 beside it.

    Args:
        workspace: of the gradient's layout; keeps the buffers.
    """
    update, out = memory.update, grad
    if update is None:
        return grad
    if grad.dtype != update.after.dtype:
        out = workspace.get(UpdateBuffer, None, lambda: UpdateBuffer(grad.numel(), grad.device)).values
    precondition(grad, update, out, workspace)
    _shrink(memory, update, workspace)
    memory.update = None
    return out


def _shrink(memory: Memory, update: Update, workspace: Workspace) -> None:
    """Do as ``reference.shrink``, if something shrinks; in place the device knows, as a CUDA graph is to replay it."""
    if memory.before is memory.after and usable_on(memory.after.device):
        from sparsync.kernels.precondition import launch

        launch.shrink(memory.after, update, workspace)
    elif update.tables.shrinks:
        reference.shrink(memory, update)


def precondition(grad: Tensor, update: Update, out: Tensor, workspace: Workspace) -> None:
    """Do as ``reference.precondition``, by what is fastest for this gradient."""
    path = choose_path(grad, Memory(update.before, update.after), UNLIMITED)
    if path is KernelPath.TRITON:
        from sparsync.kernels.precondition import launch

        launch.precondition(grad, update, out, workspace)
    elif path is KernelPath.NUMBA:
        from sparsync.kernels.precondition import cpu

        cpu.precondition(grad, update, out)
    else:
        reference.precondition(grad, update, out)


__all__ = ["Tables", "came_in", "precondition"]
