"""Add a gradient to the residual by loops that numba compiles."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numba import njit
from torch import Tensor

from sparsync.kernels.accumulate import reference
from sparsync.kernels.accumulate.reference import Rows, Run, rows_of
from sparsync.kernels.cpu import Array, array, bits, compiled, run_together, threads_for
from sparsync.kernels.memory import Memory
from sparsync.kernels.path import KernelPath

PIECE = 1 << 15  # entries of half precision made fp32 at a time; torch does not split so few among its threads
ROW = 64
BLOCK = 256  # entries; so few that a block is still being read while the last one is looked at
MAGNITUDE, INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)  # every bit but the sign; the bits of infinity
FLOATS = "float32[::1]"
assert ROW == reference.ROW


@njit(error_model="numpy", fastmath={"reassoc"})
def _more(energy, value):
    """Add a square. Only this sum may be taken in another order; the rest of a loop is exact."""
    wide = np.float64(value)
    return energy + wide * wide


@njit(error_model="numpy")
def _row(u):
    """Return the largest magnitude of one row, as bits, and its sum of squares."""
    peak, energy = np.int32(0), 0.0
    for i in range(ROW):
        size = np.int32(np.float32(u[i]).view(np.int32) & MAGNITUDE)
        peak = size if size > peak else peak
        energy = _more(energy, u[i])
    return peak, energy


@njit(error_model="numpy")
def _rows(u, peaks):
    """Fill ``peaks``; return the largest of them, and the sum of squares."""
    worst, energy = np.int32(0), 0.0
    for r in range(peaks.shape[0]):
        peak, own = _row(u[r * ROW : r * ROW + ROW])
        peaks[r] = peak
        worst = peak if peak > worst else worst
        energy += own
    return worst, energy


@njit(error_model="numpy")
def _add(before, grad, scale, u):
    for i in range(before.shape[0]):
        u[i] = before[i] + grad[i] * scale


@njit(error_model="numpy")
def _accelerate(old, beta, grad, scale, new):
    for i in range(old.shape[0]):
        new[i] = old[i] * beta + grad[i] * scale


@njit(error_model="numpy")
def _copy(source, out):
    for i in range(out.shape[0]):
        out[i] = source[i]


@njit(error_model="numpy")
def _restore(u, before):
    """Put back what is not finite; return where the first was, or -1."""
    first = -1
    for i in range(before.shape[0]):
        if not np.isfinite(u[i]):
            u[i] = before[i]
            first = i if first < 0 else first
    return first


@compiled(f"Tuple((float64, int64))({', '.join(5 * [FLOATS])}, int32[::1], float32, float32, boolean)")
def _accumulate(grad, before, after, velocity_before, velocity_after, peaks, scale, beta, momentum):
    """Do ``reference.accumulate`` over one run; return its energy and the first index that was not finite, or -1.

    Args:
        velocity_before, velocity_after: velocity before and after, read and written only if ``momentum``.
        peaks: of the rows, as bits.
    """
    u, velocity = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    total, first = 0.0, -1
    for at in range(0, grad.shape[0], BLOCK):
        size = min(BLOCK, grad.shape[0] - at)
        end, rows = at + size, (size + ROW - 1) // ROW
        if momentum:
            _accelerate(velocity_before[at:end], beta, grad[at:end], scale, velocity)
            _add(before[at:end], velocity, np.float32(1), u)
        else:
            _add(before[at:end], grad[at:end], scale, u)
        for i in range(size, rows * ROW):  # a short row ends with zeros
            u[i] = 0
        own = peaks[at // ROW : at // ROW + rows]
        worst, energy = _rows(u, own)
        if worst >= INFINITE:
            if momentum:
                for i in range(size):
                    velocity[i] = velocity[i] if np.isfinite(u[i]) else velocity_before[at + i]
            bad = _restore(u, before[at:end])
            first = at + bad if first < 0 else first
            worst, energy = _rows(u, own)
        total += energy
        _copy(u, after[at:end])
        if momentum:
            _copy(velocity, velocity_after[at:end])
    return total, first


def accumulate(grad: Tensor, memory: Memory, runs: Sequence[Run], scale: float = 1.0) -> tuple[Rows, int]:
    """Do as ``reference.accumulate``."""
    rows = rows_of(memory, runs, KernelPath.NUMBA)
    shares = _shares(runs)
    jobs = [partial(_share, grad, memory, rows.peak, share, scale) for share in shares]
    found = run_together(jobs)
    memory.energy += sum(energy for energy, _ in found)
    return rows, next((first for _, first in found if first >= 0), -1)


def _share(
    grad: Tensor, memory: Memory, peak: Tensor, pieces: Sequence[tuple[int, int, int]], scale: float
) -> tuple[float, int]:
    """Add the gradient of ``pieces``: where each starts and stops, and the number of its first row."""
    velocity = memory.velocity
    before, after, peaks = array(memory.before), array(memory.after), bits(peak)
    velocity_before, velocity_after = (array(velocity.before), array(velocity.after)) if velocity else (before, after)
    beta, momentum = velocity.beta if velocity else 0.0, velocity is not None
    energy, first = 0.0, -1
    for start, stop, row in pieces:
        for a, b, came in as_fp32(grad, start, stop):
            own = peaks[row + (a - start) // ROW :]
            residuals, velocities = (before[a:b], after[a:b]), (velocity_before[a:b], velocity_after[a:b])
            factors = np.float32(scale), np.float32(beta)
            more, bad = _accumulate(came, *residuals, *velocities, own, *factors, momentum)
            energy += more
            first = a + bad if first < 0 <= bad else first
    return energy, first


def as_fp32(grad: Tensor, start: int, stop: int) -> Iterator[tuple[int, int, Array]]:
    """Return entries in full precision: where they start and stop, piece by piece where they are converted."""
    if grad.dtype == torch.float32:
        yield start, stop, array(grad[start:stop])
        return
    buffer = torch.empty(min(PIECE, stop - start))
    for a in range(start, stop, PIECE):
        b = min(a + PIECE, stop)
        yield a, b, array(buffer[: b - a].copy_(grad[a:b]))


def _shares(runs: Sequence[Run]) -> list[list[tuple[int, int, int]]]:
    """Return the work of every thread, if it is enough for several: pieces of ``runs`` that hold whole rows."""
    numel = sum(stop - start for start, stop in runs)
    threads = threads_for(numel)
    size = -(-numel // (threads * ROW)) * ROW
    shares: list[list[tuple[int, int, int]]] = [[] for _ in range(threads)]
    done = row = 0
    for start, stop in runs:
        for a in range(start, stop, size):
            b = min(a + size, stop)
            shares[min(threads - 1, done // size)].append((a, b, row))
            done, row = done + b - a, row + -(-(b - a) // ROW)
    return shares
