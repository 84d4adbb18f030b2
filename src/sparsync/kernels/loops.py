"""The loops of the compiled CPU pass, in numba's subset of Python; ``compiled`` calls them.

They are compiled when this module is imported, or loaded from numba's cache, which is renewed when this file changes:
so every constant they use stands here. Loops are written so that LLVM turns them into vector instructions: rows of a
fixed length, magnitudes compared as the integers their bits make, and nothing written where it may also be read.
"""

import numpy as np
from numba import njit

ROW = 64
BLOCK = 256  # entries; so few that a block is still being read while the last one is looked at
BATCH = 256  # rows
MAGNITUDE, INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)  # every bit but the sign; the bits of infinity
TOP, MIDDLE, LOW = 20, 9, 0  # of 31 bits the highest 11, the next 11 and the last 9 are sorted at a time
BINS = 1 << 11


def _compile(signature, reassociate=False):
    """Compile for ``signature``; kept on disk if there is a place for it."""

    def decorate(function):
        options = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc"} if reassociate else False}
        try:
            return njit(signature, cache=True, **options)(function)
        except RuntimeError:  # no place can be written to
            return njit(signature, **options)(function)

    return decorate


@njit(error_model="numpy", fastmath={"reassoc"})
def _more(energy, value):
    """Only this sum may be taken in another order; the rest of a loop is exact."""
    wide = np.float64(value)
    return energy + wide * wide


@njit(error_model="numpy")
def _row(u):
    """Largest magnitude of one row, as bits, and its sum of squares."""
    peak, energy = np.int32(0), 0.0
    for i in range(ROW):
        size = np.int32(np.float32(u[i]).view(np.int32) & MAGNITUDE)
        peak = size if size > peak else peak
        energy = _more(energy, u[i])
    return peak, energy


@njit(error_model="numpy")
def _rows(u, peaks):
    """Fill ``peaks``; the largest of them, and the sum of squares."""
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
def _speed_up(slow, beta, grad, scale, speed):
    for i in range(slow.shape[0]):
        speed[i] = slow[i] * beta + grad[i] * scale


@njit(error_model="numpy")
def _copy(source, out):
    for i in range(out.shape[0]):
        out[i] = source[i]


@njit(error_model="numpy")
def _restore(u, before):
    """Put back what is not finite; where the first was, or -1."""
    first = -1
    for i in range(before.shape[0]):
        if not np.isfinite(u[i]):
            u[i] = before[i]
            first = i if first < 0 else first
    return first


FLOATS = "float32[::1]"


@_compile(f"Tuple((float64, int64))({', '.join(5 * [FLOATS])}, int32[::1], float32, float32, boolean)")
def sweep(grad, before, after, slow, fast, peaks, scale, beta, momentum):
    """``reference.sweep`` over one run: its energy and the first index that was not finite, or -1.

    Args:
        slow, fast: velocity before and after, read and written only if ``momentum``.
        peaks: of the rows, as bits.
    """
    u, speed = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    total, first = 0.0, -1
    for at in range(0, grad.shape[0], BLOCK):
        size = min(BLOCK, grad.shape[0] - at)
        end, rows = at + size, (size + ROW - 1) // ROW
        if momentum:
            _speed_up(slow[at:end], beta, grad[at:end], scale, speed)
            _add(before[at:end], speed, np.float32(1), u)
        else:
            _add(before[at:end], grad[at:end], scale, u)
        for i in range(size, rows * ROW):  # a short row ends with zeros
            u[i] = 0
        own = peaks[at // ROW : at // ROW + rows]
        worst, energy = _rows(u, own)
        if worst >= INFINITE:
            if momentum:
                for i in range(size):
                    speed[i] = speed[i] if np.isfinite(u[i]) else slow[at + i]
            bad = _restore(u, before[at:end])
            first = at + bad if first < 0 else first
            worst, energy = _rows(u, own)
        total += energy
        _copy(u, after[at:end])
        if momentum:
            _copy(speed, fast[at:end])
    return total, first


@njit(error_model="numpy")
def _hits(row, low, out):
    for i in range(ROW):
        out[i] = np.uint8(np.int32(row[i] & MAGNITUDE) >= low)


@_compile("int64(int32[::1], int64[::1], int64[::1], int32[::1], int32, int64[::1], int64[::1])")
def above(u, start, stop, peaks, low, hot, out):
    """Indices of the entries of the rows with magnitudes from ``low`` on, not NaN; how many.

    Args:
        u, peaks, low: as bits.
        hot: room for as many numbers as there are rows.
        out: room for all entries of the rows whose peak is ``low`` or more.
    """
    rows, count = 0, 0
    for r in range(peaks.shape[0]):  # without a branch, which could not be foretold
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
    """The k-th largest of ``bits``, which are not negative; ``spare`` has room for as many."""
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


@_compile("int32(int32[::1], int64)")
def kth_largest(bits, k):
    return _kth(bits, k, np.empty(bits.shape[0], np.int32))


@_compile("int64(int32[::1], int64[::1], int64)")
def keep_largest(u, found, k):
    """Of the ascending indices ``found``, move those of the k largest magnitudes to the front; how many."""
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


@_compile("void(int32[::1], int64[::1], int64, int64[:, ::1], int32[::1], int64[::1])")
def histogram(u, found, floor, edges, bins, counts):
    """The bin of each entry at ``found``, and how many lie in each; ``edges`` says how bins are cut."""
    for i in range(found.shape[0]):  # apart from counting, which would make every read wait for the one before
        bins[i] = u[found[i]] & MAGNITUDE
    for i in range(found.shape[0]):
        up = bins[i] - floor
        kind = (up >= edges[1, 0]) + (up >= edges[2, 0])
        bin = min(edges[kind, 2] + (up - edges[kind, 0] >> edges[kind, 1]), counts.shape[0] - 1)
        bins[i] = bin
        counts[bin] += 1
