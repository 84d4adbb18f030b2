"""The k largest entries exactly, as Triton kernels: candidates above a threshold, then the limit digit by digit.

``candidates`` come first. ``begin_search`` tells whether a segment's candidates suffice: all fitted into their regions,
and there are k or they are all there is. Then the limit lies in one bin of their histogram, and ``count_digits``
narrows it down, a digit a launch. Otherwise the same launches read the residual itself, from the first digit on: the
fallback, which ends at once where no segment needs it. ``set_limits`` notes the limit and sets the next threshold;
``take_largest`` takes out what reaches it.

Entries are told apart by a key: the bits of the magnitude, and below them the index, counted down. So no two are equal,
and of equal magnitudes the lower index goes first. Keys are looked for in a range ``low`` to ``low + 2**width``, of
which ``wanted`` are to be sent, together with all above it; a width of -1 says that ``low`` is the limit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.candidates.triton import (
    BINS,
    CANDIDATES,
    CARRIED,
    CHOICE,
    COARSE,
    COUNT,
    EDGE,
    FINE,
    FIRST_ENTRY,
    FIRST_REGION,
    HIGH,
    INFLOW,
    LEFT,
    LOW,
    MADE_FOR,
    MIDDLE,
    MIDDLE_FROM,
    MOST_REGIONS,
    OWNER,
    PAD,
    REGIONS,
    ROOM,
    SEGMENT,
    START,
    STATE,
    STRIP,
    WIDE,
    WIDE_FROM,
    K,
    bits_of,
    edge_bits,
    next_threshold,
    pick,
    report_nonfinite,
    round_for_wire,
)
from sparsync.kernels.strips import RangeRow

DIGIT, SLOTS = tl.constexpr(11), tl.constexpr(2048)
MAGNITUDE = tl.constexpr(31)  # bits of one
RANGE = tl.constexpr(len(RangeRow._fields))
RANGE_LOW, WIDTH, WANTED, ORIGIN, SENT = map(tl.constexpr, range(RANGE.value))
FROM_CANDIDATES, FROM_RESIDUAL = tl.constexpr(1), tl.constexpr(2)  # origins: where a limit is looked for
PEAK, SHARE, TAKE = map(tl.constexpr, range(3))  # actions


@triton.jit
def store_range(row, low, width, wanted, origin, number):
    tl.store(row + RANGE_LOW, low)
    tl.store(row + WIDTH, width)
    tl.store(row + WANTED, wanted)
    tl.store(row + ORIGIN, origin)
    tl.store(row + SENT, number)


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
def key_of(bits, index, index_bits, highest):
    """Return what tells entries apart: of equal magnitudes the lower index is larger."""
    return (bits.to(tl.int64) << index_bits) | (highest - index)


@triton.jit
def _digits(bits, index, real, low, width, index_bits, highest):
    """Count the keys in a range by their digit; zeros have no key."""
    shift = tl.maximum(width - DIGIT, 0)
    up = key_of(bits, index, index_bits, highest) - low
    digit = up >> shift
    inside = real & (bits > 0) & (up >= 0) & (digit < (1 << (width - shift)))
    found = tl.zeros([SLOTS], tl.int32)
    if tl.max(inside.to(tl.int32)) > 0:
        found = tl.histogram(tl.where(inside, digit, 0).to(tl.int32), SLOTS, mask=inside)
    return found


@triton.jit
def narrow_range(ranges, sums, step, segment, segment_count, INDEXED: tl.constexpr):
    """Return the range that a segment's digit number ``step`` is looked at in: the last one, and of that only the slot
    where the limit is. Where keys are magnitudes alone (not ``INDEXED``), down to the last digit."""
    before = tl.maximum(step - 1, 0) * segment_count + segment
    row = ranges + before * RANGE
    low, width, wanted = tl.load(row + RANGE_LOW), tl.load(row + WIDTH), tl.load(row + WANTED)
    number = tl.load(row + SENT)
    if (step > 0) & (width >= 0):
        bins = tl.load(sums + before * SLOTS + tl.arange(0, SLOTS))
        reached = tl.cumsum(bins, reverse=True)
        digit = tl.maximum(tl.sum((reached >= wanted).to(tl.int64)) - 1, 0)
        at = pick(reached, digit, SLOTS).to(tl.int64)
        shift = tl.maximum(width - DIGIT, 0)
        low += digit << shift
        width = tl.where(((at <= wanted) & INDEXED) | (shift == 0), -1, shift)
        number = tl.where(at < wanted, number - wanted + at, number)  # there are no more
        wanted -= at - pick(bins, digit, SLOTS)
    return low, width, wanted, number


@triton.jit
def residual_searches(ranges, segment_count):
    """Return how many segments' limits are looked for in the residual."""
    many = tl.zeros([], tl.int32)
    for i in range(0, segment_count, 128):
        segment = i + tl.arange(0, 128)
        origin = tl.load(ranges + segment * RANGE + ORIGIN, mask=segment < segment_count, other=0)
        many += tl.sum((origin == FROM_RESIDUAL).to(tl.int32))
    return many


@triton.jit
def load_block(after, start, begin, stop, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Return a block of the residual: indices, which of them are the strip's, and entries."""
    index = start + tl.arange(0, BLOCK)
    if MASKED:
        real = (index >= begin) & (index < stop)
        u = tl.load(after + index, mask=real, other=0.0)
    else:
        real = index >= 0
        u = tl.load(after + index)
    return index, real, u


@triton.jit
def _digits_of_strip(
    after, start, begin, stop, low, width, index_bits, highest,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Count the digits of a strip of the residual."""
    found = tl.zeros([SLOTS], tl.int32)
    for i in range(BLOCKS):
        index, real, u = load_block(after, start + i * BLOCK, begin, stop, BLOCK, MASKED)
        found += _digits(bits_of(u), index, real, low, width, index_bits, highest)
    return found


@triton.jit(do_not_specialize=["step", "index_bits", "highest"])
def count_digits(
    after, indices, values, found, owners, segments, strips, ranges, sums, step, index_bits, highest, regions,
    strip_count, segment_count,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PIECE: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Count how often each value of a digit occurs within the range that is left: of candidates, one region a program;
    of the residual, as many strips as there are for each. The range is noted on the side."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    slots = tl.arange(0, SLOTS)
    for region in range(pid, regions, programs):
        segment = tl.load(owners + region)
        row, mine = segments + segment * SEGMENT, step * segment_count + segment
        origin = tl.load(ranges + segment * RANGE + ORIGIN)
        low, width, wanted, number = narrow_range(ranges, sums, step, segment, segment_count, INDEXED)
        if region == tl.load(row + FIRST_REGION):
            store_range(ranges + mine * RANGE, low, width, wanted, origin, number)
        if (origin == FROM_CANDIDATES) & (width >= 0):
            size = tl.load(found + region)
            first = tl.load(row + FIRST_ENTRY) + (region - tl.load(row + FIRST_REGION)) * tl.load(row + ROOM)
            seen = tl.zeros([SLOTS], tl.int32)
            for i in range(0, size, PIECE):
                spot = i + tl.arange(0, PIECE)
                real = spot < size
                bits = bits_of(tl.load(values + first + spot, mask=real, other=0.0))
                index = tl.zeros([PIECE], tl.int64)
                if INDEXED:
                    index += tl.load(indices + first + spot, mask=real, other=0)
                seen += _digits(bits, index, real, low, width, index_bits, highest)
            tl.atomic_add(sums + mine * SLOTS + slots, seen, mask=seen > 0, sem="relaxed")
    if residual_searches(ranges, segment_count) > 0:
        known = tl.zeros([], tl.int64) - 1
        low, width = known, known
        for strip in range(pid * strip_count // programs, (pid + 1) * strip_count // programs):
            segment = tl.load(strips + strip * STRIP + OWNER)
            if tl.load(ranges + segment * RANGE + ORIGIN) == FROM_RESIDUAL:
                if segment != known:
                    low, width, _, _ = narrow_range(ranges, sums, step, segment, segment_count, INDEXED)
                    known = segment
                if width >= 0:
                    start = tl.multiple_of(tl.load(strips + strip * STRIP + START), 128)
                    begin, stop = tl.load(strips + strip * STRIP + LOW), tl.load(strips + strip * STRIP + HIGH)
                    if (begin == start) & (stop == start + BLOCK * BLOCKS):
                        seen = _digits_of_strip(
                            after, start, begin, stop, low, width, index_bits, highest, BLOCK, BLOCKS, False
                        )
                    else:
                        seen = _digits_of_strip(
                            after, start, begin, stop, low, width, index_bits, highest, BLOCK, BLOCKS, True
                        )
                    mine = step * segment_count + segment
                    tl.atomic_add(sums + mine * SLOTS + slots, seen, mask=seen > 0, sem="relaxed")


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
def clear_sums(ranges, sums, rounds, segment, segment_count):
    """Let the sums of a segment start again."""
    for step in range(rounds):
        used = step * segment_count + segment
        if tl.load(ranges + used * RANGE + WIDTH) >= 0:
            tl.store(sums + used * SLOTS + tl.arange(0, SLOTS), tl.zeros([SLOTS], tl.int32))


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


@triton.jit
def _act(
    u, index, going, segment, after, velocity_after, choice, peaks, shares, out_indices, out_values, total,
    ACTION: tl.constexpr, CODEC: tl.constexpr, HALF: tl.constexpr, MASKING: tl.constexpr,
):  # fmt: skip
    """Find the peak of entries that go, or sum up their shares of it, or take them all out."""
    if tl.max(going.to(tl.int32)) > 0:
        if ACTION == PEAK:
            tl.atomic_max(peaks + segment, tl.max(tl.where(going, bits_of(u), 0)), sem="relaxed")
        elif ACTION == SHARE:
            top = tl.maximum(tl.load(peaks + segment), 0x00800000).to(tl.float32, bitcast=True)
            part = (tl.div_rn(tl.abs(u), top) * 16777216.0).to(tl.int64)
            tl.atomic_add(shares + segment, tl.sum(tl.where(going, part, 0)), sem="relaxed")
        else:
            sent, rest, exact = round_for_wire(
                u, going, peaks + segment, shares + segment, choice + segment * CHOICE, CODEC, HALF
            )
            number = tl.cumsum(exact.to(tl.int32))
            slot = tl.atomic_add(total, tl.max(number).to(tl.int64), sem="relaxed") + number - 1
            tl.store(out_indices + slot, index, mask=exact)
            tl.store(out_values + slot, sent, mask=exact)
            tl.store(after + index, rest, mask=exact)
            if MASKING:
                tl.store(velocity_after + index, tl.zeros_like(u), mask=exact)


@triton.jit
def _act_on_strip(
    start, begin, stop, limit, index_bits, highest, segment, after, velocity_after, choice, peaks, shares, out_indices,
    out_values, total,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ACTION: tl.constexpr, CODEC: tl.constexpr, HALF: tl.constexpr,
    MASKING: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Do so with what reaches the limit in a strip of the residual."""
    for i in range(BLOCKS):
        index, real, u = load_block(after, start + i * BLOCK, begin, stop, BLOCK, MASKED)
        going = real & (bits_of(u) > 0) & (key_of(bits_of(u), index, index_bits, highest) >= limit)
        _act(u, index, going, segment, after, velocity_after, choice, peaks, shares, out_indices, out_values, total,
             ACTION, CODEC, HALF, MASKING)  # fmt: skip


@triton.jit(do_not_specialize=["index_bits", "highest"])
def take_largest(
    after, velocity_after, indices, values, found, owners, segments, strips, ranges, choice, peaks, shares, out_indices,
    out_values, total, rounds, index_bits, highest, regions, chunks, strip_count, segment_count,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PIECE: tl.constexpr,
    ACTION: tl.constexpr, CODEC: tl.constexpr, HALF: tl.constexpr, MASKING: tl.constexpr,
):  # fmt: skip
    """Act on every entry that reaches its segment's limit: from the candidates, or from the residual."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    limits = ranges + rounds * segment_count * RANGE
    for piece in range(pid, regions * chunks, programs):
        region, begin = piece % regions, piece // regions * PIECE
        size, segment = tl.load(found + region), tl.load(owners + region)
        if (begin < size) & (tl.load(limits + segment * RANGE + ORIGIN) == FROM_CANDIDATES):
            row = segments + segment * SEGMENT
            first = tl.load(row + FIRST_ENTRY) + (region - tl.load(row + FIRST_REGION)) * tl.load(row + ROOM)
            spot = begin + tl.arange(0, PIECE)
            real = spot < size
            u = tl.load(values + first + spot, mask=real, other=0.0)
            index = tl.load(indices + first + spot, mask=real, other=0).to(tl.int64)
            limit = tl.load(limits + segment * RANGE + RANGE_LOW)
            going = real & (key_of(bits_of(u), index, index_bits, highest) >= limit)
            _act(u, index, going, segment, after, velocity_after, choice, peaks, shares, out_indices, out_values, total,
                 ACTION, CODEC, HALF, MASKING)  # fmt: skip
    if residual_searches(limits, segment_count) > 0:
        for strip in range(pid * strip_count // programs, (pid + 1) * strip_count // programs):
            segment = tl.load(strips + strip * STRIP + OWNER)
            if tl.load(limits + segment * RANGE + ORIGIN) == FROM_RESIDUAL:
                start = tl.multiple_of(tl.load(strips + strip * STRIP + START), 128)
                begin, stop = tl.load(strips + strip * STRIP + LOW), tl.load(strips + strip * STRIP + HIGH)
                limit = tl.load(limits + segment * RANGE + RANGE_LOW)
                if (begin == start) & (stop == start + BLOCK * BLOCKS):
                    _act_on_strip(start, begin, stop, limit, index_bits, highest, segment, after, velocity_after,
                                  choice, peaks, shares, out_indices, out_values, total,
                                  BLOCK, BLOCKS, ACTION, CODEC, HALF, MASKING, False)  # fmt: skip
                else:
                    _act_on_strip(start, begin, stop, limit, index_bits, highest, segment, after, velocity_after,
                                  choice, peaks, shares, out_indices, out_values, total,
                                  BLOCK, BLOCKS, ACTION, CODEC, HALF, MASKING, True)  # fmt: skip
