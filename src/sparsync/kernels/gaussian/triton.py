"""Gaussian-k as Triton kernels: add, count, find the threshold, and nothing waits for the host.

``add`` adds the gradient to the residual and sums entries and squares; ``moments`` makes of these each segment's first
threshold; ``count_above`` counts what lies above every threshold that the loop may ask about; ``walk`` goes through the
loop, or ``held_triton.py`` holds the count. ``gather_triton.py`` lists what lies above the last threshold.
``gaussian/reference.py`` is the specification.

The loop makes four masks and takes the last whatever its count, so its decisions can depend only on six thresholds:
t 0.5^i 1.5^j, i + j < 3. Halving is exact: the order of factors makes no difference. Magnitudes are compared as the
integers their fp32 bits make.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.accumulate.triton import accumulate, bits_of
from sparsync.kernels.gaussian import launch, reference
from sparsync.kernels.strips_triton import (
    BOUND,
    CHOICE,
    FIRST_STRIP,
    HIGH,
    LOW,
    NUMEL,
    OWNER,
    SEGMENT,
    START,
    STRIP,
    STRIPS,
    K,
)

FLAT, THRESHOLDS = tl.constexpr(reference.FLAT), tl.constexpr(len(launch.FACTORS[0]))
UPPER = tl.constexpr(1 << 16)  # of two counts in a word, the unit of the second


@triton.jit
def add(
    grad, before, after, velocity_before, velocity_after, beta, scales, strips, sums, indices, out_indices, out_values,
    total, strip_count, out_size, last,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MOMENTUM: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Add the gradient, and sum up: one strip a program. On the side, clear the last message, a piece a program."""
    strip = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    for piece in range(strip * BLOCK, out_size, strip_count * BLOCK):
        slot = piece + lane
        tl.store(out_indices + slot, 0, mask=slot < out_size)
        tl.store(out_values + slot, 0.0, mask=slot < out_size)
    if strip == 0:
        tl.store(total, 0)
    start = tl.multiple_of(tl.load(strips + strip * STRIP + START), 128)
    low, high = tl.load(strips + strip * STRIP + LOW), tl.load(strips + strip * STRIP + HIGH)
    scale = 1.0
    if SCALED:
        scale = tl.load(scales + tl.load(strips + strip * STRIP + OWNER))
    entries, squares = tl.full([BLOCK], 0.0, tl.float64), tl.full([BLOCK], 0.0, tl.float64)
    wrong = tl.full([BLOCK], 0, tl.int32)  # the last block that was not finite there, counted from 1
    if (low == start) & (high == start + BLOCK * BLOCKS):
        for i in range(BLOCKS):
            offs = start + i * BLOCK + lane
            u, nonfinite = accumulate(grad, before, after, velocity_before, velocity_after, beta, scale, offs, low,
                                      high, False, MOMENTUM, SCALED, False)  # fmt: skip
            u = u.to(tl.float64)
            entries += u
            squares += u * u
            wrong = tl.where(nonfinite, i + 1, wrong)
    else:
        for i in range(BLOCKS):
            offs = start + i * BLOCK + lane
            u, nonfinite = accumulate(grad, before, after, velocity_before, velocity_after, beta, scale, offs, low,
                                      high, True, MOMENTUM, SCALED, False)  # fmt: skip
            u = u.to(tl.float64)
            entries += u
            squares += u * u
            wrong = tl.where(nonfinite, i + 1, wrong)
    tl.store(sums + strip, tl.sum(entries))
    tl.store(sums + strip_count + strip, tl.sum(squares))
    where = start + (wrong - 1) * BLOCK + lane
    tl.store(indices + last + lane * 0, where.to(indices.dtype.element_ty), mask=wrong > 0)


@triton.jit
def bound_of(threshold):
    """Return the bits of the least magnitude above a threshold, itself rounded to fp32; zero is above none."""
    return tl.maximum(threshold.to(tl.float32).to(tl.int32, bitcast=True), 0) + 1


@triton.jit
def moments(
    sums, segments, quantiles, factors, thresholds, fitted, carried, bounds, strip_count,
    BLOCK: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """Find the first threshold of every segment, and the bounds of all that may be counted: one segment a program."""
    segment = tl.program_id(0)
    row = segments + segment * SEGMENT
    first, strips, numel = tl.load(row + FIRST_STRIP), tl.load(row + STRIPS), tl.load(row + NUMEL).to(tl.float64)
    entries, squares = tl.full([BLOCK], 0.0, tl.float64), tl.full([BLOCK], 0.0, tl.float64)
    for i in range(0, strips, BLOCK):
        strip = i + tl.arange(0, BLOCK)
        entries += tl.load(sums + first + strip, mask=strip < strips, other=0.0)
        squares += tl.load(sums + strip_count + first + strip, mask=strip < strips, other=0.0)
    mean, energy = tl.sum(entries) / numel, tl.sum(squares) / numel
    variance = energy - mean * mean
    deviation = tl.sqrt(tl.where(variance > energy * FLAT, variance, 0.0))
    t = mean + deviation * tl.load(quantiles + segment)
    if CARRIED:
        tl.store(fitted + segment, t)
        t *= tl.load(carried + segment)
    tl.store(thresholds + segment, t)
    number = tl.arange(0, THRESHOLDS)
    visited = t * tl.load(factors + number) * tl.load(factors + THRESHOLDS + number)
    tl.store(bounds + segment * THRESHOLDS + number, bound_of(visited))


@triton.jit
def _reached(u, b0, b1, b2, b3, b4, b5):
    """Return 1 in the 5 bits of each bound that a magnitude reaches. Bounds ascend: the highest tells all."""
    bits = bits_of(u)
    lower = tl.where(bits >= b2, 0x421, tl.where(bits >= b1, 0x21, tl.where(bits >= b0, 0x1, 0)))
    return tl.where(bits >= b5, 0x2108421, tl.where(bits >= b4, 0x108421, tl.where(bits >= b3, 0x8421, lower)))


@triton.jit
def count_above(after, strips, bounds, counts_above, strip_count, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Count in a second pass how many of a strip's entries reach each bound, two counts a word."""
    strip = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    start = tl.multiple_of(tl.load(strips + strip * STRIP + START), 128)
    low, high = tl.load(strips + strip * STRIP + LOW), tl.load(strips + strip * STRIP + HIGH)
    own = bounds + tl.load(strips + strip * STRIP + OWNER) * THRESHOLDS
    b0, b1, b2 = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    b3, b4, b5 = tl.load(own + 3), tl.load(own + 4), tl.load(own + 5)
    sums = tl.full([BLOCK], 0, tl.int32)
    if (low == start) & (high == start + BLOCK * BLOCKS):
        for i in range(BLOCKS):
            u = tl.load(after + start + i * BLOCK + lane)
            sums += _reached(u, b0, b1, b2, b3, b4, b5)
    else:
        for i in range(BLOCKS):
            offs = start + i * BLOCK + lane
            u = tl.load(after + offs, mask=(offs >= low) & (offs < high), other=0.0)
            sums += _reached(u, b0, b1, b2, b3, b4, b5)
    tl.store(counts_above + strip, tl.sum((sums & 31) + (sums >> 5 & 31) * UPPER))
    tl.store(counts_above + strip_count + strip, tl.sum((sums >> 10 & 31) + (sums >> 15 & 31) * UPPER))
    tl.store(counts_above + 2 * strip_count + strip, tl.sum((sums >> 20 & 31) + (sums >> 25 & 31) * UPPER))


@triton.jit
def total_counts(row, counts_above, strip_count, BLOCK: tl.constexpr):
    """Return how many of a segment's entries reach each of its bounds."""
    first, strips = tl.load(row + FIRST_STRIP), tl.load(row + STRIPS)
    zero = tl.full([BLOCK], 0, tl.int32)
    n0, n1, n2, n3, n4, n5 = zero, zero, zero, zero, zero, zero
    for i in range(0, strips, BLOCK):
        strip = i + tl.arange(0, BLOCK)
        words = counts_above + first + strip
        n01 = tl.load(words, mask=strip < strips, other=0)
        n23 = tl.load(words + strip_count, mask=strip < strips, other=0)
        n45 = tl.load(words + 2 * strip_count, mask=strip < strips, other=0)
        n0, n1 = n0 + n01 % UPPER, n1 + n01 // UPPER
        n2, n3 = n2 + n23 % UPPER, n3 + n23 // UPPER
        n4, n5 = n4 + n45 % UPPER, n5 + n45 // UPPER
    lower = tl.sum(n0.to(tl.int64)), tl.sum(n1.to(tl.int64)), tl.sum(n2.to(tl.int64))
    return lower[0], lower[1], lower[2], tl.sum(n3.to(tl.int64)), tl.sum(n4.to(tl.int64)), tl.sum(n5.to(tl.int64))


@triton.jit
def walk(segments, thresholds, counts_above, choice, strip_count, BLOCK: tl.constexpr, MASKS: tl.constexpr):
    """Go through the paper's loop, whose counts are all known: one segment a program."""
    segment = tl.program_id(0)
    row = segments + segment * SEGMENT
    k, numel = tl.load(row + K), tl.load(row + NUMEL)
    quarter, half, between, at0, more, most = total_counts(row, counts_above, strip_count, BLOCK)
    t0 = tl.load(thresholds + segment)
    few0 = 3 * at0 < 2 * k
    t1, at1 = t0 * tl.where(few0, 0.5, 1.5), tl.where(few0, half, more)
    few1 = 3 * at1 < 2 * k
    at2 = tl.where(few0 & few1, quarter, tl.where(few0 | few1, between, most))
    few2 = 3 * at2 < 2 * k
    t2 = t1 * tl.where(few1, 0.5, 1.5)
    t = t2
    if MASKS == 4:
        t = tl.where(few2 | (3 * at2 > 4 * k), t2 * tl.where(few2, 0.5, 1.5), t2)
    t = tl.where(few1 | (3 * at1 > 4 * k), t, t1)
    t = tl.where(few0 | (3 * at0 > 4 * k), t, t0)
    bound = tl.where(k < numel, bound_of(t), 1)  # otherwise everything is sent
    tl.store(choice + segment * CHOICE + BOUND, bound.to(tl.int64))
