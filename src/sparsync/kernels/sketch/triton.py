"""Sketch a gradient, as Triton kernels: a pass that reads it once, tile by tile, and one that adds the tiles' sums.

Sums are made in a fixed order: the same gradient gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.sketch import launch

TILE, SUM = tl.constexpr(len(launch.TileRow._fields)), tl.constexpr(len(launch.SumRow._fields))
START, STRIDE, ROWS, COLS, ROW_SIGNS, COL_SIGNS, ROW_PARTS, COL_PARTS, KIND = map(tl.constexpr, range(TILE.value))
FIRST, STEP, NUMBER, SIZE, AT = map(tl.constexpr, range(SUM.value))
COPIED, ANY, ALIGNED = (tl.constexpr(kind) for kind in (launch.COPIED, launch.ANY, launch.ALIGNED))
ANY_NARROW = tl.constexpr(launch.ANY_NARROW)
HEIGHT, WIDTH = map(tl.constexpr, launch.WIDE)
NARROW_HEIGHT, NARROW_WIDTH = map(tl.constexpr, launch.NARROW)
VECTOR = tl.constexpr(launch.VECTOR)
BLOCK = tl.constexpr(launch.WIDE[0] * launch.WIDE[1])


@triton.jit
def _aligned(number):
    """Return a multiple of VECTOR as a value that is known for one. ``tl.multiple_of`` would say so of the number
    itself, and so in all branches."""
    return number // VECTOR * VECTOR


@triton.jit
def _add_tile(
    grad, row_signs, col_signs, row_parts, col_parts, stride, rows, cols,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Store the signed sums of a tile's rows and columns."""
    col, line = tl.arange(0, WIDTH), tl.arange(0, HEIGHT)
    across = col < cols
    z = tl.load(col_signs + col, mask=across, other=0.0)
    columns = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for i in range(TURNS):
        row = i * HEIGHT + line
        down = row < rows
        w = tl.load(row_signs + row, mask=down, other=0.0)
        at = row.to(tl.int64)[:, None] * stride + col[None, :]
        g = tl.load(grad + at, mask=down[:, None] & across[None, :], other=0.0).to(tl.float32)
        tl.store(row_parts + row, tl.sum(g * z[None, :], 1), mask=down)
        columns += g * w[:, None]
    tl.store(col_parts + col, tl.sum(columns, 0), mask=across)


@triton.jit
def add_tiles(grad, signs, tiles, parts, out, TURNS: tl.constexpr):
    """Sum up one tile a program, or copy entries that are their own sketch."""
    row = tiles + tl.program_id(0) * TILE
    start, stride = tl.load(row + START), tl.load(row + STRIDE)
    rows, cols = tl.load(row + ROWS).to(tl.int32), tl.load(row + COLS).to(tl.int32)
    row_signs, col_signs = signs + tl.load(row + ROW_SIGNS), signs + tl.load(row + COL_SIGNS)
    row_at, col_at, kind = tl.load(row + ROW_PARTS), tl.load(row + COL_PARTS), tl.load(row + KIND)
    row_parts, col_parts = parts + row_at, parts + col_at
    if kind == COPIED:
        for i in range(TURNS):
            at = i * BLOCK + tl.arange(0, BLOCK)
            g = tl.load(grad + start + at, mask=at < cols, other=0.0).to(tl.float32)
            tl.store(out + row_at + at, g, mask=at < cols)
    elif kind == ALIGNED:  # what follows is the same, but for loads that are wide
        _add_tile(grad + _aligned(start), row_signs, col_signs, row_parts, col_parts,
                  _aligned(stride), rows, _aligned(cols), HEIGHT, WIDTH, TURNS)  # fmt: skip
    elif kind == ANY:
        _add_tile(grad + start, row_signs, col_signs, row_parts, col_parts, stride, rows, cols,
                  HEIGHT, WIDTH, TURNS)  # fmt: skip
    elif kind == ANY_NARROW:
        _add_tile(grad + start, row_signs, col_signs, row_parts, col_parts, stride, rows, cols,
                  NARROW_HEIGHT, NARROW_WIDTH, TURNS)  # fmt: skip
    else:
        _add_tile(grad + _aligned(start), row_signs, col_signs, row_parts, col_parts,
                  _aligned(stride), rows, _aligned(cols),
                  NARROW_HEIGHT, NARROW_WIDTH, TURNS)  # fmt: skip


@triton.jit
def add_parts(parts, sums, out, SUMS: tl.constexpr, PARTS: tl.constexpr):
    """Add the tiles' parts of some sums a program."""
    row = sums + tl.program_id(0) * SUM
    first, step, at = tl.load(row + FIRST), tl.load(row + STEP), tl.load(row + AT)
    number, size = tl.load(row + NUMBER).to(tl.int32), tl.load(row + SIZE).to(tl.int32)
    lane, line = tl.arange(0, SUMS), tl.arange(0, PARTS)
    total = tl.zeros([PARTS, SUMS], tl.float32)
    for i in range(0, number, PARTS):
        part = i + line
        place = part.to(tl.int64)[:, None] * step + lane[None, :]
        total += tl.load(parts + first + place, mask=(part < number)[:, None] & (lane < size)[None, :], other=0.0)
    tl.store(out + at + lane, tl.sum(total, 0), mask=lane < size)
