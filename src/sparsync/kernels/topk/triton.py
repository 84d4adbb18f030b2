"""The k largest entries exactly, as Triton kernels: candidates above a threshold, then the limit among them.

``candidates`` come first. ``begin_search`` tells whether a segment's candidates suffice: all fitted into their regions,
and there are k or they are all there is. Then the limit lies in one bin of their histogram, and ``count_digits``
(``radix_select_triton.py``) narrows it down, a digit a launch. Otherwise the same launches read the residual itself,
from the first digit on: the fallback, which ends at once where no segment needs it. ``set_limits`` notes the limit and
sets the next threshold; ``take_largest`` (``take_triton.py``) takes out what reaches it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.accumulate.triton import report_nonfinite
from sparsync.kernels.candidates.histogram_triton import (
    BINS,
    FINE,
    MIDDLE,
    MIDDLE_FROM,
    WIDE,
    WIDE_FROM,
    edge_bits,
    pick,
)
from sparsync.kernels.candidates.next_threshold_triton import COARSE, next_threshold
from sparsync.kernels.strips_triton import (
    CANDIDATES,
    CARRIED,
    CHOICE,
    COUNT,
    EDGE,
    FIRST_REGION,
    INFLOW,
    LEFT,
    MADE_FOR,
    MOST_REGIONS,
    PAD,
    REGIONS,
    ROOM,
    SEGMENT,
    STATE,
    K,
)
from sparsync.kernels.topk.radix_select_triton import (
    DIGIT,
    FROM_CANDIDATES,
    FROM_RESIDUAL,
    MAGNITUDE,
    ORIGIN,
    RANGE,
    SLOTS,
    WANTED,
    clear_sums,
    narrow_range,
    store_range,
)


@triton.jit
def bin_of_limit(histogram, k, threshold, index_bits):
    """Return the bin of the candidates' histogram where the k-th largest is, and that bin as a range of keys."""
    bins = tl.load(histogram + tl.arange(0, BINS))
    reached = tl.cumsum(bins, reverse=True)
    edge = tl.maximum(tl.sum((reached >= k).to(tl.int64)) - 1, 0)
    at = pick(reached, edge, BINS).to(tl.int64)
    wanted = k - (at - pick(bins, edge, BINS))
    wide = tl.where(edge < BINS - 1, WIDE, MAGNITUDE)  # the last bin has no end
    width = tl.where(edge < MIDDLE_FROM, FINE, tl.where(edge < WIDE_FROM, MIDDLE, wide)) + index_bits
    return edge, (threshold + edge_bits(edge)) << index_bits, tl.where(at <= k, -1, width).to(tl.int64), wanted


@triton.jit
def close_lists(counts, found, row):
    """Return how many candidates a segment had, and whether all are there; their counters start again."""
    regions, room, lane = tl.load(row + FIRST_REGION), tl.load(row + ROOM).to(tl.int32), tl.arange(0, MOST_REGIONS)
    there = lane < tl.load(row + REGIONS)
    many = tl.load(counts + (regions + lane) * PAD, mask=there, other=0)
    tl.store(counts + (regions + lane) * PAD, tl.zeros([MOST_REGIONS], tl.int32), mask=there)
    tl.store(found + regions + lane, tl.minimum(many, room), mask=there)
    return tl.sum(many.to(tl.int64)), tl.max(many) <= room


@triton.jit(do_not_specialize=["index_bits"])
def begin_search(
    counts, found, segments, state, histogram, choice, ranges, fallbacks, peaks, shares, index_bits,
):  # fmt: skip
    """Tell where a segment's limit is looked for: one segment a program."""
    segment = tl.program_id(0)
    row, mine = segments + segment * SEGMENT, choice + segment * CHOICE
    candidates, complete = close_lists(counts, found, row)
    k, threshold = tl.load(row + K), tl.maximum(tl.load(state + segment * STATE + CARRIED), 1)
    edge, low, width, wanted = bin_of_limit(histogram + segment * BINS, k, threshold, index_bits)
    own = ranges + segment * RANGE
    if complete & ((candidates >= k) | (threshold == 1)):
        store_range(own, low, width, wanted, FROM_CANDIDATES, tl.minimum(candidates, k))
    else:
        store_range(own, 0, index_bits + MAGNITUDE, k, FROM_RESIDUAL, k)
        tl.atomic_add(fallbacks, 1, sem="relaxed")
    tl.store(mine + CANDIDATES, candidates)
    tl.store(mine + EDGE, edge)
    tl.store(peaks + segment, 0)
    tl.store(shares + segment, 0)


@triton.jit
def _threshold_from_all(row, own, wanted, first, second):
    """Store a threshold as ``threshold.reference.estimate`` makes it, but from the first digit of every entry, and the
    second of those next to the limit. Where entries are few, all will be candidates."""
    k = tl.load(row + K)
    target = 2 * k + 16
    bins = tl.load(first + tl.arange(0, SLOTS))
    reached = tl.cumsum(bins, reverse=True)
    digit = tl.sum((reached >= target).to(tl.int64)) - 1
    threshold = digit << COARSE
    if digit == tl.sum((reached >= wanted).to(tl.int64)) - 1:  # that of the limit
        above = tl.sum(tl.where(tl.arange(0, SLOTS) > digit, bins, 0))
        within = tl.cumsum(tl.load(second + tl.arange(0, SLOTS)), reverse=True)
        threshold += tl.maximum(tl.sum((within >= target - above).to(tl.int64)) - 1, 0) << (COARSE - DIGIT)
    tl.store(own + CARRIED, tl.where(digit < 0, 1, tl.maximum(threshold, 1)))
    tl.store(own + MADE_FOR, k)
    tl.store(own + LEFT, k)
    tl.store(own + INFLOW, k // 2)


@triton.jit
def set_limits(
    after, indices, segments, samples, spans, state, histogram, choice, ranges, sums, flags, rounds, segment_count,
    span_count, last, BLOCK: tl.constexpr,
):  # fmt: skip
    """Note the limit, and the threshold for the next step: one segment a program. Sums start again."""
    segment = tl.program_id(0)
    row, own, mine = segments + segment * SEGMENT, state + segment * STATE, choice + segment * CHOICE
    bins = histogram + segment * BINS + tl.arange(0, BINS)
    origin = tl.load(ranges + segment * RANGE + ORIGIN)
    low, width, wanted, number = narrow_range(ranges, sums, rounds, segment, segment_count, True)
    store_range(ranges + (rounds * segment_count + segment) * RANGE, low, width, wanted, origin, number)
    tl.store(mine + COUNT, number)
    if origin == FROM_RESIDUAL:
        first, second = sums + segment * SLOTS, sums + (segment_count + segment) * SLOTS
        _threshold_from_all(row, own, tl.load(ranges + segment * RANGE + WANTED), first, second)
        tl.store(bins, tl.zeros([BINS], tl.int32))
    else:
        reached = tl.cumsum(tl.load(bins), reverse=True).to(tl.int64)
        next_threshold(after, samples, row, own, reached, tl.load(mine + CANDIDATES), tl.load(mine + EDGE), BLOCK)
        tl.store(bins, tl.zeros([BINS], tl.int32))
    clear_sums(ranges, sums, rounds, segment, segment_count)
    if segment == 0:
        report_nonfinite(indices + last, spans, span_count, flags, BLOCK)
