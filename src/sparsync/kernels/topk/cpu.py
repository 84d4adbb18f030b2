"""Find the largest entries by loops that numba compiles."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numba import njit
from torch import Tensor

from sparsync.kernels.accumulate import Rows, reference
from sparsync.kernels.cpu import Array, array, bits, compiled, run_together, threads_for

ROW = 64
BATCH = 256  # rows
MAGNITUDE, INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)  # every bit but the sign; the bits of infinity
TOP, MIDDLE, LOW = 20, 9, 0  # of 31 bits the highest 11, the next 11 and the last 9 are sorted at a time
BINS = 1 << 11
assert ROW == reference.ROW


@njit(error_model="numpy")
def _hits(row, low, out):
    for i in range(ROW):
        out[i] = np.uint8(np.int32(row[i] & MAGNITUDE) >= low)


@compiled("int64(int32[::1], int64[::1], int64[::1], int32[::1], int32, int64[::1], int64[::1])")
def _above_within(u, start, stop, peaks, low, hot, out):
    """Write the indices of the rows' entries with magnitudes from ``low`` on, not NaN; return how many these are.

    Args:
        u, peaks, low: as bits.
        hot: room for as many numbers as there are rows.
        out: room for all entries of the rows whose peak is ``low`` or more.
    """
    rows, count = 0, 0
    for r in range(peaks.shape[0]):  # without a branch, which would be unpredictable
        hot[rows] = r
        rows += (peaks[r] >= low) & (peaks[r] <= INFINITE)
    hits = np.empty(BATCH * ROW, np.uint8)
    ahead = np.empty(BATCH, np.int32)
    words = hits.view(np.uint64)
    for at in range(0, rows, BATCH):
        batch = hot[at : min(at + BATCH, rows)]
        for j in range(batch.shape[0]):  # a touch of every cache line, so that memory answers many at a time
            first = start[batch[j]]
            if first + ROW <= u.shape[0]:
                ahead[j] = u[first] + u[first + 16] + u[first + 32] + u[first + 48]
        for j in range(batch.shape[0]):
            first, last = start[batch[j]], stop[batch[j]]
            if last - first == ROW:
                _hits(u[first:last], low, hits[j * ROW : j * ROW + ROW])
            else:
                for i in range(ROW):
                    hits[j * ROW + i] = i < last - first and u[first + i] & MAGNITUDE >= low
        for w in range(8 * batch.shape[0]):
            if words[w]:
                first = start[batch[w // 8]] - w // 8 * ROW
                for i in range(8 * w, 8 * w + 8):
                    out[count] = first + i
                    count += hits[i]
    return count


@njit(error_model="numpy")
def _kth(bits, k, spare):
    """Return the k-th largest of ``bits``, which are not negative; ``spare`` has room for as many."""
    counts = np.empty(BINS, np.int64)
    found = np.int32(0)
    for shift in (TOP, MIDDLE, LOW):
        for i in range(BINS):
            counts[i] = 0
        for i in range(bits.shape[0]):
            counts[(bits[i] >> shift) & (BINS - 1)] += 1
        bin = BINS - 1
        while counts[bin] < k:
            k -= counts[bin]
            bin -= 1
        found |= np.int32(bin << shift)
        left = 0
        for i in range(bits.shape[0]):
            spare[left] = bits[i]
            left += (bits[i] >> shift) & (BINS - 1) == bin
        bits = spare[:left]
    return found


@compiled("int32(int32[::1], int64)")
def _kth_largest(bits, k):
    return _kth(bits, k, np.empty(bits.shape[0], np.int32))


@compiled("int64(int32[::1], int64[::1], int64)")
def _keep_largest(u, found, k):
    """Move those of the ascending indices ``found`` with the k largest magnitudes to the front; return how many."""
    if found.shape[0] <= k:
        return found.shape[0]
    size, spare = np.empty(found.shape[0], np.int32), np.empty(found.shape[0], np.int32)
    for i in range(found.shape[0]):
        size[i] = u[found[i]] & MAGNITUDE
    kth = _kth(size, k, spare)
    ties, count = k, 0
    for i in range(found.shape[0]):
        ties -= size[i] > kth
    for i in range(found.shape[0]):
        equal = size[i] == kth and ties > 0  # of equals, the lower index wins
        ties -= equal
        found[count] = found[i]
        count += (size[i] > kth) | equal
    return count


def above(u: Tensor, rows: Rows, threshold: float) -> Tensor:
    """Do as ``reference.above``."""
    bound = torch.tensor(threshold, dtype=torch.float32, device="cpu").clamp(min=0).view(torch.int32)
    low = max(1, int(bound))  # what is zero is never found
    number = rows.peak.numel()
    threads = threads_for(number * ROW)
    cuts = [number * i // threads for i in range(threads + 1)]
    jobs = [partial(_above, u, rows, slice(a, b), low) for a, b in pairwise(cuts)]
    found = run_together(jobs)
    return torch.from_numpy(found[0] if threads == 1 else np.concatenate(found))


def _above(u: Tensor, rows: Rows, own: slice, low: int) -> Array:
    peaks = bits(rows.peak)[own]
    hot = int(np.count_nonzero(peaks >= low))
    room, numbers = np.empty(hot * ROW, np.int64), np.empty(peaks.size, np.int64)
    count = _above_within(bits(u), array(rows.start)[own], array(rows.stop)[own], peaks, np.int32(low), numbers, room)
    return room[:count] if 2 * count > room.size else room[:count].copy()  # not to keep what was never written to


def largest(u: Tensor, rows: Rows, k: int) -> Tensor:
    """Do as ``reference.largest``."""
    threshold = 0.0
    if k <= rows.peak.numel():
        kth = _kth_largest(bits(rows.peak), k)
        threshold = float(np.int32(kth).view(np.float32))
    found = above(u, rows, threshold)
    return found[: _keep_largest(bits(u), array(found), k)]
