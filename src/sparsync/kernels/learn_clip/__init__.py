"""Recognise a uniform factor that somebody put on all gradients, and learn from it at what norm these are clipped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync.kernels.device import usable_on
from sparsync.kernels.learn_clip import reference
from sparsync.kernels.learn_clip.reference import Clipping, learn_clip, recognise
from sparsync.workspace import Workspace


class TensorIndex:
    """The numbers of tensors, on the device."""

    def __init__(self, numbers: tuple[int, ...], device: torch.device) -> None:
        self.numbers = torch.tensor(numbers, dtype=torch.int64, device=device)


def find_undo(grads: Sequence[Tensor], numbers: tuple[int, ...], clipping: Clipping, workspace: Workspace) -> Tensor:
    """Do as ``reference.find_undo``, by what is fastest; the next call overwrites what is returned.

    Args:
        workspace: of the optimizer; keeps the buffers.
    """
    if _by_kernels(grads, clipping.norms.device):
        from sparsync.kernels.learn_clip import launch

        return launch.find_undo(grads, numbers, clipping, workspace)
    return reference.find_undo(grads, numbers, clipping)


def note_norms(grads: Sequence[Tensor], numbers: tuple[int, ...], norms: Tensor, workspace: Workspace) -> None:
    """Do as ``reference.note_norms``, by what is fastest.

    Args:
        workspace: of those gradients; keeps the buffers.
    """
    if _by_kernels(grads, norms.device):
        from sparsync.kernels.learn_clip import launch

        launch.note_norms(grads, numbers, norms, workspace)
    else:
        index = workspace.get(TensorIndex, (numbers, norms.device), lambda: TensorIndex(numbers, norms.device))
        reference.note_norms(grads, index.numbers, norms)


def _by_kernels(grads: Sequence[Tensor], device: torch.device) -> bool:
    return all(grad.dtype is torch.float32 and grad.is_contiguous() for grad in grads) and usable_on(device)


__all__ = ["Clipping", "find_undo", "learn_clip", "note_norms", "recognise"]
