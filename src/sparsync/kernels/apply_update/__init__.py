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
    ours = [change for change in changes if _simple(change)]
    if ours:
        from sparsync.kernels.apply_update import launch

        launch.apply_update(ours, skip, workspace)
    if len(ours) < len(changes):
        reference.apply_update([change for change in changes if not _simple(change)], skip)


def _simple(change: Change) -> bool:
    """Return whether the kernel can change this parameter: fp32, and in memory as its gradient is, without gaps."""
    parameter, grad = change.parameter, change.grad
    if not (usable_on(parameter.device) and parameter.numel() and parameter.dtype == grad.dtype == torch.float32):
        return False
    formats = (torch.contiguous_format, torch.channels_last)
    return any(all(t.is_contiguous(memory_format=kind) for t in (parameter, grad)) for kind in formats)


__all__ = ["Change", "apply_update"]
