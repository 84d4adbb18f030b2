"""The kernel that changes parameters, launched once for all of them; and its tables, which stay while they are true."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsync.kernels.apply_update.reference import Change
from sparsync.kernels.device import on_device_of
from sparsync.kernels.launcher import Launcher
from sparsync.kernels.strips import BLOCK, blocks_for, table
from sparsync.workspace import Workspace

BLOCKS = 4  # of a strip
ALIGNED = 16  # bytes


class ParameterStrip(NamedTuple):
    """Entries of one parameter."""

    number: int
    start: int
    numel: int


class ChangeRow(NamedTuple):
    """What becomes of one parameter."""

    parameter: int  # its address
    grad: int
    kept: int  # the bits of a float
    factor: int  # its number
    aligned: int


class ParameterTables:
    """Strips of all parameters, and what becomes of each, where that is another than a step before."""

    def __init__(self, sizes: Sequence[int], factors: int, device: torch.device) -> None:
        self.launch, self.device = Launcher(), device
        self.blocks = blocks_for(sum(sizes), BLOCKS)
        size = self.blocks * BLOCK
        strips = [
            ParameterStrip(number, at, min(size, numel - at))
            for number, numel in enumerate(sizes)
            for at in range(0, numel, size)
        ]
        self.count, self.strips = len(strips), table(strips, device)
        self.none, self.factors = torch.zeros((), device=device), torch.zeros(factors, device=device)
        self.rows = torch.zeros(len(sizes) * len(ChangeRow._fields), dtype=torch.int64, device=device)
        self._known: list[ChangeRow] = []

    def update(self, rows: list[ChangeRow]) -> None:
        """Bring the rows to the device, without waiting for it."""
        if rows != self._known:
            here = torch.tensor(rows, dtype=torch.int64).flatten()
            self.rows.copy_(here.pin_memory() if self.device.type == "cuda" else here, non_blocking=True)
            self._known = rows


def apply_update(changes: Sequence[Change], skip: Tensor | None, workspace: Workspace) -> None:
    """Do as ``reference.apply_update``, in one pass: 12 bytes an entry."""
    from sparsync.kernels.apply_update import triton as kernels

    device, sizes = changes[0].parameter.device, tuple(change.parameter.numel() for change in changes)
    factors = {id(change.factor): change.factor for change in changes}
    numbers = {key: number for number, key in enumerate(factors)}
    made_for = (sizes, len(factors), device)
    space = workspace.get(ParameterTables, made_for, lambda: ParameterTables(*made_for))
    with on_device_of(changes[0].parameter):
        space.update([_row(change, numbers[id(change.factor)]) for change in changes])
        torch.stack(list(factors.values()), out=space.factors)
        space.launch(
            kernels.apply_update, (space.count,),
            space.strips, space.rows, space.factors, space.none if skip is None else skip,
            BLOCK=BLOCK, BLOCKS=space.blocks, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def _row(change: Change, factor: int) -> ChangeRow:
    addresses = change.parameter.data_ptr(), change.grad.data_ptr()
    bits = int.from_bytes(struct.pack("<f", change.kept), "little", signed=True)
    return ChangeRow(*addresses, bits, factor, int(all(address % ALIGNED == 0 for address in addresses)))
