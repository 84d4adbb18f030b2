"""Apply an update to parameters, with weight decay beside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync.kernels.apply_update import reference
from sparsync.kernels.apply_update.reference import Change
from sparsync.kernels.device import usable_on
from sparsync.workspace import Workspace


def apply_update(changes: Sequence[Change], skip: Tensor | None, workspace: Workspace) -> None:
    """Do as ``reference.apply_update``, by what is fastest for each parameter.

    Args:
        workspace: of the optimizer; keeps the buffers.
    """
    simple = list(map(_simple, changes))
    if any(simple):
        from sparsync.kernels.apply_update import launch

        launch.apply_update([change for change, own in zip(changes, simple, strict=True) if own], skip, workspace)
    if not all(simple):
        reference.apply_update([change for change, own in zip(changes, simple, strict=True) if not own], skip)


def _simple(change: Change) -> bool:
    """Return whether the kernel can change this parameter: fp32, and in memory as its gradient is, without gaps."""
    parameter, grad = change.parameter, change.grad
    if not (usable_on(parameter.device) and parameter.numel() and parameter.dtype == grad.dtype == torch.float32):
        return False
    if parameter.is_contiguous():
        return grad.is_contiguous()
    return all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (parameter, grad))


__all__ = ["Change", "apply_update"]
