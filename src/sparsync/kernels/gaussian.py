"""Gaussian-k as Triton kernels: add, count, gather, and nothing waits for the host.

``add`` adds the gradient to the residual and sums entries and squares; ``moments`` makes of these each segment's first
threshold; ``count`` counts what lies above every threshold that the loop may ask about; ``walk`` goes through the loop;
``gather`` lists what lies above its last threshold, and ``tally`` how many these are. From there on ``fused`` takes over
and takes them out. ``compressors/gaussian.py`` is the specification.

The loop makes four masks, so six thresholds t 0.5^i 1.5^j, i + j < 3, are all that its decisions can depend on. Halving
is exact: the order of the factors makes no difference. Magnitudes are compared as the integers their fp32 bits make.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels import workspace_gaussian
from sparsync.kernels.fused import CHOICE, INFINITE, PAD, SEGMENT, STRIP, _bits

FLAT, THRESHOLDS = tl.constexpr(workspace_gaussian.FLAT), tl.constexpr(workspace_gaussian.THRESHOLDS)
MOST_REGIONS = tl.constexpr(workspace_gaussian.MOST_REGIONS)
FEW = tl.constexpr(8)  # strips: a segment of fewer starts anywhere within one


@triton.jit
def _add_block(
    grad, before, after, speed_before, speed_after, beta, scale, offs, low, high,
    MASKED: tl.constexpr, MOMENTUM: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """``after = before + gradient`` (or its velocity); where that is not finite, everything stays as it was."""
    if MASKED:
        inside = (offs >= low) & (offs < high)
        g = tl.load(grad + offs, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(before + offs, mask=inside, other=0.0)
    else:
        g = tl.load(grad + offs).to(tl.float32)
        r = tl.load(before + offs)
    if SCALED:
        g = g * scale
    if MOMENTUM:
        old = tl.load(speed_before + offs, mask=inside, other=0.0) if MASKED else tl.load(speed_before + offs)
        g = old * beta + g
    u = r + g
    odd = _bits(u) >= INFINITE
    u = tl.where(odd, r, u)
    if MASKED:
        tl.store(after + offs, u, mask=inside)
        if MOMENTUM:
            tl.store(speed_after + offs, tl.where(odd, old, g), mask=inside)
    else:
        tl.store(after + offs, u)
        if MOMENTUM:
            tl.store(speed_after + offs, tl.where(odd, old, g))
    return u.to(tl.float64), odd


@triton.jit
def add(
    grad, before, after, speed_before, speed_after, beta, scales, strips, sums, places, out_places, out_values, total,
    strip_count, out_size, last,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MOMENTUM: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The first pass: one strip of a segment a program. On the side, the last message is cleared, a piece a program."""
    strip = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    for piece in range(strip, tl.cdiv(out_size, BLOCK), strip_count):
        slot = piece * BLOCK + lane
        tl.store(out_places + slot, tl.zeros([BLOCK], tl.int64), mask=slot < out_size)
        tl.store(out_values + slot, tl.zeros([BLOCK], tl.float32), mask=slot < out_size)
    if strip == 0:
        tl.store(total, 0)
    start = tl.multiple_of(tl.load(strips + strip * STRIP), 128)
    low, high = tl.load(strips + strip * STRIP + 1), tl.load(strips + strip * STRIP + 2)
    scale = 1.0
    if SCALED:
        scale = tl.load(scales + tl.load(strips + strip * STRIP + 3))
    entries, squares = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    wrong = tl.zeros([BLOCK], tl.int32)  # the last block that was not finite there, counted from 1
    if (low == start) & (high == start + BLOCK * BLOCKS):
        for i in range(BLOCKS):
            u, odd = _add_block(grad, before, after, speed_before, speed_after, beta, scale, start + i * BLOCK + lane,
                                low, high, False, MOMENTUM, SCALED)  # fmt: skip
            entries += u
            squares += u * u
            wrong = tl.where(odd, i + 1, wrong)
    else:
        for i in range(BLOCKS):
            u, odd = _add_block(grad, before, after, speed_before, speed_after, beta, scale, start + i * BLOCK + lane,
                                low, high, True, MOMENTUM, SCALED)  # fmt: skip
            entries += u
            squares += u * u
            wrong = tl.where(odd, i + 1, wrong)
    tl.store(sums + strip, tl.sum(entries))
    tl.store(sums + strip_count + strip, tl.sum(squares))
    where = start + (wrong - 1) * BLOCK + lane
    tl.store(places + last + tl.zeros_like(lane), where.to(places.dtype.element_ty), mask=wrong > 0)


@triton.jit
def _bound(threshold):
    """The bits of the least magnitude above a threshold, itself rounded to fp32; zero is above none."""
    return tl.maximum(threshold.to(tl.float32).to(tl.int32, bitcast=True), 0) + 1


@triton.jit
def moments(sums, segments, quantiles, thresholds, bounds, strip_count, BLOCK: tl.constexpr):
    """The first threshold of every segment, and the bounds of all that may follow: one segment a program."""
    segment = tl.program_id(0)
    row = segments + segment * SEGMENT
    first, strips, numel = tl.load(row + 6), tl.load(row + 7), tl.load(row + 8).to(tl.float64)
    entries, squares = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    for i in range(0, strips, BLOCK):
        strip = i + tl.arange(0, BLOCK)
        entries += tl.load(sums + first + strip, mask=strip < strips, other=0.0)
        squares += tl.load(sums + strip_count + first + strip, mask=strip < strips, other=0.0)
    mean, energy = tl.sum(entries) / numel, tl.sum(squares) / numel
    variance = energy - mean * mean
    deviation = tl.sqrt(tl.where(variance > FLAT * energy, variance, 0.0))
    t = mean + deviation * tl.load(quantiles + segment)
    tl.store(thresholds + segment, t)
    own = bounds + segment * THRESHOLDS
    tl.store(own, _bound(t))
    tl.store(own + 1, _bound(t * 0.5))
    tl.store(own + 2, _bound(t * 1.5))
    tl.store(own + 3, _bound(t * 0.25))
    tl.store(own + 4, _bound(t * 0.5 * 1.5))
    tl.store(own + 5, _bound(t * 1.5 * 1.5))


@triton.jit
def _above(bits, one, two):
    """Two counts in a word: what reaches ``one`` in its lower half, what reaches ``two`` in its upper half."""
    return tl.where(bits >= one, 1, 0) + tl.where(bits >= two, 65536, 0)


@triton.jit
def count(after, strips, bounds, tallies, strip_count, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The second pass: how many of a strip's entries lie above each threshold, two counts a word."""
    strip = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    start = tl.multiple_of(tl.load(strips + strip * STRIP), 128)
    low, high = tl.load(strips + strip * STRIP + 1), tl.load(strips + strip * STRIP + 2)
    own = bounds + tl.load(strips + strip * STRIP + 3) * THRESHOLDS
    b0, b1, b2 = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    b3, b4, b5 = tl.load(own + 3), tl.load(own + 4), tl.load(own + 5)
    n0, n2, n4 = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    if (low == start) & (high == start + BLOCK * BLOCKS):
        for i in range(BLOCKS):
            bits = _bits(tl.load(after + start + i * BLOCK + lane))
            n0 += _above(bits, b0, b1)
            n2 += _above(bits, b2, b3)
            n4 += _above(bits, b4, b5)
    else:
        for i in range(BLOCKS):
            offs = start + i * BLOCK + lane
            bits = _bits(tl.load(after + offs, mask=(offs >= low) & (offs < high), other=0.0))
            n0 += _above(bits, b0, b1)
            n2 += _above(bits, b2, b3)
            n4 += _above(bits, b4, b5)
    tl.store(tallies + strip, tl.sum(n0))
    tl.store(tallies + strip_count + strip, tl.sum(n2))
    tl.store(tallies + 2 * strip_count + strip, tl.sum(n4))


@triton.jit
def _both(words, strips, BLOCK: tl.constexpr):
    """The two counts of all words of a segment, each summed."""
    lower, upper = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for i in range(0, strips, BLOCK):
        strip = i + tl.arange(0, BLOCK)
        word = tl.load(words + strip, mask=strip < strips, other=0)
        lower += word & 0xFFFF
        upper += word >> 16
    return tl.sum(lower), tl.sum(upper)


@triton.jit
def walk(segments, thresholds, tallies, choice, strip_count, BLOCK: tl.constexpr):
    """The paper's loop over counts that are all known: one segment a program."""
    segment = tl.program_id(0)
    row = segments + segment * SEGMENT
    k, numel, first, strips = tl.load(row), tl.load(row + 8), tl.load(row + 6), tl.load(row + 7)
    t0 = tl.load(thresholds + segment)
    at, at_half = _both(tallies + first, strips, BLOCK)
    at_more, at_quarter = _both(tallies + strip_count + first, strips, BLOCK)
    at_both, at_most = _both(tallies + 2 * strip_count + first, strips, BLOCK)
    few0 = 3 * at < 2 * k
    t1 = t0 * tl.where(few0, 0.5, 1.5).to(tl.float64)
    at1 = tl.where(few0, at_half, at_more)
    few1 = 3 * at1 < 2 * k
    t2 = t1 * tl.where(few1, 0.5, 1.5).to(tl.float64)
    at2 = tl.where(few0 & few1, at_quarter, tl.where(few0 | few1, at_both, at_most))
    few2 = 3 * at2 < 2 * k
    t = t2 * tl.where(few2, 0.5, 1.5).to(tl.float64)
    t = tl.where(few2 | (3 * at2 > 4 * k), t, t2)
    t = tl.where(few1 | (3 * at1 > 4 * k), t, t1)
    t = tl.where(few0 | (3 * at > 4 * k), t, t0)
    bound = tl.where(k < numel, _bound(t), 1)  # otherwise everything is sent
    tl.store(choice + segment * CHOICE + 2, bound.to(tl.int64))


@triton.jit
def _gather_block(after, offs, low, high, bound, counter, spill, room, capacity, first, behind, places, values,
                  MASKED: tl.constexpr):  # fmt: skip
    if MASKED:
        u = tl.load(after + offs, mask=(offs >= low) & (offs < high), other=0.0)
    else:
        u = tl.load(after + offs)
    hit = _bits(u) >= bound
    spot = tl.atomic_add(counter + tl.zeros_like(offs), 1, mask=hit, sem="relaxed")
    full = hit & (spot >= room)
    over = tl.atomic_add(spill + tl.zeros_like(offs), 1, mask=full, sem="relaxed")
    slot = tl.where(full, behind + over, first + spot)
    fits = hit & ((spot < room) | (over < capacity))
    tl.store(values + slot, u, mask=fits)
    tl.store(places + slot, offs.to(places.dtype.element_ty), mask=fits)


@triton.jit
def gather(
    after, strips, segments, choice, turn, counts, places, values, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """The third pass: list what lies above each segment's last threshold.

    Which strip of a segment comes first, and which entry of a small one, moves on with every step, so that nothing is
    favoured where more lie above than may be sent. Once that is certain, the strips left have nothing to add.
    """
    pid, turned, lane = tl.program_id(0), tl.load(turn), tl.arange(0, BLOCK)
    segment = tl.load(strips + pid * STRIP + 3)
    row = segments + segment * SEGMENT
    capacity, base, regions = tl.load(row + 1).to(tl.int32), tl.load(row + 2), tl.load(row + 3)
    room, start_of, many = tl.load(row + 4).to(tl.int32), tl.load(row + 6), tl.load(row + 7)
    spill = counts + (base + regions) * PAD
    if tl.load(spill, volatile=True) < capacity:
        strip = start_of + (pid - start_of + turned) % many
        start = tl.multiple_of(tl.load(strips + strip * STRIP), 128)
        low, high = tl.load(strips + strip * STRIP + 1), tl.load(strips + strip * STRIP + 2)
        region = strip % regions
        counter = counts + (base + region) * PAD
        first = (tl.load(row + 5) + region * room).to(tl.int32)
        behind = (tl.load(row + 5) + regions * room).to(tl.int32)
        bound = tl.load(choice + segment * CHOICE + 2).to(tl.int32)
        if (low == start) & (high == start + BLOCK * BLOCKS) & (many >= FEW):
            for i in range(BLOCKS):
                _gather_block(after, start + i * BLOCK + lane, low, high, bound, counter, spill, room, capacity, first,
                              behind, places, values, False)  # fmt: skip
        else:
            for i in range(BLOCKS):
                offs = start + i * BLOCK + (lane + turned) % BLOCK
                _gather_block(after, offs, low, high, bound, counter, spill, room, capacity, first, behind, places,
                              values, True)  # fmt: skip


@triton.jit
def tally(segments, counts, found, choice, given, peaks, shares, turn):
    """How many entries every region holds: one segment a program. Counters start again."""
    segment = tl.program_id(0)
    row = segments + segment * SEGMENT
    capacity, base, regions = tl.load(row + 1).to(tl.int32), tl.load(row + 2), tl.load(row + 3)
    room, lane = tl.load(row + 4).to(tl.int32), tl.arange(0, MOST_REGIONS)
    there = lane < regions
    own = tl.minimum(tl.load(counts + (base + lane) * PAD, mask=there, other=0), room)
    spilt = tl.minimum(tl.load(counts + (base + regions) * PAD), capacity)
    tl.store(counts + (base + lane) * PAD, tl.zeros([MOST_REGIONS], tl.int32), mask=there)
    tl.store(counts + (base + regions) * PAD, 0)
    tl.store(found + base + lane, own, mask=there)
    spills = tl.cdiv(capacity, room)
    tl.store(found + base + regions + lane, tl.minimum(tl.maximum(spilt - lane * room, 0), room), mask=lane < spills)
    tl.store(choice + segment * CHOICE + 3, tl.sum(own.to(tl.int64)) + spilt)
    tl.store(given + segment, 0)
    tl.store(peaks + segment, 0)
    tl.store(shares + segment, 0)
    if segment == 0:
        tl.store(turn, (tl.load(turn) * 5 + 40503) & 0xFFFFF)
