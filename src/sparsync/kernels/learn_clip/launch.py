"""The kernels that recognise a factor on all gradients, launched; and their tables, which stay while they are true."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsync.kernels.device import on_device_of
from sparsync.kernels.launcher import Launcher
from sparsync.kernels.learn_clip.reference import Clipping
from sparsync.kernels.strips import BLOCK, ChangingTable
from sparsync.workspace import Workspace


class ProbeRow(NamedTuple):
    """A gradient: its address, how many entries it has, and the number of its tensor."""

    address: int
    numel: int
    number: int


class ProbeBuffers:
    """The gradients that are looked at, their sums of squares, and what undoes what was done to them."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.launch, self.rows = Launcher(), ChangingTable(count, len(ProbeRow._fields), device)
        self.squares = torch.zeros(max(1, count), dtype=torch.float64, device=device)
        self.undo = torch.ones((), dtype=torch.float32, device=device)


def note_norms(flat: Tensor, parts: Tensor, norms: Tensor, launch: Launcher) -> None:
    """Do as ``reference.note_norms``: nothing waits for the host, nothing is allocated."""
    from sparsync.kernels.learn_clip import triton as kernels

    with on_device_of(norms):
        launch(kernels.note_norms, (parts.shape[0],), flat, parts, norms, BLOCK=BLOCK, num_warps=4)


def find_undo(grads: Sequence[Tensor], numbers: Sequence[int], clipping: Clipping, workspace: Workspace) -> Tensor:
    """Do as ``reference.find_undo``: nothing waits for the host."""
    from sparsync.kernels.learn_clip import triton as kernels

    count, device = len(grads), clipping.norms.device
    space = workspace.get(ProbeBuffers, (count, device), lambda: ProbeBuffers(count, device))
    rows = space.rows.update([(g.data_ptr(), g.numel(), number) for g, number in zip(grads, numbers, strict=True)])
    with on_device_of(clipping.norms):
        if count:
            space.launch(kernels.measure, (count,), rows, space.squares, BLOCK=BLOCK, num_warps=4)
        space.launch(
            kernels.find_undo, (1,),
            rows, space.squares, clipping.norms, clipping.summary, clipping.max_norm, clipping.apart, space.undo, count,
            clipping.scale, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return space.undo
