"""The kernels that sketch, launched; and their buffers, which stay from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsync.kernels.device import on_device_of
from sparsync.kernels.launcher import Launcher
from sparsync.kernels.sketch.reference import Sketched
from sparsync.kernels.strips import blocks_for, table
from sparsync.layout import Matrices
from sparsync.workspace import Workspace

WIDE, NARROW = (16, 256), (128, 32)  # rows and columns that a program reads at once
NARROW_UP_TO = 128  # columns
TURNS = 8  # how often
VECTOR = 4  # entries of a load, where rows start at a multiple
SUMS, PARTS = 64, 32  # sums that a program of the second kernel makes, and parts of each that it reads at once


class TileRow(NamedTuple):
    """A tile of a matrix, or a run of entries that are copied, and where its parts of sums go."""

    start: int  # in the flat gradient
    stride: int  # from row to row
    rows: int
    cols: int
    row_signs: int
    col_signs: int
    row_parts: int
    col_parts: int
    kind: int


class SumRow(NamedTuple):
    """Some sums next to each other, and their parts: a row of parts for each tile."""

    parts: int  # where the first is
    stride: int  # from row to row
    number: int  # of rows
    size: int  # sums
    at: int  # where they go


COPIED, ANY, ALIGNED, ANY_NARROW, ALIGNED_NARROW = range(5)  # kinds of tiles


class SketchBuffers:
    """The gradient's tiles, room for their parts of sums, and how these are added."""

    def __init__(self, tensors: Sequence[Sketched], device: torch.device) -> None:
        self.tensors, self.launch = tensors, Launcher()
        self.turns = blocks_for(sum(tensor.numel for tensor in tensors), TURNS)
        self._tiles: list[TileRow] = []
        self._sums: list[SumRow] = []
        self._room = 0
        for tensor in tensors:
            if tensor.matrices is None:
                self._copy(tensor)
            else:
                for number in range(tensor.matrices.stack):
                    self._cut(tensor, tensor.matrices, number)
        self.tile_count, self.sum_count = len(self._tiles), len(self._sums)
        self.tiles, self.sums = table(self._tiles, device), table(self._sums, device)
        self.parts = torch.zeros(max(1, self._room), dtype=torch.float32, device=device)

    def _copy(self, tensor: Sketched) -> None:
        size = self.turns * WIDE[0] * WIDE[1]
        for at in range(0, tensor.numel, size):
            numel = min(size, tensor.numel - at)
            self._tiles.append(TileRow(tensor.start + at, 0, 1, numel, 0, 0, tensor.at + at, 0, COPIED))

    def _cut(self, tensor: Sketched, shape: Matrices, number: int) -> None:
        """Cut one matrix of a stack."""
        rows, cols, above = shape.rows, shape.cols, number * shape.rows
        start, columns = tensor.start + above * cols, shape.stack * shape.rows + number * cols
        narrow = cols <= NARROW_UP_TO
        height, width = NARROW if narrow else WIDE
        height *= self.turns
        kind = ALIGNED if start % VECTOR == 0 and cols % VECTOR == 0 else ANY
        kind += ANY_NARROW - ANY if narrow else 0
        row_parts, down, right = self._room, -(-rows // height), -(-cols // width)
        col_parts = row_parts + right * rows
        self._room = col_parts + down * cols
        for i, j in ((i, j) for i in range(down) for j in range(right)):
            row, col = i * height, j * width
            self._tiles.append(
                TileRow(
                    start + row * cols + col, cols, min(height, rows - row), min(width, cols - col),
                    tensor.place + above + row, tensor.place + columns + col,
                    row_parts + j * rows + row, col_parts + i * cols + col, kind,
                )
            )  # fmt: skip
        self._sums += _sums_of(row_parts, rows, right, tensor.at + above)
        self._sums += _sums_of(col_parts, cols, down, tensor.at + columns)


def _sums_of(parts: int, size: int, number: int, at: int) -> Iterator[SumRow]:
    for first in range(0, size, SUMS):
        yield SumRow(parts + first, size, number, min(SUMS, size - first), at + first)


def sketch(grad: Tensor, tensors: Sequence[Sketched], signs: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Do as ``reference.sketch``: the gradient is read once, and nothing waits for the host."""
    from sparsync.kernels.sketch import triton as kernels

    made_for = (id(tensors), grad.device)
    space = workspace.get(SketchBuffers, made_for, lambda: SketchBuffers(tensors, grad.device))
    with on_device_of(grad):
        space.launch(
            kernels.add_tiles, (space.tile_count,),
            grad, signs, space.tiles, space.parts, out, TURNS=space.turns, num_warps=4,
        )  # fmt: skip
        if space.sum_count:
            space.launch(
                kernels.add_parts, (space.sum_count,),
                space.parts, space.sums, out, SUMS=SUMS, PARTS=PARTS, num_warps=4,
            )  # fmt: skip
