"""The k largest entries exactly, as Triton kernels: candidates above a floor, then the limit digit by digit.

``fused.collect`` comes first. ``judge`` tells whether a segment's candidates suffice: all fitted
into their regions, and there are k or they are all there is. Then the limit lies in one bin of their histogram, and
``tally`` narrows it down, a digit a launch. Otherwise the same launches read the residual itself, from the first digit
on: the fallback, which ends at once where no segment needs it. ``settle`` notes the limit and sets the next floor;
``send`` takes out what reaches it.

Entries are told apart by a key: the bits of the magnitude, and below them the index, counted down. So no two are equal,
and of equal magnitudes the lower index goes first. Keys are looked for in a range ``low`` to ``low + 2**width``, of
which ``wanted`` are to be sent, together with all above it; a width of -1 says that ``low`` is the limit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.fused import (
    BINS,
    CHOICE,
    COARSE,
    FINE,
    MIDDLE,
    MIDDLE_FROM,
    MOST_REGIONS,
    PAD,
    SEGMENT,
    STATE,
    STRIP,
    WIDE,
    WIDE_FROM,
    _at,
    _bits,
    _edge_bits,
    _steer,
    _tell,
    _travelling,
)

DIGIT, SLOTS = tl.constexpr(11), tl.constexpr(2048)
MAGNITUDE = tl.constexpr(31)  # bits of one
RANGE = tl.constexpr(5)  # low, width, wanted, origin, how many are sent in all
CANDIDATES, RESIDUAL = tl.constexpr(1), tl.constexpr(2)  # origins: where a segment's entries are looked for
PEAK, SHARE, TAKE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _store(row, low, width, wanted, origin, number):
    tl.store(row, low)
    tl.store(row + 1, width)
    tl.store(row + 2, wanted)
    tl.store(row + 3, origin)
    tl.store(row + 4, number)


@triton.jit
def _bin_of_limit(histogram, k, floor, index_bits):
    """Of the histogram that ``collect`` made: the bin where the k-th largest is, and that bin as a range of keys."""
    bins = tl.load(histogram + tl.arange(0, BINS))
    reached = tl.cumsum(bins, reverse=True)
    edge = tl.maximum(tl.sum((reached >= k).to(tl.int64)) - 1, 0)
    at = _at(reached, edge, BINS).to(tl.int64)
    wanted = k - (at - _at(bins, edge, BINS))
    wide = tl.where(edge < BINS - 1, WIDE, MAGNITUDE)  # the last bin has no end
    width = tl.where(edge < MIDDLE_FROM, FINE, tl.where(edge < WIDE_FROM, MIDDLE, wide)) + index_bits
    return edge, (floor + _edge_bits(edge)) << index_bits, tl.where(at <= k, -1, width).to(tl.int64), wanted


@triton.jit
def _gathered(counts, found, row):
    """How many candidates a segment had, and whether all are there; their counters start again."""
    regions, room, lane = tl.load(row + 2), tl.load(row + 4).to(tl.int32), tl.arange(0, MOST_REGIONS)
    there = lane < tl.load(row + 3)
    many = tl.load(counts + (regions + lane) * PAD, mask=there, other=0)
    tl.store(counts + (regions + lane) * PAD, tl.zeros([MOST_REGIONS], tl.int32), mask=there)
    tl.store(found + regions + lane, tl.minimum(many, room), mask=there)
    return tl.sum(many.to(tl.int64)), tl.max(many) <= room


@triton.jit(do_not_specialize=["index_bits"])
def judge(
    counts, found, segments, state, histogram, choice, ranges, fallbacks, peaks, shares, index_bits,
):  # fmt: skip
    """Where a segment's limit is looked for: one segment a program."""
    segment = tl.program_id(0)
    row, mine = segments + segment * SEGMENT, choice + segment * CHOICE
    candidates, complete = _gathered(counts, found, row)
    k, floor = tl.load(row), tl.maximum(tl.load(state + segment * STATE), 1)
    edge, low, width, wanted = _bin_of_limit(histogram + segment * BINS, k, floor, index_bits)
    own = ranges + segment * RANGE
    if complete & ((candidates >= k) | (floor == 1)):
        _store(own, low, width, wanted, CANDIDATES, tl.minimum(candidates, k))
    else:
        _store(own, 0, index_bits + MAGNITUDE, k, RESIDUAL, k)
        tl.atomic_add(fallbacks, 1, sem="relaxed")
    tl.store(mine, candidates)
    tl.store(mine + 1, edge)
    tl.store(peaks + segment, 0)
    tl.store(shares + segment, 0)


@triton.jit
def _key(bits, place, index_bits, highest):
    return (bits.to(tl.int64) << index_bits) | (highest - place)


@triton.jit
def _digits(bits, place, real, low, width, index_bits, highest):
    """How many of the keys in a range have which digit; zeros have no key."""
    shift = tl.maximum(width - DIGIT, 0)
    up = _key(bits, place, index_bits, highest) - low
    digit = up >> shift
    inside = real & (bits > 0) & (up >= 0) & (digit < (1 << (width - shift)))
    found = tl.zeros([SLOTS], tl.int32)
    if tl.max(inside.to(tl.int32)) > 0:
        found = tl.histogram(tl.where(inside, digit, 0).to(tl.int32), SLOTS, mask=inside)
    return found


@triton.jit
def _range(ranges, sums, step, segment, segment_count, PLACED: tl.constexpr):
    """The range that a segment's digit number ``step`` is looked at in: the last one, and of that only the slot where
    the limit is. Where keys are magnitudes alone (not ``PLACED``), down to the last digit."""
    before = tl.maximum(step - 1, 0) * segment_count + segment
    row = ranges + before * RANGE
    low, width, wanted, number = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 4)
    if (step > 0) & (width >= 0):
        bins = tl.load(sums + before * SLOTS + tl.arange(0, SLOTS))
        reached = tl.cumsum(bins, reverse=True)
        digit = tl.maximum(tl.sum((reached >= wanted).to(tl.int64)) - 1, 0)
        at = _at(reached, digit, SLOTS).to(tl.int64)
        shift = tl.maximum(width - DIGIT, 0)
        low += digit << shift
        width = tl.where(((at <= wanted) & PLACED) | (shift == 0), -1, shift)
        number = tl.where(at < wanted, number - wanted + at, number)  # there are no more
        wanted -= at - _at(bins, digit, SLOTS)
    return low, width, wanted, number


@triton.jit
def _needed(ranges, segment_count):
    """How many segments are looked for in the residual."""
    many = tl.zeros([], tl.int32)
    for i in range(0, segment_count, 128):
        segment = i + tl.arange(0, 128)
        origin = tl.load(ranges + segment * RANGE + 3, mask=segment < segment_count, other=0)
        many += tl.sum((origin == RESIDUAL).to(tl.int32))
    return many


@triton.jit
def _block_of(after, start, begin, stop, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """A block of the residual: indices, which are the strip's, and entries."""
    place = start + tl.arange(0, BLOCK)
    if MASKED:
        real = (place >= begin) & (place < stop)
        u = tl.load(after + place, mask=real, other=0.0)
    else:
        real = place >= 0
        u = tl.load(after + place)
    return place, real, u


@triton.jit
def _digits_of_strip(
    after, start, begin, stop, low, width, index_bits, highest,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    found = tl.zeros([SLOTS], tl.int32)
    for i in range(BLOCKS):
        place, real, u = _block_of(after, start + i * BLOCK, begin, stop, BLOCK, MASKED)
        found += _digits(_bits(u), place, real, low, width, index_bits, highest)
    return found


@triton.jit(do_not_specialize=["step", "index_bits", "highest"])
def tally(
    after, places, values, found, owners, segments, strips, ranges, sums, step, index_bits, highest, regions,
    strip_count, segment_count,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PIECE: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """How often each value of a digit occurs within the range that is left: of candidates, one region a program; of the
    residual, as many strips as there are for each. The range is noted on the side."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    slots = tl.arange(0, SLOTS)
    for region in range(pid, regions, programs):
        segment = tl.load(owners + region)
        row, mine = segments + segment * SEGMENT, step * segment_count + segment
        origin = tl.load(ranges + segment * RANGE + 3)
        low, width, wanted, number = _range(ranges, sums, step, segment, segment_count, PLACED)
        if region == tl.load(row + 2):
            _store(ranges + mine * RANGE, low, width, wanted, origin, number)
        if (origin == CANDIDATES) & (width >= 0):
            size = tl.load(found + region)
            first = tl.load(row + 5) + (region - tl.load(row + 2)) * tl.load(row + 4)
            seen = tl.zeros([SLOTS], tl.int32)
            for i in range(0, size, PIECE):
                spot = i + tl.arange(0, PIECE)
                real = spot < size
                bits = _bits(tl.load(values + first + spot, mask=real, other=0.0))
                place = tl.zeros([PIECE], tl.int64)
                if PLACED:
                    place += tl.load(places + first + spot, mask=real, other=0)
                seen += _digits(bits, place, real, low, width, index_bits, highest)
            tl.atomic_add(sums + mine * SLOTS + slots, seen, mask=seen > 0, sem="relaxed")
    if _needed(ranges, segment_count) > 0:
        known = tl.zeros([], tl.int64) - 1
        low, width = known, known
        for strip in range(pid * strip_count // programs, (pid + 1) * strip_count // programs):
            segment = tl.load(strips + strip * STRIP + 3)
            if tl.load(ranges + segment * RANGE + 3) == RESIDUAL:
                if segment != known:
                    low, width, _, _ = _range(ranges, sums, step, segment, segment_count, PLACED)
                    known = segment
                if width >= 0:
                    start = tl.multiple_of(tl.load(strips + strip * STRIP), 128)
                    begin, stop = tl.load(strips + strip * STRIP + 1), tl.load(strips + strip * STRIP + 2)
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
def _floor_from_all(row, own, wanted, first, second):
    """As ``floors.guess``, but from the first digit of every entry, and the second of those next to the limit. Where
    entries are few, all will be candidates."""
    k = tl.load(row)
    target = 2 * k + 16
    bins = tl.load(first + tl.arange(0, SLOTS))
    reached = tl.cumsum(bins, reverse=True)
    digit = tl.sum((reached >= target).to(tl.int64)) - 1
    floor = digit << COARSE
    if digit == tl.sum((reached >= wanted).to(tl.int64)) - 1:  # that of the limit
        above = tl.sum(tl.where(tl.arange(0, SLOTS) > digit, bins, 0))
        within = tl.cumsum(tl.load(second + tl.arange(0, SLOTS)), reverse=True)
        floor += tl.maximum(tl.sum((within >= target - above).to(tl.int64)) - 1, 0) << (COARSE - DIGIT)
    tl.store(own, tl.where(digit < 0, 1, tl.maximum(floor, 1)))
    tl.store(own + 1, k)
    tl.store(own + 2, k)
    tl.store(own + 3, k // 2)


@triton.jit
def _clear(ranges, sums, rounds, segment, segment_count):
    """Sums start again."""
    for step in range(rounds):
        used = step * segment_count + segment
        if tl.load(ranges + used * RANGE + 1) >= 0:
            tl.store(sums + used * SLOTS + tl.arange(0, SLOTS), tl.zeros([SLOTS], tl.int32))


@triton.jit
def settle(
    after, places, segments, samples, spans, state, histogram, choice, ranges, sums, flags, rounds, segment_count,
    span_count, last, BLOCK: tl.constexpr,
):  # fmt: skip
    """The limit, and the floor for the next step: one segment a program. Sums start again."""
    segment = tl.program_id(0)
    row, own, mine = segments + segment * SEGMENT, state + segment * STATE, choice + segment * CHOICE
    bins = histogram + segment * BINS + tl.arange(0, BINS)
    origin = tl.load(ranges + segment * RANGE + 3)
    low, width, wanted, number = _range(ranges, sums, rounds, segment, segment_count, True)
    _store(ranges + (rounds * segment_count + segment) * RANGE, low, width, wanted, origin, number)
    tl.store(mine + 3, number)
    if origin == RESIDUAL:
        first, second = sums + segment * SLOTS, sums + (segment_count + segment) * SLOTS
        _floor_from_all(row, own, tl.load(ranges + segment * RANGE + 2), first, second)
        tl.store(bins, tl.zeros([BINS], tl.int32))
    else:
        reached = tl.cumsum(tl.load(bins), reverse=True).to(tl.int64)
        _steer(after, samples, row, own, reached, tl.load(mine), tl.load(mine + 1), BLOCK)
        tl.store(bins, tl.zeros([BINS], tl.int32))
    _clear(ranges, sums, rounds, segment, segment_count)
    if segment == 0:
        _tell(places + last, spans, span_count, flags, BLOCK)


@triton.jit
def _act(
    u, place, going, segment, after, speed_after, choice, peaks, shares, out_places, out_values, total,
    ACTION: tl.constexpr, CODEC: tl.constexpr, MASKING: tl.constexpr,
):  # fmt: skip
    """Of entries that go: the peak, its shares (see ``fused``), or all of them taken out."""
    if tl.max(going.to(tl.int32)) > 0:
        if ACTION == PEAK:
            tl.atomic_max(peaks + segment, tl.max(tl.where(going, _bits(u), 0)), sem="relaxed")
        elif ACTION == SHARE:
            top = tl.maximum(tl.load(peaks + segment), 0x00800000).to(tl.float32, bitcast=True)
            part = (tl.div_rn(tl.abs(u), top) * 16777216.0).to(tl.int64)
            tl.atomic_add(shares + segment, tl.sum(tl.where(going, part, 0)), sem="relaxed")
        else:
            sent, rest, exact = _travelling(
                u, going, peaks + segment, shares + segment, choice + segment * CHOICE, CODEC
            )
            number = tl.cumsum(exact.to(tl.int32))
            slot = tl.atomic_add(total, tl.max(number).to(tl.int64), sem="relaxed") + number - 1
            tl.store(out_places + slot, place, mask=exact)
            tl.store(out_values + slot, sent, mask=exact)
            tl.store(after + place, rest, mask=exact)
            if MASKING:
                tl.store(speed_after + place, tl.zeros_like(u), mask=exact)


@triton.jit
def _act_on_strip(
    start, begin, stop, limit, index_bits, highest, segment, after, speed_after, choice, peaks, shares, out_places,
    out_values, total,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ACTION: tl.constexpr, CODEC: tl.constexpr, MASKING: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    for i in range(BLOCKS):
        place, real, u = _block_of(after, start + i * BLOCK, begin, stop, BLOCK, MASKED)
        going = real & (_bits(u) > 0) & (_key(_bits(u), place, index_bits, highest) >= limit)
        _act(u, place, going, segment, after, speed_after, choice, peaks, shares, out_places, out_values, total,
             ACTION, CODEC, MASKING)  # fmt: skip


@triton.jit(do_not_specialize=["index_bits", "highest"])
def send(
    after, speed_after, places, values, found, owners, segments, strips, ranges, choice, peaks, shares, out_places,
    out_values, total, rounds, index_bits, highest, regions, chunks, strip_count, segment_count,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PIECE: tl.constexpr,
    ACTION: tl.constexpr, CODEC: tl.constexpr, MASKING: tl.constexpr,
):  # fmt: skip
    """Every entry that reaches its segment's limit: from the candidates, or from the residual."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    limits = ranges + rounds * segment_count * RANGE
    for piece in range(pid, regions * chunks, programs):
        region, begin = piece % regions, piece // regions * PIECE
        size, segment = tl.load(found + region), tl.load(owners + region)
        if (begin < size) & (tl.load(limits + segment * RANGE + 3) == CANDIDATES):
            row = segments + segment * SEGMENT
            first = tl.load(row + 5) + (region - tl.load(row + 2)) * tl.load(row + 4)
            spot = begin + tl.arange(0, PIECE)
            real = spot < size
            u = tl.load(values + first + spot, mask=real, other=0.0)
            place = tl.load(places + first + spot, mask=real, other=0).to(tl.int64)
            going = real & (_key(_bits(u), place, index_bits, highest) >= tl.load(limits + segment * RANGE))
            _act(u, place, going, segment, after, speed_after, choice, peaks, shares, out_places, out_values, total,
                 ACTION, CODEC, MASKING)  # fmt: skip
    if _needed(limits, segment_count) > 0:
        for strip in range(pid * strip_count // programs, (pid + 1) * strip_count // programs):
            segment = tl.load(strips + strip * STRIP + 3)
            if tl.load(limits + segment * RANGE + 3) == RESIDUAL:
                start = tl.multiple_of(tl.load(strips + strip * STRIP), 128)
                begin, stop = tl.load(strips + strip * STRIP + 1), tl.load(strips + strip * STRIP + 2)
                limit = tl.load(limits + segment * RANGE)
                if (begin == start) & (stop == start + BLOCK * BLOCKS):
                    _act_on_strip(start, begin, stop, limit, index_bits, highest, segment, after, speed_after, choice,
                                  peaks, shares, out_places, out_values, total,
                                  BLOCK, BLOCKS, ACTION, CODEC, MASKING, False)  # fmt: skip
                else:
                    _act_on_strip(start, begin, stop, limit, index_bits, highest, segment, after, speed_after, choice,
                                  peaks, shares, out_places, out_values, total,
                                  BLOCK, BLOCKS, ACTION, CODEC, MASKING, True)  # fmt: skip
