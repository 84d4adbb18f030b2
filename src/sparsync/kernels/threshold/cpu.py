"""Look at candidates by loops that numba compiles: in the order of memory, each time over candidates alone."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsync.kernels.accumulate import Rows
from sparsync.kernels.cpu import array, bits, compiled
from sparsync.kernels.threshold.reference import (
    BINS,
    FINE,
    MIDDLE,
    MIDDLE_BITS,
    MIDDLE_FROM,
    WIDE,
    WIDE_BITS,
    WIDE_FROM,
    Candidates,
    edge_bits,
    from_above,
    magnitude,
)
from sparsync.kernels.topk.cpu import above
from sparsync.kernels.topk.reference import first_in_line

MAGNITUDE = np.int32(0x7FFFFFFF)  # every bit but the sign
# Of each kind of bin: how far above the threshold it begins, bits within a bin, its first bin.
EDGES = np.array([(0, FINE, 0), (MIDDLE_BITS, MIDDLE, MIDDLE_FROM), (WIDE_BITS, WIDE, WIDE_FROM)])


@compiled("void(int32[::1], int64[::1], int32[::1])")
def _gather(u, indices, out):
    for i in range(out.shape[0]):
        out[i] = u[indices[i]]


@compiled("void(int32[::1], int64, int64[:, ::1], int64[:, ::1])")
def _count(entries, threshold, edges, counts):
    """Count the entries in each bin, neighbours in different rows of ``counts``: else one might wait for another."""
    last = counts.shape[1] - 1
    for i in range(entries.shape[0]):
        up = np.int64(entries[i] & MAGNITUDE) - threshold
        kind = (up >= edges[1, 0]) + (up >= edges[2, 0])
        counts[i & 3, min(edges[kind, 2] + ((up - edges[kind, 0]) >> edges[kind, 1]), last)] += 1


@compiled("Tuple((int64, int64))(int64[::1], int32[::1], int64, int64, int64, int64, int64, int64, int64[::1], int64)")
def _pick(places, entries, low, sure, first, room, length, line, out, number):
    """Write the places of magnitudes from ``low`` on behind the first ``number`` of ``out``. Those below ``sure`` stand
    in a line of ``length``, of which ``room`` go, from the one of number ``first`` on, round its end.

    Returns how many there are now in ``out``, and how many have stood in line; ``line``: as many had before.
    """
    for i in range(places.shape[0]):  # without a branch, which would be unpredictable
        size = np.int64(entries[i] & MAGNITUDE)
        waits = (size >= low) & (size < sure)
        turn = line - first
        turn += length * (turn < 0)
        out[number] = places[i]
        number += (size >= low) & ((size >= sure) | (turn < room))
        line += waits
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
        self._threshold, counts = threshold, np.zeros((4, BINS), np.int64)
        for _, entries in self._parts:
            _count(entries, threshold, EDGES, counts)
        self.reached = from_above(torch.from_numpy(counts.sum(0)))

    def pick(self, edge: int, capacity: int, step: int) -> Tensor:
        number = int(self.reached[edge])
        low = sure = self._threshold + edge_bits(edge)
        first = room = length = 0
        if number > capacity:
            above_edge = int(self.reached[edge + 1]) if edge + 1 < BINS else 0
            sure = self._threshold + edge_bits(edge + 1) if above_edge else int(MAGNITUDE)
            room, length = capacity - above_edge, number - above_edge
            first = first_in_line(length, step)
        out, number, line = np.empty(min(number, capacity) + 1, np.int64), 0, 0
        for places, entries in self._parts:
            number, line = _pick(places, entries, low, sure, first, room, length, line, out, number)
        return torch.from_numpy(out[:number])
