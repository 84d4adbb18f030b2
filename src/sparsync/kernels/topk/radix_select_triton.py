"""Limits found digit by digit, as Triton kernels: how large the last entry is that shall be sent.

Entries are told apart by a key: the bits of the magnitude, and below them the index, counted down. So no two are equal,
and of equal magnitudes the lower index goes first. Keys are looked for in a range ``low`` to ``low + 2**width``, of
which ``wanted`` are to be sent, together with all above it; a width of -1 says that ``low`` is the limit.
``count_digits`` narrows a range down, a digit a launch: among candidates, or in the residual itself.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.accumulate.triton import bits_of
from sparsync.kernels.candidates.histogram_triton import pick
from sparsync.kernels.strips import RangeRow
from sparsync.kernels.strips_triton import FIRST_ENTRY, FIRST_REGION, HIGH, LOW, OWNER, ROOM, SEGMENT, START, STRIP

DIGIT, SLOTS = tl.constexpr(11), tl.constexpr(2048)
MAGNITUDE = tl.constexpr(31)  # bits of one
RANGE = tl.constexpr(len(RangeRow._fields))
RANGE_LOW, WIDTH, WANTED, ORIGIN, SENT = map(tl.constexpr, range(RANGE.value))
FROM_CANDIDATES, FROM_RESIDUAL = tl.constexpr(1), tl.constexpr(2)  # origins: where a limit is looked for


@triton.jit
def store_range(row, low, width, wanted, origin, number):
    tl.store(row + RANGE_LOW, low)
    tl.store(row + WIDTH, width)
    tl.store(row + WANTED, wanted)
    tl.store(row + ORIGIN, origin)
    tl.store(row + SENT, number)


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
def clear_sums(ranges, sums, rounds, segment, segment_count):
    """Let the sums of a segment start again."""
    for step in range(rounds):
        used = step * segment_count + segment
        if tl.load(ranges + used * RANGE + WIDTH) >= 0:
            tl.store(sums + used * SLOTS + tl.arange(0, SLOTS), tl.zeros([SLOTS], tl.int32))
