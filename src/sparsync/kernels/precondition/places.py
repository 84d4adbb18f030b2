"""Where a strip's entries find what they are divided by: made once, so that kernels divide no index by another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from sparsync.kernels.sketch import Sketched
from sparsync.kernels.strips import Strip

ENDLESS = 1 << 30  # rows of what has no second matrix behind it


class PlaceRow(NamedTuple):
    """The tensor of one strip, and the place of the strip's first entry in it.

    Entries with sizes of their own are a single column, whose own size is not asked for.
    """

    number: int  # of the tensor
    exact: int  # whether entries have sizes of their own
    row_at: int  # where among the sizes that of its row is
    col_at: int  # and that of its matrix's first column
    row: int  # of its matrix
    col: int
    rows: int
    cols: int


def place_strips(strips: Sequence[Strip], tensors: Sequence[Sketched]) -> list[PlaceRow]:
    """Return the place of every strip; each lies within one of ``tensors``."""
    ordered = sorted(tensors, key=lambda tensor: tensor.start)
    starts = [tensor.start for tensor in ordered]
    return [_place(ordered[bisect_right(starts, strip.low) - 1], strip) for strip in strips]


def _place(tensor: Sketched, strip: Strip) -> PlaceRow:
    first, shape = strip.low - tensor.start, tensor.matrices
    assert first >= 0
    assert strip.high <= tensor.start + tensor.numel
    if shape is None:
        return PlaceRow(tensor.number, 1, tensor.place + first, tensor.place + first, 0, 0, ENDLESS, 1)
    line, col = divmod(first, shape.cols)
    matrix, row = divmod(line, shape.rows)
    columns = tensor.place + shape.stack * shape.rows + matrix * shape.cols
    return PlaceRow(tensor.number, 0, tensor.place + line, columns, row, col, shape.rows, shape.cols)


def any_stack(tensors: Sequence[Sketched]) -> bool:
    """Return whether one of ``tensors`` is a stack of matrices."""
    return any(tensor.matrices is not None and tensor.matrices.stack > 1 for tensor in tensors)
