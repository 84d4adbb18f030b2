"""Deal entries out to their owners, and find the largest of an owner's sums, by loops that numba compiles."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import njit
from torch import Tensor

from sparsync.kernels import partition
from sparsync.kernels.cpu import Array, array, bits, compiled

MIXER, SHIFT = np.uint32(0x9E3779B1), np.uint32(15)
MAGNITUDE = np.int32(0x7FFFFFFF)  # every bit but the sign
INFINITE = np.int32(0x7F800000)
TOP, MIDDLE, DIGIT = 20, 10, 1 << 11  # of 31 bits the highest 11, the next 10 and the last 10 are counted at a time
BLOCK = 1 << 14  # rows that are written at a time
LARGEST = np.float32(np.finfo(np.float32).max)
assert (int(MIXER), int(SHIFT)) == (partition.MIXER, partition.SHIFT)


@njit(error_model="numpy")
def _turn(row, workers, share):
    """Return what the owners of a row are turned round by. A product by 1 / workers is a vector instruction, which a
    division of integers is not; it may be one too small."""
    mixed = np.int32(np.uint32(np.uint32(row) * MIXER) >> SHIFT)  # numba multiplies in 64 bits
    turn = mixed - np.int32(mixed * share) * workers
    return turn - workers if turn >= workers else turn


@njit(error_model="numpy")
def _place(row, owner, workers, share):
    column = owner - _turn(row, workers, share)
    return np.int64(row) * workers + (column + workers if column < 0 else column)


@compiled("void(int64[::1], int32, float64, int32[::1], int32[::1])")
def _owners(indices, workers, share, row, owner):
    """Find the rows of entries, and their owners."""
    for i in range(indices.shape[0]):
        index = np.int32(indices[i])
        quotient = np.int32(index * share)
        quotient += np.int32(index - quotient * workers >= workers)
        turned = index - quotient * workers + _turn(quotient, workers, share)
        row[i] = quotient
        owner[i] = turned - workers if turned >= workers else turned


@compiled("int64(int32[::1], int32[::1], float32[::1], int64[:, ::1], float32[:, ::1], int64[::1], int64[::1])")
def _deal(row, owner, values, rows, travel, count, stays):
    """Deal entries out; return for how many there is no room: of these, the numbers go to ``stays``. Zeros go
    nowhere."""
    left, room = 0, rows.shape[1]
    for i in range(row.shape[0]):
        number = owner[i]
        if values[i] != 0:
            if count[number] < room:
                rows[number, count[number]] = row[i]
                travel[number, count[number]] = values[i]
                count[number] += 1
            else:
                stays[left] = i
                left += 1
    return left


@compiled("int64(int32[::1], int64[::1], int32[::1])")
def _nonzero(sums, found, words):
    """Write the rows of sums that are not 0, and these, given as bits; return how many there are."""
    number = 0
    for i in range(sums.shape[0]):  # without a branch, which would be unpredictable
        found[number], words[number] = i, sums[i]
        number += (sums[i] & MAGNITUDE) != 0
    return number


@compiled("int64(int32[::1], int64, int64[::1])")
def _reach(sums, kept, chosen):
    """Write the numbers of the ``kept`` largest sums, given as bits, of equal ones the first; there are more."""
    several = np.empty((4, DIGIT), np.int32)  # equal sums next to each other would wait for one counter
    low, wanted, top = 0, kept, 31
    for bottom in (TOP, MIDDLE, 0):
        several[:] = 0
        mask = (1 << (top - bottom)) - 1
        for i in range(sums.shape[0]):
            size = np.int64(sums[i] & MAGNITUDE)
            several[i & 3, size >> bottom & mask] += size >> top == low >> top
        counts = several[0] + several[1] + several[2] + several[3]
        digit = mask
        while counts[digit] < wanted:
            wanted -= counts[digit]
            digit -= 1
        low |= digit << bottom
        top = bottom
    number = 0
    for i in range(sums.shape[0]):
        if number < kept:
            size = np.int64(sums[i] & MAGNITUDE)
            same = (size == low) & (wanted > 0)
            wanted -= same
            chosen[number] = i
            number += (size > low) | same
    return number


@compiled("void(float32[::1], int64[::1], float32[::1])")
def _leave(sums, chosen, sent):
    """Take out what is sent; of a sum that is not finite nothing is left."""
    for i in range(chosen.shape[0]):
        sums[chosen[i]] -= sent[i]
    for i in range(sums.shape[0]):
        sums[i] = sums[i] if np.abs(sums[i]) <= LARGEST else np.float32(0)


@compiled("void(int64[::1], int32, int32, float64, int64[::1])")
def _places(rows, owner, workers, share, out):
    for i in range(rows.shape[0]):
        out[i] = _place(np.int32(rows[i]), owner, workers, share)


@compiled("boolean(int64[:, ::1], float32[:, ::1], int64[::1], int64[::1], float64, float32, int64, float32[::1])")
def _write(rows, values, count, begins, share, divisor, first, out):
    """Write quotients, block by block of ``out``, which stays in the cache; whether all that are met lie there.

    Args:
        begins: how many of each owner's are written before, and then afterwards.
        first: the place of ``out`` in the flat gradient.
    """
    workers, size = np.int32(rows.shape[0]), np.int64(out.shape[0])
    for start in range(0, size, BLOCK * workers):
        stop = min(size, start + BLOCK * workers)
        out[start:stop] = 0
        for owner in range(workers):
            own, sums, i, end = rows[owner], values[owner], np.uint64(begins[owner]), np.uint64(count[owner])
            while i < end:
                place = _place(np.int32(own[i]), np.int32(owner), workers, share) - first
                if place >= stop:
                    break
                if place < 0:
                    return False
                out[np.uint64(place)] = sums[i] / divisor
                i += np.uint64(1)
            begins[owner] = i
    return True


@compiled("void(int64[::1], float32[::1], float32[::1])")
def _put_back(indices, values, residual):
    finite = True
    for i in range(indices.shape[0]):
        total = residual[indices[i]] + values[i]
        residual[indices[i]] = total
        finite &= np.abs(total) <= LARGEST
    if not finite:
        for i in range(indices.shape[0]):  # apart, as an index may stand twice
            residual[indices[i]] = min(max(residual[indices[i]], -LARGEST), LARGEST)


def deal(indices: Tensor, values: Tensor, workers: int, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows and values that go to each owner, a row of ``room`` each, how many these are, and the numbers of the
    entries that stay."""
    size = indices.numel()
    row, owner = np.empty(size, np.int32), np.empty(size, np.int32)
    _owners(array(indices), workers, 1 / workers, row, owner)
    rows, travel = np.zeros((workers, room), np.int64), np.zeros((workers, room), np.float32)
    count, stays = np.zeros(workers, np.int64), np.empty(size, np.int64)
    left = _deal(row, owner, array(values), rows, travel, count, stays)
    made: tuple[Array, ...] = (rows, travel, count, stays[:left])
    first, second, third, fourth = map(torch.from_numpy, made)
    return first, second, third, fourth


def nonzero(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of sums that are not 0, and these sums."""
    found, words = np.empty(sums.numel() + 1, np.int64), np.empty(sums.numel() + 1, np.float32)
    number = _nonzero(bits(sums), found, words.view(np.int32))
    return torch.from_numpy(found[:number]), torch.from_numpy(words[:number])


def largest(sums: Tensor, kept: int) -> Tensor:
    """Return the numbers of the ``kept`` largest sums, of which there are more, in ascending order; of equal ones the
    first go."""
    chosen = np.empty(sums.numel() + 1, np.int64)
    return torch.from_numpy(chosen[: _reach(bits(sums), kept, chosen)])


def leave(sums: Tensor, chosen: Tensor, sent: Tensor) -> Tensor:
    """Do as ``remainder_of``, in place."""
    _leave(array(sums), array(chosen), array(sent))
    return sums


def places(rows: Tensor, owner: int, workers: int) -> Tensor:
    """Return where in the flat gradient an owner's entries lie."""
    out = np.empty(rows.numel(), np.int64)
    _places(array(rows), owner, workers, 1 / workers, out)
    return torch.from_numpy(out)


def write(rows: Tensor, values: Tensor, count: Tensor, divisor: int, parts: Sequence[tuple[int, Tensor]]) -> bool:
    """Overwrite ``parts`` with all owners' sums, a row each, over ``divisor``; whether all lie there, in their order.

    Args:
        parts: of the flat gradient in ascending order: where each starts, and the part.
    """
    entries, begins = (array(rows), array(values), array(count)), np.zeros(len(rows), np.int64)
    for first, out in parts:
        if not _write(*entries, begins, 1 / len(rows), divisor, first, array(out)):
            return False
    return bool((begins == array(count)).all())


def put_back(residual: Tensor, indices: Tensor, values: Tensor) -> None:
    """Add entries to the residual, in their order; sums saturate."""
    _put_back(array(indices), array(values), array(residual))
