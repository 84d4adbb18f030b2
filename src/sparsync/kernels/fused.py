"""The pass over a gradient as Triton kernels: add, collect what is above a floor, choose among that, take it out.

``collect`` is the only pass over memory: it adds the gradient to the residual and appends every entry at or above its
segment's floor to a list of candidates, about 2 k of them. ``count`` makes a histogram of these, ``decide`` tells from
where on they go, and the floor for the next step; ``finish`` takes them out of the residual. Nothing waits for the
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
MOST_REGIONS = tl.constexpr(128)
PAD = tl.constexpr(32)  # words between counters: each on a line of its own
HIT, ODD = tl.constexpr(1 << 16), tl.constexpr(1 << 8)  # units of the bytes that ``_block`` notes

# Columns of the tables.
STRIP = tl.constexpr(4)  # start, low, high, segment
SEGMENT = tl.constexpr(
    9
)  # k, capacity, first region, regions, room of one, first candidate, first sample, samples, numel
STATE = tl.constexpr(4)  # floor, k, left, inflow
CHOICE = tl.constexpr(4)  # candidates, edge, the bits from which on entries go, how many these are


@triton.jit
def _bits(u):
    return u.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _bin(up):
    """As ``floors.bins_of``."""
    wide = tl.minimum(((up - WIDE_BITS) >> WIDE) + WIDE_FROM, BINS - 1)
    middle = ((up - MIDDLE_BITS) >> MIDDLE) + MIDDLE_FROM
    return tl.where(up < MIDDLE_BITS, up >> FINE, tl.where(up < WIDE_BITS, middle, wide))


@triton.jit
def added(
    grad, before, after, speed_before, speed_after, beta, scale, offs, low, high,
    MASKED: tl.constexpr, MOMENTUM: tl.constexpr, SCALED: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """``after = before + gradient`` (or its velocity); where that is not finite, everything stays as it was.

    Returns what then stands there (0 outside), and where it was not finite.
    """
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
        if ZERO:
            tl.store(grad + offs, tl.zeros_like(u).to(grad.dtype.element_ty), mask=inside)
    else:
        tl.store(after + offs, u)
        if MOMENTUM:
            tl.store(speed_after + offs, tl.where(odd, old, g))
        if ZERO:
            tl.store(grad + offs, tl.zeros_like(u).to(grad.dtype.element_ty))
    return u, odd


@triton.jit
def _block(
    grad, before, after, speed_before, speed_after, beta, scale, offs, low, high, floor, bit,
    MASKED: tl.constexpr, MOMENTUM: tl.constexpr, SCALED: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """What a lane notes of a block, to be added up: of candidates ``bit`` in the lowest byte, and how many in the
    third; of what was not finite ``bit`` in the second."""
    u, odd = added(grad, before, after, speed_before, speed_after, beta, scale, offs, low, high, MASKED, MOMENTUM,
                   SCALED, ZERO)  # fmt: skip
    # Outside, u is 0: below every floor, and finite.
    return tl.where(_bits(u) >= floor, HIT + bit, 0) + tl.where(odd, ODD * bit, 0)


@triton.jit
def _offset(word, BLOCK: tl.constexpr):
    """Where the entry of a word's lowest bit is: a byte for each of four lanes, in it a bit for each block."""
    bit = ((word & -word).to(tl.float32).to(tl.int32, bitcast=True) >> 23 & 255) - 127
    return (bit & 7) * BLOCK + (bit >> 3)


@triton.jit
def collect(
    grad, before, after, speed_before, speed_after, beta, scales, strips, segments, state, turn, counts, places, values,
    out_places, out_values, total, strip_count, out_size, last,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MOMENTUM: tl.constexpr, SCALED: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """The pass: one strip of a segment a program. On the side, the last message is cleared, a piece a program.

    A lane only notes which of its blocks hold a candidate: listing them at once would hold up the loads behind.
    """
    pid, lane = tl.program_id(0), tl.arange(0, BLOCK)
    for piece in range(pid, tl.cdiv(out_size, BLOCK), strip_count):
        slot = piece * BLOCK + lane
        tl.store(out_places + slot, tl.zeros([BLOCK], tl.int64), mask=slot < out_size)
        tl.store(out_values + slot, tl.zeros([BLOCK], tl.float32), mask=slot < out_size)
    if pid == 0:
        tl.store(total, 0)
    # Which strip comes first moves on with every step, so that nothing is favoured where a region overflows.
    strip = (pid + tl.load(turn)) % strip_count
    start = tl.multiple_of(tl.load(strips + strip * STRIP), 128)
    low, high = tl.load(strips + strip * STRIP + 1), tl.load(strips + strip * STRIP + 2)
    segment = tl.load(strips + strip * STRIP + 3)
    floor = tl.maximum(tl.load(state + segment * STATE), 1).to(tl.int32)
    scale = 1.0
    if SCALED:
        scale = tl.load(scales + segment)
    noted = tl.zeros([BLOCK], tl.int32)
    if (low == start) & (high == start + BLOCK * BLOCKS):
        for i in range(BLOCKS):
            noted += _block(grad, before, after, speed_before, speed_after, beta, scale, start + i * BLOCK + lane,
                            low, high, floor, 1 << i, False, MOMENTUM, SCALED, ZERO)  # fmt: skip
    else:
        for i in range(BLOCKS):
            noted += _block(grad, before, after, speed_before, speed_after, beta, scale, start + i * BLOCK + lane,
                            low, high, floor, 1 << i, True, MOMENTUM, SCALED, ZERO)  # fmt: skip
    row = segments + segment * SEGMENT
    base, regions, room, first = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4).to(tl.int32), tl.load(row + 5)
    region = strip % regions.to(tl.int32)
    counter, first = counts + (base + region) * PAD, first + region.to(tl.int64) * room
    # Four lanes make a word, 8 bits each: so much is one thread's own, and what follows has a quarter of the work.
    lanes, byte = tl.reshape(noted, [BLOCK // 4, 4]), 8 * tl.arange(0, 4)[None, :]
    many = tl.sum(lanes >> 16, 1)
    left, wrong = tl.sum((lanes & 255) << byte, 1), tl.sum((lanes >> 8 & 255) << byte, 1)
    word = tl.arange(0, BLOCK // 4)
    spot = tl.atomic_add(counter + tl.zeros_like(word), many, mask=many > 0, sem="relaxed")
    # What is not finite leaves its index in the slot behind the list.
    place = start + _offset(wrong, BLOCK) + 4 * word
    tl.store(places + last + tl.zeros_like(word), place.to(places.dtype.element_ty), mask=wrong != 0)
    tl.debug_barrier()  # what was stored may be read back by another thread
    for _ in range(tl.max(many)):
        place = start + _offset(left, BLOCK) + 4 * word
        fits = (left != 0) & (spot < room)
        u = tl.load(after + place, mask=fits, other=0.0)
        tl.store(values + first + spot, u, mask=fits)
        tl.store(places + first + spot, place.to(places.dtype.element_ty), mask=fits)
        spot += 1
        left &= left - 1


@triton.jit
def count(values, counts, owners, segments, state, histogram, BLOCK: tl.constexpr):
    """The histogram of every segment's candidates: one region a program. (Made by ``collect``, entry by entry, it would
    cost several times as much.)"""
    region = tl.program_id(0)
    segment = tl.load(owners + region)
    row = segments + segment * SEGMENT
    room = tl.load(row + 4).to(tl.int32)
    first = tl.load(row + 5) + (region - tl.load(row + 2)) * room
    size = tl.minimum(tl.load(counts + region * PAD), room)
    floor = tl.maximum(tl.load(state + segment * STATE), 1).to(tl.int32)
    sums = tl.zeros([BINS], tl.int32)
    for i in range(0, size, BLOCK):
        spot = i + tl.arange(0, BLOCK)
        real = spot < size
        up = _bits(tl.load(values + first + spot, mask=real, other=0.0)) - floor
        sums += tl.histogram(tl.where(real, _bin(up), 0), BINS, mask=real)
    tl.atomic_add(histogram + segment * BINS + tl.arange(0, BINS), sums, mask=sums > 0, sem="relaxed")


@triton.jit
def _edge_bits(bin):
    """As ``floors.edge_bits``."""
    middle = ((bin - MIDDLE_FROM) << MIDDLE) + MIDDLE_BITS
    wide = ((bin - WIDE_FROM) << WIDE) + WIDE_BITS
    return tl.where(bin < MIDDLE_FROM, bin << FINE, tl.where(bin < WIDE_FROM, middle, wide))


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
def _steer(after, samples, row, own, reached, candidates, edge, BLOCK: tl.constexpr):
    """The floor for the next step, as ``floors.steer``; ``reached``: as there, in 64 bits."""
    k, numel = tl.load(row), tl.load(row + 8)
    known, left, inflow = tl.load(own), tl.load(own + 2), tl.load(own + 3)
    target = 2 * k + 16
    if k < numel:  # otherwise everything is sent
        if (known == 0) | (candidates == 0) | (candidates > 8 * (12 * k + 256)):
            guessed = _guess(after, samples, row, k, BLOCK)
            tl.store(own, tl.where(guessed > 0, guessed, known))
            tl.store(own + 2, k // 2)
            tl.store(own + 3, k)
        else:
            stored = tl.maximum(_at(reached, 0, BINS), 1)
            if candidates > stored:  # where a region overflowed, what it holds stands for all
                reached = reached * candidates // stored
            sent = tl.minimum(_at(reached, edge, BINS), k)
            inflow = (3 * inflow + tl.maximum(candidates - left, 0)) // 4
            left = candidates - sent
            if left + inflow > target:
                expected = tl.maximum(reached - sent, 0) * candidates + inflow * reached
                higher = tl.minimum(edge, tl.sum((expected > target * candidates).to(tl.int64)))
                up = _at(reached, higher, BINS)
                tl.store(own, known + _edge_bits(higher))
                tl.store(own + 2, tl.maximum(up - sent, 0))
                tl.store(own + 3, inflow * up // candidates)
            else:
                missing = target - left - inflow
                near = tl.maximum(candidates - _at(reached, NEAR, BINS), 1)
                down = tl.minimum(missing * (NEAR << FINE) // near, QUARTER)
                down = tl.where(2 * _at(reached, BINS - 1, BINS) > k, 0, down)
                tl.store(own, tl.maximum(known - down, 1))
                tl.store(own + 2, left + missing)
                tl.store(own + 3, inflow)
        tl.store(own + 1, k)


@triton.jit
def decide(
    after, counts, found, segments, samples, state, histogram, given, choice, peaks, shares, turn, BLOCK: tl.constexpr
):
    """From where on a segment's candidates go, and its next floor: one segment a program. Counters start again."""
    segment = tl.program_id(0)
    row, own = segments + segment * SEGMENT, state + segment * STATE
    regions, lane = tl.load(row + 2), tl.arange(0, MOST_REGIONS)
    there = lane < tl.load(row + 3)
    bins = tl.arange(0, BINS)
    many = tl.load(counts + (regions + lane) * PAD, mask=there, other=0)
    reached = tl.cumsum(tl.load(histogram + segment * BINS + bins), reverse=True)
    floor = tl.maximum(tl.load(own), 1)
    k = tl.load(row)
    edge = tl.minimum(tl.sum((reached > k).to(tl.int32)), BINS - 1).to(tl.int64)
    few = 100 * _at(reached, edge, BINS) < 99 * k
    edge = tl.where((edge > 0) & few, edge - 1, edge)
    candidates = tl.sum(many.to(tl.int64))
    tl.store(counts + (regions + lane) * PAD, tl.zeros([MOST_REGIONS], tl.int32), mask=there)
    tl.store(found + regions + lane, tl.minimum(many, tl.load(row + 4).to(tl.int32)), mask=there)
    tl.store(histogram + segment * BINS + bins, tl.zeros([BINS], tl.int32))
    mine = choice + segment * CHOICE
    tl.store(mine, candidates)
    tl.store(mine + 1, edge)
    tl.store(mine + 2, floor + _edge_bits(edge))
    tl.store(mine + 3, _at(reached, edge, BINS).to(tl.int64))
    tl.store(given + segment, _at(reached, edge + 1, BINS))  # those above it go in any case
    tl.store(peaks + segment, 0)
    tl.store(shares + segment, 0)
    if segment == 0:
        tl.store(turn, (tl.load(turn) * 5 + 40503) & 0xFFFFF)
    _steer(after, samples, row, own, reached.to(tl.int64), candidates, edge, BLOCK)


@triton.jit
def _rounded(u, CODEC: tl.constexpr):
    """As the codecs round: to half precision, or to a power of 2 below its range's end."""
    if CODEC == 1:
        near = u.to(tl.float16).to(tl.float32)
        return tl.where(tl.abs(u) > 65504.0, tl.where(u < 0, -32768.0, 32768.0), near)
    elif CODEC == 2:
        word = u.to(tl.int32, bitcast=True)  # to the nearest, ties to even: written out, as the interpreter cuts off
        near = ((word + 0x7FFF + ((word >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        return tl.where(_bits(u) > 0x7F7F0000, tl.where(u < 0, -1.7014118346046923e38, 1.7014118346046923e38), near)
    else:
        return u


@triton.jit
def _mine(values, found, owners, segments, choice, regions, BLOCK: tl.constexpr):
    """A program's piece of the candidates that go: whose, their magnitudes, and which are real."""
    pid = tl.program_id(0)
    region = pid % regions
    segment = tl.load(owners + region)
    row = segments + segment * SEGMENT
    first = tl.load(row + 5) + (region - tl.load(row + 2)) * tl.load(row + 4)
    spot = pid // regions * BLOCK + tl.arange(0, BLOCK)
    real = spot < tl.load(found + region)
    bits = _bits(tl.load(values + first + spot, mask=real, other=0.0))
    return segment, bits, real & (bits >= tl.load(choice + segment * CHOICE + 2))


@triton.jit
def peak(values, found, owners, segments, choice, peaks, regions, BLOCK: tl.constexpr):
    """The largest magnitude that goes, of every segment, for one scale that all share."""
    if tl.program_id(0) // regions * BLOCK < tl.load(found + tl.program_id(0) % regions):
        segment, bits, going = _mine(values, found, owners, segments, choice, regions, BLOCK)
        tl.atomic_max(peaks + segment, tl.max(tl.where(going, bits, 0)), sem="relaxed")


@triton.jit
def share(values, found, owners, segments, choice, peaks, shares, regions, BLOCK: tl.constexpr):
    """The sum of what goes, of every segment, in 2**-24ths of the peak: integers add up to the same in any order."""
    if tl.program_id(0) // regions * BLOCK < tl.load(found + tl.program_id(0) % regions):
        segment, bits, going = _mine(values, found, owners, segments, choice, regions, BLOCK)
        top = tl.maximum(tl.load(peaks + segment), 0x00800000).to(tl.float32, bitcast=True)
        part = (tl.div_rn(bits.to(tl.float32, bitcast=True), top) * 16777216.0).to(tl.int64)
        tl.atomic_add(shares + segment, tl.sum(tl.where(going, part, 0)), sem="relaxed")


@triton.jit
def _scale(peaks, shares, choice):
    """As the wire's signs: the mean magnitude, at least 2**-14 of the largest, in 8 significant bits."""
    top = tl.load(peaks).to(tl.float32, bitcast=True).to(tl.float64)
    number = tl.maximum(tl.load(choice + 3), 1).to(tl.float64)
    mean = top * (tl.load(shares).to(tl.float64) / (number * 16777216.0))
    scale = tl.minimum(tl.maximum(mean, top * 6.103515625e-05), 3.4028234663852886e38).to(tl.float32)
    return (scale.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _travelling(u, going, peaks, shares, choice, CODEC: tl.constexpr):
    """Entries as they travel, what stays of each, and which of those that go can be put together again exactly."""
    if CODEC == 3:
        scale = _scale(peaks, shares, choice)
        sent = tl.where(tl.abs(u) >= scale / 2, tl.where(u < 0, -scale, scale), 0.0)
    elif CODEC == 4:
        scale, size = _scale(peaks, shares, choice), tl.abs(u)
        level = tl.where(size > 0.75 * scale, scale, scale / 2)
        level = tl.where(size > 1.5 * scale, 2 * scale, level)
        level = tl.where(size > 3.0 * scale, 4 * scale, level)
        least = tl.where(scale < 7.888609052210118e-31, float("inf"), scale / 4)  # 2**-100
        sent = tl.where(size >= least, tl.where(u < 0, -level, level), 0.0)
    else:
        sent = _rounded(u, CODEC)
    rest = u - sent
    if CODEC != 0:
        going = going & (sent != 0.0) & (rest + sent == u) & (u - rest == sent)
    return sent, rest, going


@triton.jit
def _tell(slot, spans, span_count, flags, BLOCK: tl.constexpr):
    """The flags of a gradient, and the parameter of an entry that was not finite; its slot starts again."""
    where = tl.load(slot).to(tl.int64)
    parameter = tl.zeros([], tl.int32) - 1
    if where >= 0:
        for i in range(0, span_count, BLOCK):
            number = i + tl.arange(0, BLOCK)
            start = tl.load(spans + number, mask=number < span_count, other=0x7FFFFFFFFFFFFFFF)
            parameter += tl.sum((start <= where).to(tl.int32))
    tl.store(flags, (where >= 0).to(tl.int32))
    tl.store(flags + 1, parameter)
    tl.store(slot, -1)


@triton.jit
def finish(
    after, speed_after, places, values, found, owners, segments, spans, given, choice, peaks, shares, out_places,
    out_values, total, flags, regions, takers, span_count, last,
    BLOCK: tl.constexpr, CODEC: tl.constexpr, MASKING: tl.constexpr,
):  # fmt: skip
    """Take the entries to send out of the residual: ``takers`` programs a region. The first program tells the flags."""
    if tl.program_id(0) == 0:
        _tell(places + last, spans, span_count, flags, BLOCK)
    else:
        pid = tl.program_id(0) - 1
        region = pid % regions
        size, segment = tl.load(found + region), tl.load(owners + region)
        row, mine = segments + segment * SEGMENT, choice + segment * CHOICE
        capacity = tl.load(row + 1).to(tl.int32)
        first = tl.load(row + 5) + (region - tl.load(row + 2)) * tl.load(row + 4)
        bound, reached = tl.load(mine + 2), tl.load(mine + 3)
        for i in range(pid // regions * BLOCK, size, takers * BLOCK):
            spot = i + tl.arange(0, BLOCK)
            real = spot < size
            u = tl.load(values + first + spot, mask=real, other=0.0)
            place = tl.load(places + first + spot, mask=real, other=0).to(tl.int64)
            going = real & (_bits(u) >= bound)
            sent, rest, going = _travelling(u, going, peaks + segment, shares + segment, mine, CODEC)
            number = tl.cumsum(going.to(tl.int32))
            many = tl.max(number)
            if many > 0:
                if reached > capacity:  # of the lowest bin: first come, first served
                    edge = tl.load(mine + 1)
                    above = bound + _edge_bits(edge + 1) - _edge_bits(edge)
                    lowest = going & ((_bits(u) < above) | (edge == BINS - 1))
                    in_line = tl.cumsum(lowest.to(tl.int32))
                    free = capacity - tl.atomic_add(given + segment, tl.max(in_line), sem="relaxed")
                    going = going & ((lowest == 0) | (in_line <= free))
                    number = tl.cumsum(going.to(tl.int32))
                    many = tl.max(number)
                slot = tl.atomic_add(total, many.to(tl.int64), sem="relaxed") + number - 1
                tl.store(out_places + slot, place, mask=going)
                tl.store(out_values + slot, sent, mask=going)
                tl.store(after + place, rest, mask=going)
                if MASKING:
                    tl.store(speed_after + place, tl.zeros_like(u), mask=going)
