"""Make messages by loops that numba compiles; ``wire/host.py`` calls them."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import numpy as np
from numba import njit

from sparsync.kernels import codecs
from sparsync.kernels.cpu import compiled
from sparsync.kernels.message import header

WORDS, SUM = 10, 8  # of a header: its length, and where the checksum stands
SIGN, LEVELS = 3, 4
assert (WORDS, SUM) == (header.HEADER, header.SUM)
assert (codecs.CODEC_NUMBERS["sign"], codecs.CODEC_NUMBERS["levels"]) == (SIGN, LEVELS)


@njit(error_model="numpy")
def _low_words(row, indices, width):
    """Write the low bits of all indices, one after another."""
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    at, bits, filled = WORDS, np.uint64(0), 0
    for i in range(indices.shape[0]):
        bits |= (np.uint64(indices[i]) & mask) << np.uint64(filled)
        filled += width
        if filled >= 32:
            row[at] = np.uint32(bits)
            bits >>= np.uint64(32)
            filled -= 32
            at += 1
    if filled:
        row[at] = np.uint32(bits)


@njit(error_model="numpy")
def _sign_words(row, values, segments, parts, values_at, plane, codec):
    """Write the scales of all segments and the bits of values, given as theirs; whether the segments exist."""
    largest = np.uint32(0)
    for i in range(values.shape[0] if parts == 1 else 0):
        largest = max(largest, values[i] & np.uint32(0x7FFFFFFF))
    row[values_at] = largest
    for i in range(values.shape[0] if parts > 1 else 0):
        if segments[i] < 0 or segments[i] >= parts:
            return False
        scale = values_at + segments[i]
        row[scale] = max(row[scale], values[i] & np.uint32(0x7FFFFFFF))
    at = values_at + parts
    for word in range(plane):
        negative, low, high = np.uint32(0), np.uint32(0), np.uint32(0)
        for lane in range(min(32, values.shape[0] - 32 * word)):
            value = values[32 * word + lane]
            size = value & np.uint32(0x7FFFFFFF)
            below = (value != size) & (size > 0) & (size <= np.uint32(0x7F800000))  # neither -0 nor NaN is
            negative |= np.uint32(below) << np.uint32(lane)
            low |= (size >> np.uint32(23) & np.uint32(1)) << np.uint32(lane)
            high |= (size >> np.uint32(24) & np.uint32(1)) << np.uint32(lane)
        row[at + word] = negative
        if codec == LEVELS:
            row[at + plane + word], row[at + 2 * plane + word] = low, high
    return True


@compiled(
    "boolean(uint32[:, ::1], int64[:, ::1], int64[::1], uint32[:, ::1], int64[:, ::1], int64, int64, int64, int64,"
    " int64, int64, int64)"
)
def encode(rows, indices, counts, values, segments, numel, width, high_at, values_at, codec, parts, plane):
    """Write everything behind the headers, and the checksums; whether entries are in order, as ``width`` wants them.

    Args:
        rows: messages, of which the headers are there.
        values: the words that travel; with a scale, the values themselves.
        segments: of every entry, if there are several ``parts``.
        width: of an index's low bits; -1 for plain integers.
    """
    for r in range(rows.shape[0]):
        row, own = rows[r], indices[r]
        row[WORDS:] = 0
        if width < 0:
            for i in range(own.shape[0]):
                row[WORDS + i] = np.uint32(own[i])
        else:
            if counts[r] > own.shape[0]:
                return False
            last = np.int64(0)
            for i in range(counts[r]):
                if own[i] < last or own[i] >= numel:
                    return False
                last = own[i]
                high = (last >> width) + i
                row[high_at + (high >> 5)] |= np.uint32(1) << np.uint32(high & 31)
            if width > 0:
                _low_words(row, own, width)
        if codec < SIGN:
            row[values_at:] = values[r]
        elif not _sign_words(row, values[r], segments[r], parts, values_at, plane, codec):
            return False
        total = np.uint64(0)
        for i in range(row.shape[0]):
            total += np.uint64(row[i]) * np.uint64(np.uint32(2 * i + 3))
        for i in range(SUM, SUM + 2):
            total -= np.uint64(row[i]) * np.uint64(2 * i + 3)
        row[SUM], row[SUM + 1] = np.uint32(total), np.uint32(total >> np.uint64(32))
    return True
