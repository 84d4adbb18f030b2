"""Make the update that a gradient asks for by loops that numba compiles."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from numba import njit
from torch import Tensor

from sparsync.kernels.cpu import Array, array, as_fp32, compiled, run_together, threads_for
from sparsync.kernels.memory import Update
from sparsync.kernels.sketch import Sketched

BLOCK = 256  # entries; so few that a block is still being read while the last one is written
MAGNITUDE, INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)  # every bit but the sign; the bits of infinity
NAN, ONE = np.float32(np.nan), np.ones(1, np.float32)
FLOATS, NUMBERS = "float32[::1]", "float32, float32, float32, float32, float32"

Piece = tuple[Sketched, int, int]  # where in the tensor it starts and stops
Part = tuple[int, int, Array, Array, int, int]


@njit(error_model="numpy")
def _finite(value):
    return (np.float32(value).view(np.int32) & MAGNITUDE) < INFINITE


@njit(error_model="numpy")
def _make(grad, old, row, cols, beta, share, rate, eps, limit, velocity, asked):
    """Make the updates of a part of one row; ``row`` and ``cols``: its size and those of the columns."""
    for i in range(grad.shape[0]):
        new = old[i] * beta + grad[i] * share
        ratio = new / (row * cols[i] + eps)
        ratio = limit if ratio > limit else (-limit if ratio < -limit else ratio)
        update = ratio * rate
        good = _finite(new) and _finite(update)
        velocity[i] = new if good else old[i]
        asked[i] = update if good else NAN


@njit(error_model="numpy")
def _copy(source, out):
    for i in range(out.shape[0]):
        out[i] = source[i]


@compiled(f"void({', '.join(6 * [FLOATS])}, int64, int64, {NUMBERS})")
def _precondition(grad, before, after, out, rows, cols, row, col, beta, share, rate, eps, limit):
    """Do ``reference.precondition`` on entries of one matrix, from its ``row`` and ``col`` on.

    Args:
        rows, cols: all sizes of the matrix.
    """
    velocity, asked = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    at = 0
    while at < grad.shape[0]:
        size = min(BLOCK, cols.shape[0] - col, grad.shape[0] - at)
        end = at + size
        _make(grad[at:end], before[at:end], rows[row], cols[col : col + size], beta, share, rate, eps, limit,
              velocity, asked)  # fmt: skip
        _copy(velocity, after[at:end])
        _copy(asked, out[at:end])
        at, col = end, col + size
        if col == cols.shape[0]:
            row, col = row + 1, 0


def precondition(grad: Tensor, update: Update, out: Tensor) -> None:
    """Do as ``reference.precondition``."""
    run_together([partial(_share, grad, update, out, pieces) for pieces in _shares(update.tensors)])


def _share(grad: Tensor, update: Update, out: Tensor, pieces: Sequence[Piece]) -> None:
    before, after, made, tables = array(update.before), array(update.after), array(out), update.tables
    sizes = array(tables.sizes)
    for tensor, start, stop in pieces:
        own = (tables.betas, tables.shares, tables.rates, tables.eps)
        numbers = [np.float32(table[tensor.number].item()) for table in own]
        for i, j, came in as_fp32(grad[tensor.start + start : tensor.start + stop]):
            a = tensor.start + start + i
            for first, last, rows, cols, row, col in _matrices(tensor, sizes, start + i, start + j):
                here, there = tensor.start + first, tensor.start + last
                _precondition(
                    came[here - a : there - a], before[here:there], after[here:there], made[here:there], rows, cols,
                    row, col, *numbers, np.float32(tables.limit),
                )  # fmt: skip


def _matrices(tensor: Sketched, sizes: Array, start: int, stop: int) -> Iterator[Part]:
    """Cut entries of a tensor by its matrices: of each part where it starts and stops, the sizes of rows and columns,
    and the first row and column."""
    shape, own = tensor.matrices, sizes[tensor.place : tensor.place + tensor.size]
    if shape is None:
        yield start, stop, ONE, own, 0, start
        return
    numel, columns = shape.rows * shape.cols, own[shape.stack * shape.rows :]
    for matrix in range(start // numel, -(-stop // numel)):
        first, last = max(start, matrix * numel), min(stop, (matrix + 1) * numel)
        row, col = divmod(first - matrix * numel, shape.cols)
        rows = own[matrix * shape.rows : (matrix + 1) * shape.rows]
        yield first, last, rows, columns[matrix * shape.cols : (matrix + 1) * shape.cols], row, col


def _shares(tensors: Sequence[Sketched]) -> list[list[Piece]]:
    """Return the work of every thread, if it is enough for several."""
    numel = sum(tensor.numel for tensor in tensors)
    threads = threads_for(numel)
    size, done = -(-numel // threads), 0
    shares: list[list[Piece]] = [[] for _ in range(threads)]
    for tensor in tensors:
        for a in range(0, tensor.numel, size):
            b = min(a + size, tensor.numel)
            shares[min(threads - 1, done // size)].append((tensor, a, b))
            done += b - a
    return shares
