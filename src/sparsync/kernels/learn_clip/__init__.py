"""Recognise a uniform factor that somebody put on all gradients, and learn from it at what norm these are clipped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync.kernels.device import usable_on
from sparsync.kernels.learn_clip import reference
from sparsync.kernels.learn_clip.reference import Clipping, learn_clip, recognise
from sparsync.workspace import Workspace


def find_undo(grads: Sequence[Tensor], numbers: tuple[int, ...], clipping: Clipping, workspace: Workspace) -> Tensor:
    """Do as ``reference.find_undo``, by what is fastest; the next call overwrites what is returned.

    Args:
        workspace: of the optimizer; keeps the buffers.
    """
    simple = all(grad.dtype is torch.float32 and grad.is_contiguous() for grad in grads)
    if simple and usable_on(clipping.norms.device):
        from sparsync.kernels.learn_clip import launch

        return launch.find_undo(grads, numbers, clipping, workspace)
    return reference.find_undo(grads, numbers, clipping)


__all__ = ["Clipping", "find_undo", "learn_clip", "recognise"]
