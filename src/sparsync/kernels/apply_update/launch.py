"""The kernel that changes parameters, launched once for all of them; and its tables, which stay while they are true."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsync.kernels.apply_update.reference import ParameterChange
from sparsync.kernels.device import on_device_of
from sparsync.kernels.launcher import Launcher
from sparsync.kernels.strips import BLOCK, ChangingTable, blocks_for, table
from sparsync.workspace import Workspace

BLOCKS = 4  # of a strip
ALIGNED = 16  # bytes


class ParameterStrip(NamedTuple):
    """Entries of one parameter."""

    number: int
    start: int
    numel: int


class ChangeRow(NamedTuple):
    """What becomes of one parameter: three addresses, and the bits of a float."""

    parameter: int
    grad: int
    shown: int
    kept: int


class ParameterTables:
    """Strips of all parameters, and what becomes of each."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.launch, self.blocks = Launcher(), blocks_for(sum(sizes), BLOCKS)
        size = self.blocks * BLOCK
        strips = [
            ParameterStrip(number, at, min(size, numel - at))
            for number, numel in enumerate(sizes)
            for at in range(0, numel, size)
        ]
        self.count, self.strips = len(strips), table(strips, device)
        self.rows = ChangingTable(len(sizes), len(ChangeRow._fields), device)
        self.none = torch.zeros((), dtype=torch.float32, device=device)


def apply_update(changes: Sequence[ParameterChange], undo: Tensor, skip: Tensor | None, workspace: Workspace) -> None:
    """Do as ``reference.apply_update``, in one pass: 12 bytes an entry."""
    from sparsync.kernels.apply_update import triton as kernels

    device, sizes = undo.device, [change.parameter.numel() for change in changes]
    space = workspace.get(ParameterTables, (sizes, device), lambda: ParameterTables(sizes, device))
    bits = {kept: struct.unpack("<i", struct.pack("<f", kept))[0] for kept in {change.kept for change in changes}}
    rows = [(p.data_ptr(), grad.data_ptr(), shown.data_ptr(), bits[kept]) for p, grad, kept, shown in changes]
    with on_device_of(undo):
        space.launch(
            kernels.apply_update, (space.count,),
            space.strips, space.rows.update(rows), undo, space.none if skip is None else skip,
            BLOCK=BLOCK, BLOCKS=space.blocks, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
