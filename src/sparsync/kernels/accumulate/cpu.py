"""Add a gradient to the residual, by loops that numba compiles."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numba import njit
from torch import Tensor

from sparsync.kernels.accumulate import reference
from sparsync.kernels.accumulate.reference import Collected, Rows, Run, rows_of
from sparsync.kernels.cpu import array, as_fp32, bits, compiled, run_together, threads_for
from sparsync.kernels.memory import Memory
from sparsync.kernels.path import KernelPath

ROW = 64
BLOCK = 256  # entries; so few that a block is still being read while the last one is looked at
MAGNITUDE, INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)  # every bit but the sign; the bits of infinity
NOTHING = np.int32(0x7FFFFFFF)  # a magnitude that no number has
FLOATS, INTEGERS = "float32[::1]", "int32[::1]"
POWERS = np.uint64(1) << np.arange(64, dtype=np.uint64)
# Which bit of a word is set, if it is one alone, by the highest six bits of its product with ``SEQUENCE``.
SEQUENCE = np.uint64(0x03F79D71B4CB0A89)
BIT = np.argsort([((0x03F79D71B4CB0A89 << bit) & (2**64 - 1)) >> 58 for bit in range(64)]).astype(np.uint64)
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


@njit(error_model="numpy")
def _hits(row, low):
    """Return a word that has a bit for every entry of a row: whether its magnitude is ``low`` or more."""
    mask = np.uint64(0)
    for i in range(ROW):
        mask |= POWERS[i] if np.int32(row[i] & MAGNITUDE) >= low else np.uint64(0)
    return mask


@njit(error_model="numpy")
def _collect(u, peaks, low, first, places, entries, count):
    """Append where magnitudes are ``low`` or more, and what stands there; return how many there are now, or -1 if they
    are too many. Entries and magnitudes are bits; ``first``: the place of the first."""
    for r in range(peaks.shape[0]):
        if peaks[r] >= low and peaks[r] <= INFINITE:
            if count < 0 or 2 * count > places.shape[0]:
                return -1
            mask = _hits(u[r * ROW : r * ROW + ROW], low)
            row, at = np.uint64(r * ROW), np.uint64(count)  # unsigned: of others every access asks for their sign
            while mask:
                i = row + BIT[((mask & (~mask + np.uint64(1))) * SEQUENCE) >> np.uint64(58)]
                places[at] = first + np.int64(i)
                entries[at] = u[i]
                mask &= mask - np.uint64(1)
                at += np.uint64(1)
            count = np.int64(at)
    return count


@compiled(
    f"Tuple((float64, int64, int64))({', '.join(5 * [FLOATS])}, {INTEGERS}, float32, float32, boolean, int32, int64,"
    f" int64[::1], {INTEGERS}, int64)"
)
def _accumulate(
    grad, before, after, velocity_before, velocity_after, peaks, scale, beta, momentum, low, start, places, entries,
    count,
):  # fmt: skip
    """Do ``reference.accumulate`` over one run; return its energy, the first index that was not finite, or -1, and how
    many entries are collected by now.

    Args:
        velocity_before, velocity_after: velocity before and after, read and written only if ``momentum``.
        peaks: of the rows, as bits.
        low: bits of the magnitude from which on entries are collected.
        start: the place of the run in the flat gradient.
        places, entries, count: what is collected: where each lies, its bits, and how many there are before; -1: no more
            than half of them shall be, and that is too few.
    """
    u, velocity = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    sums = u.view(np.int32)
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
        if worst >= low:
            count = _collect(sums, own, low, start + at, places, entries, count)
        _copy(u, after[at:end])
        if momentum:
            _copy(velocity, velocity_after[at:end])
    return total, first, count


@dataclass(frozen=True)
class GradientPiece:
    """A part of a gradient: ``came`` belongs at ``start``, where the row of number ``row`` begins."""

    came: Tensor
    start: int
    row: int


class CollectedRoom:
    """Room to collect every entry of a residual, each piece's where that starts; what is not needed is never touched,
    and takes no memory."""

    def __init__(self, numel: int) -> None:
        self.places, self.entries = np.empty(numel, np.int64), np.empty(numel, np.int32)


def accumulate(grad: Tensor, memory: Memory, runs: Sequence[Run], scale: float = 1.0, low: int = 0) -> tuple[Rows, int]:
    """Do as ``reference.accumulate``."""
    rows = rows_of(memory, runs, KernelPath.NUMBA)
    rows.collected = Collected(low)
    pieces, row = [], 0
    for start, stop in runs:
        pieces.append(GradientPiece(grad[start:stop], start, row))
        row += -(-(stop - start) // ROW)
    return rows, add(pieces, memory, rows, scale)


def add(pieces: Sequence[GradientPiece], memory: Memory, rows: Rows, scale: float = 1.0) -> int:
    """Add pieces of a gradient to the residual, and note in ``rows`` what they leave there; returns the index of the
    first entry that was not finite, or -1."""
    numel = memory.after.numel()
    room = memory.workspace.get(CollectedRoom, numel, lambda: CollectedRoom(numel))
    found = run_together([partial(_share, share, memory, rows, room, scale) for share in _shares(pieces)])
    memory.energy += sum(energy for energy, _ in found)
    return next((first for _, first in found if first >= 0), -1)


def _share(
    pieces: Sequence[GradientPiece], memory: Memory, rows: Rows, room: CollectedRoom, scale: float
) -> tuple[float, int]:
    """Add what is one thread's."""
    velocity, collected = memory.velocity, rows.collected
    before, after, peaks = array(memory.before), array(memory.after), bits(rows.peak)
    velocity_before, velocity_after = (array(velocity.before), array(velocity.after)) if velocity else (before, after)
    beta, momentum = velocity.beta if velocity else 0.0, velocity is not None
    factors = np.float32(scale), np.float32(beta), momentum
    energy, first = 0.0, -1
    for piece in pieces:
        start, stop = piece.start, piece.start + piece.came.numel()
        low, count = (collected.low, 0) if collected.low else (NOTHING, -1)
        places, entries = room.places[start:stop], room.entries[start:stop]
        for i, j, came in as_fp32(piece.came):
            a, b = start + i, start + j
            own = peaks[piece.row + i // ROW :]
            residuals, velocities = (before[a:b], after[a:b]), (velocity_before[a:b], velocity_after[a:b])
            more, bad, count = _accumulate(came, *residuals, *velocities, own, *factors, low, a, places, entries, count)
            energy += more
            first = a + bad if first < 0 <= bad else first
        collected.parts.append((start, places[:count], entries[:count]) if count >= 0 else None)
    return energy, first


def _shares(pieces: Sequence[GradientPiece]) -> list[list[GradientPiece]]:
    """Return the work of every thread, if it is enough for several: pieces that hold whole rows."""
    numel = sum(piece.came.numel() for piece in pieces)
    threads = threads_for(numel)
    size = -(-numel // (threads * ROW)) * ROW
    shares: list[list[GradientPiece]] = [[] for _ in range(threads)]
    done = 0
    for piece in pieces:
        for a in range(0, piece.came.numel(), size):
            own = piece.came[a : a + size]
            shares[min(threads - 1, done // size)].append(GradientPiece(own, piece.start + a, piece.row + a // ROW))
            done += own.numel()
    return shares
