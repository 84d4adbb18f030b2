"""Recognise a uniform factor that somebody put on all gradients, and learn from it at what norm these are clipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsync.kernels.device import usable_on
from sparsync.kernels.launcher import Launcher
from sparsync.kernels.learn_clip import reference
from sparsync.kernels.learn_clip.reference import Clipping, learn_clip, note_norms, recognise
from sparsync.workspace import Workspace


class ProbedPart(NamedTuple):
    """A part of a flat gradient, and the number of its tensor."""

    start: int
    numel: int
    number: int


class PartTable:
    """Parts, on the device."""

    def __init__(self, parts: Sequence[ProbedPart], device: torch.device) -> None:
        self.rows, self.launch = torch.tensor(parts, dtype=torch.int64, device=device), Launcher()
        self.numbers = self.rows[:, 2].contiguous()


def note_norms_of(flat: Tensor, parts: tuple[ProbedPart, ...], norms: Tensor, workspace: Workspace) -> None:
    """Do as ``note_norms`` for parts of one flat gradient, by what is fastest.

    Args:
        workspace: of those parts; keeps their table.
    """
    table = workspace.get(PartTable, None, lambda: PartTable(parts, norms.device))
    if flat.dtype is torch.float32 and flat.is_contiguous() and usable_on(norms.device):
        from sparsync.kernels.learn_clip import launch

        launch.note_norms(flat, table.rows, norms, table.launch)
    else:
        note_norms([flat[part.start : part.start + part.numel] for part in parts], table.numbers, norms)


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


__all__ = ["Clipping", "ProbedPart", "find_undo", "learn_clip", "note_norms", "note_norms_of", "recognise"]
