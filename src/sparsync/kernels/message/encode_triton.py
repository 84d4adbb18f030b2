"""Entries written into a message, as Triton kernels: equal bit for bit to what ``wire`` makes of them."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.message.bitmap_triton import bit_at, marks_before
from sparsync.kernels.message.header_triton import HEADER


@triton.jit
def segment_of(index, starts, owners, spans, STEPS: tl.constexpr):
    """Return the number of the segment an index lies in."""
    span = tl.zeros_like(index)
    for i in tl.static_range(STEPS):
        further = span + (1 << (STEPS - 1 - i))
        there = further < spans
        start = tl.load(starts + further, mask=there, other=0)
        span = tl.where(there & (start <= index), further, span)
    return tl.load(owners + span)


@triton.jit
def put_entries(
    message, message16, number, index, value, segment, real, high_at, values_at, segments, plane,
    WIDTH: tl.constexpr, CODEC: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Write entries to the places ``number`` of their messages, which begin at ``message``, one for all or each its
    own; ``segment``: of each, where values have a scale, which is written, too (``SCALES``)."""
    if WIDTH < 0:
        tl.store(message + HEADER + number, index.to(tl.int32), mask=real)
    else:
        if WIDTH > 0:
            at = number * WIDTH
            low = (index.to(tl.int64) & ((tl.full([], 1, tl.int64) << WIDTH) - 1)) << (at & 31)
            tl.atomic_or(message + HEADER + (at >> 5), low.to(tl.int32), mask=real, sem="relaxed")
            over = (low >> 32).to(tl.int32)
            tl.atomic_or(message + HEADER + (at >> 5) + 1, over, mask=real & (over != 0), sem="relaxed")
        high = (index >> WIDTH) + number
        tl.atomic_or(message + high_at + (high >> 5), bit_at(high & 31), mask=real, sem="relaxed")
    if CODEC == 0:
        tl.store(message + values_at + number, value.to(tl.int32, bitcast=True), mask=real)
    elif CODEC == 1:
        tl.store(message16 + 2 * values_at + number, value.to(tl.float16).to(tl.int16, bitcast=True), mask=real)
    elif CODEC == 2:  # rounded already: the upper half is all there is
        tl.store(message16 + 2 * values_at + number, (value.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=real)
    else:
        size = tl.abs(value).to(tl.int32, bitcast=True)
        sign, bit = message + values_at + segments + (number >> 5), bit_at(number & 31)
        tl.atomic_or(sign, bit, mask=real & (value < 0), sem="relaxed")
        if SCALES and CODEC == 3:
            tl.store(message + values_at + segment, size, mask=real)
        elif SCALES:  # the largest
            tl.atomic_max(message + values_at + segment, size, mask=real, sem="relaxed")
        if CODEC == 4:  # of which power of 2 a value is tell the last two bits of its exponent
            tl.atomic_or(sign + plane, bit, mask=real & ((size & 0x00800000) != 0), sem="relaxed")
            tl.atomic_or(sign + 2 * plane, bit, mask=real & ((size & 0x01000000) != 0), sem="relaxed")


@triton.jit
def write(
    indices, values, count, bitmap, lines, sums, message, message16, starts, owners, spans, high_at, values_at,
    segments, plane, BLOCK: tl.constexpr, WIDTH: tl.constexpr, CODEC: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write every entry to its place in the message: the number of marked entries before it. ``WIDTH``: of the low bits
    of an Elias-Fano coded index, or -1 for plain integers."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = entry < tl.load(count)
    index = tl.load(indices + entry, mask=real, other=0)
    value = tl.load(values + entry, mask=real, other=0.0)
    number = marks_before(index, real, bitmap, lines, sums).to(tl.int64)
    segment = tl.zeros_like(index)
    if CODEC >= 3:
        segment = segment_of(index, starts, owners, spans, STEPS)
    put_entries(
        message, message16, number, index, value, segment, real, high_at, values_at, segments, plane, WIDTH, CODEC,
        True,
    )  # fmt: skip
