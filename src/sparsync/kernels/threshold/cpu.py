"""Look at candidates by loops that numba compiles: in the order of memory, each time over candidates alone."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsync.kernels.accumulate import Rows
from sparsync.kernels.cpu import array, bits, compiled
from sparsync.kernels.threshold import reference
from sparsync.kernels.threshold.reference import BINS, Candidates, edge_bits, from_above, magnitude
from sparsync.kernels.topk.cpu import above
from sparsync.kernels.topk.reference import first_in_line

MAGNITUDE = np.int32(0x7FFFFFFF)  # every bit but the sign
BLOCK = 512  # entries whose bins are found at a time
# Bits within a bin of each kind; how far above the threshold bins of the latter two kinds begin; their first bins.
FINE, MIDDLE, WIDE, MIDDLE_BITS, WIDE_BITS, MIDDLE_FROM, WIDE_FROM = map(
    np.int32, (11, 15, 20, 256 << 11, (256 << 11) + (160 << 15), 256, 416)
)
for _name in ("FINE", "MIDDLE", "WIDE", "MIDDLE_BITS", "WIDE_BITS", "MIDDLE_FROM", "WIDE_FROM"):
    assert int(globals()[_name]) == getattr(reference, _name)


@compiled("void(int32[::1], int64[::1], int32[::1])")
def _gather(u, indices, out):
    for i in range(out.shape[0]):
        out[i] = u[indices[i]]


@compiled("void(int32[::1], int32, int32[:, ::1])")
def _count(entries, threshold, counts):
    """Count the entries in each bin, neighbours in different rows of ``counts``: else one might wait for another."""
    last, bins = np.int32(counts.shape[1] - 1), np.empty(BLOCK, np.int32)
    for at in range(0, entries.shape[0], BLOCK):
        size = min(BLOCK, entries.shape[0] - at)
        for i in range(size):
            up = np.int32((entries[at + i] & MAGNITUDE) - threshold)
            second = np.int32(MIDDLE_FROM + np.int32(np.int32(up - MIDDLE_BITS) >> MIDDLE))
            third = np.int32(WIDE_FROM + np.int32(np.int32(up - WIDE_BITS) >> WIDE))
            higher = second if up < WIDE_BITS else (third if third < last else last)
            bins[i] = np.int32(up >> FINE) if up < MIDDLE_BITS else higher
        for i in range(size):
            counts[i & 3, bins[i]] += 1


@compiled(
    "Tuple((int64, int64))(int64[::1], int32[::1], int64, int64, int64, int64, int64, int64, int64[::1], int32[::1],"
    " int64)"
)
def _pick(places, entries, low, sure, first, room, length, line, out, words, number):
    """Write the places of magnitudes from ``low`` on behind the first ``number`` of ``out``, and what stands there to
    ``words``. Those below ``sure`` stand in a line of ``length``, of which ``room`` go, from the one of number
    ``first`` on, round its end.

    Returns how many there are now in ``out``, and how many have stood in line; ``line``: as many had before.
    """
    between = np.uint64(sure - low)
    for i in range(places.shape[0]):
        size = np.int64(entries[i] & MAGNITUDE)
        out[number] = places[i]
        words[number] = entries[i]
        number += size >= sure
        if np.uint64(size - low) < between:  # low <= size < sure, as few are; another branch would be unpredictable
            turn = line - first
            turn += length * (turn < 0)
            number += turn < room
            line += 1
    return number, line


class CompiledCandidates(Candidates):
    """The same, in parts whose entries ascend: those that were collected as the gradient was added, if these are
    all."""

    def __init__(self, u: Tensor, rows: Rows, threshold: int) -> None:
        parts = [part for part in rows.collected.parts if part is not None]
        if rows.collected.low == threshold and len(parts) == len(rows.collected.parts):
            self._parts = [part[1:] for part in sorted(parts, key=lambda part: part[0])]
        else:
            found = above(u, rows, magnitude(threshold))
            entries = np.empty(found.numel(), np.int32)
            _gather(bits(u), array(found), entries)
            self._parts = [(array(found), entries)]
        self._threshold, self._collected, counts = threshold, rows.collected, np.zeros((4, BINS), np.int32)
        for _, entries in self._parts:
            _count(entries, threshold, counts)
        self.reached = from_above(torch.from_numpy(counts.sum(0, dtype=np.int64)))

    def pick(self, edge: int, capacity: int, step: int) -> Tensor:
        number = int(self.reached[edge])
        low = sure = self._threshold + edge_bits(edge)
        first = room = length = 0
        if number > capacity:
            above_edge = int(self.reached[edge + 1]) if edge + 1 < BINS else 0
            sure = self._threshold + edge_bits(edge + 1) if above_edge else int(MAGNITUDE)
            room, length = capacity - above_edge, number - above_edge
            first = first_in_line(length, step)
        size, number, line = min(number, capacity) + 1, 0, 0
        out, words = np.empty(size, np.int64), np.empty(size, np.int32)
        for places, entries in self._parts:
            number, line = _pick(places, entries, low, sure, first, room, length, line, out, words, number)
        picked = torch.from_numpy(out[:number])
        self._collected.picked = picked, torch.from_numpy(words[:number].view(np.float32))
        return picked
