"""The pass over a gradient as Triton kernels: add, collect what is above a floor, choose among that, take it out.

``collect`` is the only pass over memory: it adds the gradient to the residual and appends every entry at or above its
segment's floor to a list of candidates. ``count`` and ``finish`` look at candidates alone, about 2 k of them: a
histogram, and then the entries to send are taken out of the residual and the next floor is set. Nothing waits for the
host. ``floors.py`` is the specification of what they find.

A segment's candidates go to several regions of the list, each with a counter of its own: at one counter for all, the
entries would queue up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels import floors

BINS = tl.constexpr(floors.BINS)
FINE, MIDDLE, WIDE = tl.constexpr(floors.FINE), tl.constexpr(floors.MIDDLE), tl.constexpr(floors.WIDE)
MIDDLE_FROM, WIDE_FROM = tl.constexpr(floors.MIDDLE_FROM), tl.constexpr(floors.WIDE_FROM)
MIDDLE_BITS, WIDE_BITS = tl.constexpr(floors.MIDDLE_BITS), tl.constexpr(floors.WIDE_BITS)
NEAR, QUARTER = tl.constexpr(floors.NEAR), tl.constexpr(floors.OCTAVE // 4)
COARSE, COARSE_BINS = tl.constexpr(floors.COARSE), tl.constexpr(2048)
INFINITE = tl.constexpr(0x7F800000)  # bits of infinity; NaN is above
NOWHERE = tl.constexpr(0x7FFFFFFF)  # no parameter has this number
MOST_REGIONS = tl.constexpr(128)
PAD = tl.constexpr(32)  # words between counters: each on a line of its own

# Columns of the tables.
STRIP = tl.constexpr(5)  # start, low, high, segment, parameter
SEGMENT = tl.constexpr(
    9
)  # k, capacity, first region, regions, room of one, first candidate, first sample, samples, numel
STATE = tl.constexpr(4)  # floor, k, left, inflow


@triton.jit
def _bits(u):
    return u.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _bin(up):
    """As ``floors.bins_of``."""
    wide = tl.minimum(WIDE_FROM + ((up - WIDE_BITS) >> WIDE), BINS - 1)
    middle = MIDDLE_FROM + ((up - MIDDLE_BITS) >> MIDDLE)
    return tl.where(up < MIDDLE_BITS, up >> FINE, tl.where(up < WIDE_BITS, middle, wide))


@triton.jit
def _block(
    grad, before, after, speed_before, speed_after, beta, scale, bad, parameter, offs, low, high, floor, counter, first,
    room, places, values,
    MASKED: tl.constexpr, MOMENTUM: tl.constexpr, SCALED: tl.constexpr, ZERO: tl.constexpr, COLLECT: tl.constexpr,
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
    hit = _bits(u) >= floor
    if MASKED:
        tl.store(after + offs, u, mask=inside)
        if MOMENTUM:
            tl.store(speed_after + offs, tl.where(odd, old, g), mask=inside)
        if ZERO:
            tl.store(grad + offs, tl.zeros_like(u).to(grad.dtype.element_ty), mask=inside)
        hit = hit & inside
    else:
        tl.store(after + offs, u)
        if MOMENTUM:
            tl.store(speed_after + offs, tl.where(odd, old, g))
        if ZERO:
            tl.store(grad + offs, tl.zeros_like(u).to(grad.dtype.element_ty))
    nowhere = tl.zeros_like(offs).to(tl.int32)
    tl.atomic_min(bad + nowhere, parameter + nowhere, mask=odd, sem="relaxed")
    if COLLECT:
        spot = tl.atomic_add(counter + nowhere, 1, mask=hit, sem="relaxed")
        fits = hit & (spot < room)
        tl.store(places + first + spot, offs, mask=fits)
        tl.store(values + first + spot, u, mask=fits)


@triton.jit
def collect(
    grad, before, after, speed_before, speed_after, beta, scales, strips, segments, state, turn, counts, places, values,
    bad, out_places, out_values, total, strip_count, out_size,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MOMENTUM: tl.constexpr, SCALED: tl.constexpr, ZERO: tl.constexpr,
    COLLECT: tl.constexpr,
):  # fmt: skip
    """The pass: one strip of a segment a program. On the side, the last message is cleared, a piece a program."""
    pid = tl.program_id(0)
    for piece in range(pid, tl.cdiv(out_size, BLOCK), strip_count):
        slot = piece * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_places + slot, tl.zeros([BLOCK], tl.int64), mask=slot < out_size)
        tl.store(out_values + slot, tl.zeros([BLOCK], tl.float32), mask=slot < out_size)
    if pid == 0:
        tl.store(total, 0)
    # Which strip comes first moves on with every step, so that nothing is favoured where a region overflows.
    strip = (pid + tl.load(turn)) % strip_count
    start = tl.multiple_of(tl.load(strips + strip * STRIP), 128)
    low, high = tl.load(strips + strip * STRIP + 1), tl.load(strips + strip * STRIP + 2)
    segment, parameter = tl.load(strips + strip * STRIP + 3), tl.load(strips + strip * STRIP + 4).to(tl.int32)
    row = segments + segment * SEGMENT
    region = tl.load(row + 2) + strip % tl.load(row + 3)
    room = tl.load(row + 4).to(tl.int32)
    first = tl.load(row + 5) + (region - tl.load(row + 2)) * room
    floor = tl.maximum(tl.load(state + segment * STATE), 1).to(tl.int32)
    counter = counts + region * PAD
    scale = 1.0
    if SCALED:
        scale = tl.load(scales + segment)
    if (low == start) & (high == start + BLOCK * BLOCKS):
        for i in range(BLOCKS):
            offs = start + i * BLOCK + tl.arange(0, BLOCK)
            _block(grad, before, after, speed_before, speed_after, beta, scale, bad, parameter, offs, low, high, floor,
                   counter, first, room, places, values, False, MOMENTUM, SCALED, ZERO, COLLECT)  # fmt: skip
    else:
        for i in range(BLOCKS):
            offs = start + i * BLOCK + tl.arange(0, BLOCK)
            _block(grad, before, after, speed_before, speed_after, beta, scale, bad, parameter, offs, low, high, floor,
                   counter, first, room, places, values, True, MOMENTUM, SCALED, ZERO, COLLECT)  # fmt: skip


@triton.jit
def count(values, counts, owners, segments, state, histogram, BLOCK: tl.constexpr):
    """The histogram of every segment's candidates: one region a program."""
    region = tl.program_id(0)
    segment = tl.load(owners + region)
    row = segments + segment * SEGMENT
    room = tl.load(row + 4).to(tl.int32)
    first = tl.load(row + 5) + (region - tl.load(row + 2)) * room
    found = tl.minimum(tl.load(counts + region * PAD), room)
    floor = tl.maximum(tl.load(state + segment * STATE), 1).to(tl.int32)
    sums = tl.zeros([BINS], tl.int32)
    for i in range(0, found, BLOCK):
        spot = i + tl.arange(0, BLOCK)
        real = spot < found
        up = _bits(tl.load(values + first + spot, mask=real, other=0.0)) - floor
        sums += tl.histogram(tl.where(real, _bin(up), 0), BINS, mask=real)
    tl.atomic_add(histogram + segment * BINS + tl.arange(0, BINS), sums, mask=sums > 0, sem="relaxed")


@triton.jit
def _rounded(u, CODEC: tl.constexpr):
    """As the codecs round: to half precision, or to a power of 2 below its range's end."""
    if CODEC == 1:
        near = u.to(tl.float16).to(tl.float32)
        return tl.where(tl.abs(u) > 65504.0, tl.where(u < 0, -32768.0, 32768.0), near)
    elif CODEC == 2:
        near = u.to(tl.bfloat16).to(tl.float32)
        return tl.where(_bits(u) > 0x7F7F0000, tl.where(u < 0, -1.7014118346046923e38, 1.7014118346046923e38), near)
    else:
        return u


@triton.jit
def _at(vector, index, SIZE: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, SIZE) == index, vector, 0))


@triton.jit
def _guess(after, samples, row, k, BLOCK: tl.constexpr):
    """As ``floors.guess``."""
    first, size, numel = tl.load(row + 6), tl.load(row + 7), tl.load(row + 8)
    coarse = tl.zeros([COARSE_BINS], tl.int32)
    nonzero = tl.zeros([BLOCK], tl.int32)
    for i in range(0, size, BLOCK):
        spot = i + tl.arange(0, BLOCK)
        real = spot < size
        place = tl.load(samples + first + spot, mask=real, other=0)
        bits = tl.where(real, _bits(tl.load(after + place, mask=real, other=0.0)), 0)
        nonzero += (bits > 0).to(tl.int32)
        coarse += tl.histogram(bits >> COARSE, COARSE_BINS, mask=bits > 0)
    many = tl.sum(nonzero).to(tl.int64)
    target = 2 * k + 16
    wanted = tl.minimum(many, (target * size + numel - 1) // numel)
    reached = tl.cumsum(coarse, reverse=True).to(tl.int64)
    bin = tl.sum((reached >= wanted).to(tl.int64)) - 1
    return tl.where(many > 0, tl.maximum(bin << COARSE, 1), 0)


@triton.jit
def finish(
    after, speed_after, places, values, counts, owners, segments, samples, state, histogram, given, tickets, turn, bad,
    limits, out_places, out_values, total, flags,
    BLOCK: tl.constexpr, CODEC: tl.constexpr, MASKING: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Take the entries to send out of the residual: one region a program; the last of a segment sets its next floor."""
    region = tl.program_id(0)
    segment = tl.load(owners + region)
    row = segments + segment * SEGMENT
    k, capacity = tl.load(row), tl.load(row + 1)
    regions, numel = tl.load(row + 3), tl.load(row + 8)
    room = tl.load(row + 4).to(tl.int32)
    first = tl.load(row + 5) + (region - tl.load(row + 2)) * room
    found = tl.minimum(tl.load(counts + region * PAD), room)
    own = state + segment * STATE
    floor = tl.maximum(tl.load(own), 1)
    bins = tl.arange(0, BINS)
    reached = tl.cumsum(tl.load(histogram + segment * BINS + bins), reverse=True).to(tl.int64)
    edge = tl.minimum(tl.sum((reached > k).to(tl.int64)), BINS - 1)
    if region == 0:
        where = tl.load(bad)
        tl.store(flags, (where < NOWHERE).to(tl.int32))
        tl.store(flags + 1, tl.where(where < NOWHERE, where, -1))
        tl.store(bad, NOWHERE)
    limit = tl.zeros([], tl.int64)
    if EXACT:
        limit = tl.load(limits + segment)
    for i in range(0, found, BLOCK):
        spot = i + tl.arange(0, BLOCK)
        real = spot < found
        u = tl.load(values + first + spot, mask=real, other=0.0)
        place = tl.load(places + first + spot, mask=real, other=0)
        if EXACT:
            going = real & ((((0x7FFFFFFF - _bits(u)).to(tl.int64) << 32) | place) <= limit)
        else:
            going = real & (_bin(_bits(u) - floor.to(tl.int32)) >= edge)
        sent = _rounded(u, CODEC)
        rest = u - sent
        if CODEC != 0:  # what could not be put together again exactly stays where it is
            going = going & (sent != 0.0) & (rest + sent == u) & (u - rest == sent)
        number = tl.cumsum(going.to(tl.int32)) - 1
        many = tl.sum(going.to(tl.int32))
        used = tl.atomic_add(given + segment, many, sem="relaxed")
        free = tl.maximum(capacity.to(tl.int32) - used, 0)
        going = going & (number < free)
        slot = tl.atomic_add(total, tl.minimum(many, free).to(tl.int64), sem="relaxed") + number
        tl.store(out_places + slot, place, mask=going)
        tl.store(out_values + slot, sent, mask=going)
        tl.store(after + place, rest, mask=going)
        if MASKING:
            tl.store(speed_after + place, tl.zeros_like(u), mask=going)
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets + segment, 1, sem="acq_rel")
    if ticket == regions - 1:  # all others are done
        lane = tl.arange(0, MOST_REGIONS)
        mine = counts + (tl.load(row + 2) + lane) * PAD
        candidates = tl.sum(tl.load(mine, mask=lane < regions, other=0)).to(tl.int64)
        left, inflow = tl.load(own + 2), tl.load(own + 3)
        target = 2 * k + 16
        if k >= numel:  # everything is sent
            tl.store(own, 0)
        elif (tl.load(own) == 0) | (candidates == 0) | (candidates > 16 * (6 * k + 64)):
            guessed = _guess(after, samples, row, k, BLOCK)
            tl.store(own, tl.where(guessed > 0, guessed, tl.load(own)))
            tl.store(own + 2, k // 2)
            tl.store(own + 3, k)
        else:  # as ``floors.steer``
            stored = tl.maximum(_at(reached, 0, BINS), 1)
            reached = reached * candidates // stored  # where a region overflowed, what it holds stands for all
            some, sent = candidates, _at(reached, edge, BINS)
            inflow = (3 * inflow + tl.maximum(some - left, 0)) // 4
            left = some - sent
            if left + inflow > target:
                expected = tl.maximum(reached - sent, 0) + inflow * reached // tl.maximum(some, 1)
                higher = tl.minimum(edge, tl.sum((expected > target).to(tl.int64)))
                up = _at(reached, higher, BINS)
                middle = MIDDLE_BITS + ((higher - MIDDLE_FROM) << MIDDLE)
                wide = WIDE_BITS + ((higher - WIDE_FROM) << WIDE)
                rise = tl.where(higher < MIDDLE_FROM, higher << FINE, tl.where(higher < WIDE_FROM, middle, wide))
                tl.store(own, floor + rise)
                tl.store(own + 2, tl.maximum(up - sent, 0))
                tl.store(own + 3, inflow * up // tl.maximum(some, 1))
            else:
                missing = target - left - inflow
                near = tl.maximum(some - _at(reached, NEAR, BINS), 1)
                down = tl.minimum(missing * (NEAR << FINE) // near, QUARTER)
                down = tl.where(2 * _at(reached, BINS - 1, BINS) > k, 0, down)
                tl.store(own, tl.maximum(floor - down, 1))
                tl.store(own + 2, left + missing)
                tl.store(own + 3, inflow)
        if k < numel:
            tl.store(own + 1, k)
        tl.store(histogram + segment * BINS + bins, tl.zeros([BINS], tl.int32))
        tl.store(mine, tl.zeros([MOST_REGIONS], tl.int32), mask=lane < regions)
        tl.store(given + segment, 0)
        tl.store(tickets + segment, 0)
        if segment == 0:
            tl.store(turn, (tl.load(turn) * 5 + 40503) & 0xFFFFF)
