"""Apply an update to parameters, with weight decay beside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync.kernels.apply_update import reference
from sparsync.kernels.apply_update.reference import ParameterChange, subtract
from sparsync.kernels.device import usable_on
from sparsync.workspace import Workspace


def apply_update(changes: Sequence[ParameterChange], undo: Tensor, skip: Tensor | None, workspace: Workspace) -> None:
    """Do as ``reference.apply_update``, by what is fastest for each parameter.

    Args:
        workspace: of the optimizer; keeps the buffers.
    """
    usable = bool(changes) and usable_on(changes[0].parameter.device)
    simple = [change for change in changes if usable and _simple(change.parameter, change.grad)]
    if simple:
        from sparsync.kernels.apply_update import launch

        launch.apply_update(simple, undo, skip, workspace)
    if len(simple) < len(changes):
        others = [change for change in changes if not (usable and _simple(change.parameter, change.grad))]
        reference.apply_update(others, undo, skip)


def _simple(parameter: Tensor, grad: Tensor) -> bool:
    """Return whether the kernel can change this parameter: fp32, and in memory as its gradient is, without gaps."""
    if not (parameter.dtype is torch.float32 and grad.dtype is torch.float32 and parameter.numel()):
        return False
    if parameter.is_contiguous():
        return grad.is_contiguous()
    return all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (parameter, grad))


__all__ = ["ParameterChange", "apply_update", "subtract"]
