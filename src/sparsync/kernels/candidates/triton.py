"""The pass that candidates come from, as Triton kernels: add the gradient, collect what is above a carried threshold.

``collect`` is the only pass over memory: it adds the gradient to the residual and appends every entry at or above its
segment's threshold to a list of candidates, about 2 k of them; ``make_histogram`` counts these. Top-k, threshold and
DGC choose among them, and find the threshold for the next step (``next_threshold``). Nothing waits for the host.
``threshold/reference.py`` is the specification of histogram and thresholds.

A segment's candidates go to several regions of the list, each with a counter of its own: at one counter for all, the
entries would queue up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels import strips as tables
from sparsync.kernels.precondition.triton import (
    COL,
    COL_AT,
    COLS,
    EXACT,
    NUMBER,
    PLACE,
    ROW,
    ROW_AT,
    ROWS,
    make_update,
)
from sparsync.kernels.threshold import reference

BINS = tl.constexpr(reference.BINS)
FINE, MIDDLE, WIDE = tl.constexpr(reference.FINE), tl.constexpr(reference.MIDDLE), tl.constexpr(reference.WIDE)
MIDDLE_FROM, WIDE_FROM = tl.constexpr(reference.MIDDLE_FROM), tl.constexpr(reference.WIDE_FROM)
MIDDLE_BITS, WIDE_BITS = tl.constexpr(reference.MIDDLE_BITS), tl.constexpr(reference.WIDE_BITS)
NEAR, QUARTER = tl.constexpr(reference.NEAR), tl.constexpr(reference.OCTAVE // 4)
COARSE, COARSE_BINS = tl.constexpr(reference.COARSE), tl.constexpr(2048)
INFINITE = tl.constexpr(0x7F800000)  # bits of infinity; NaN is above
LAST_BIT = tl.constexpr(2.0**104)  # of fp32's largest numbers
MOST_REGIONS = tl.constexpr(128)
PAD = tl.constexpr(32)  # words between counters: each on a line of its own
HIT, NONFINITE = tl.constexpr(1 << 16), tl.constexpr(1 << 8)  # units of the bytes that ``_block`` notes

# The columns of the tables, as ``strips.py`` describes them, and how many there are.
STRIP, SEGMENT = tl.constexpr(len(tables.Strip._fields)), tl.constexpr(len(tables.SegmentRow._fields))
CHOICE, STATE = tl.constexpr(len(tables.ChoiceRow._fields)), tl.constexpr(len(tables.STATE))
START, LOW, HIGH, OWNER = map(tl.constexpr, range(STRIP.value))
K, CAPACITY, FIRST_REGION, REGIONS, ROOM, FIRST_ENTRY, NUMEL, FIRST_STRIP, STRIPS, FIRST_SAMPLE, SAMPLES = map(
    tl.constexpr, range(SEGMENT.value)
)
CANDIDATES, EDGE, BOUND, COUNT = map(tl.constexpr, range(CHOICE.value))
CARRIED, MADE_FOR, LEFT, INFLOW = map(tl.constexpr, range(STATE.value))


@triton.jit
def bits_of(u):
    """Return magnitudes as the integers their bits make."""
    return u.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _bin_of(up):
    """Return the bins of magnitudes that lie ``up`` above the threshold, as ``reference.bins_of``."""
    wide = tl.minimum(((up - WIDE_BITS) >> WIDE) + WIDE_FROM, BINS - 1)
    middle = ((up - MIDDLE_BITS) >> MIDDLE) + MIDDLE_FROM
    return tl.where(up < MIDDLE_BITS, up >> FINE, tl.where(up < WIDE_BITS, middle, wide))


@triton.jit
def accumulate(
    grad, before, after, velocity_before, velocity_after, beta, scale, offs, low, high,
    MASKED: tl.constexpr, MOMENTUM: tl.constexpr, SCALED: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Write ``after = before + gradient`` (or its velocity); where that is not finite, everything stays as it was.

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
        old = tl.load(velocity_before + offs, mask=inside, other=0.0) if MASKED else tl.load(velocity_before + offs)
        g = old * beta + g
    u = r + g
    nonfinite = bits_of(u) >= INFINITE
    u = tl.where(nonfinite, r, u)
    if MASKED:
        tl.store(after + offs, u, mask=inside)
        if MOMENTUM:
            tl.store(velocity_after + offs, tl.where(nonfinite, old, g), mask=inside)
        if ZERO:
            tl.store(grad + offs, tl.zeros_like(u).to(grad.dtype.element_ty), mask=inside)
    else:
        tl.store(after + offs, u)
        if MOMENTUM:
            tl.store(velocity_after + offs, tl.where(nonfinite, old, g))
        if ZERO:
            tl.store(grad + offs, tl.zeros_like(u).to(grad.dtype.element_ty))
    return u, nonfinite


@triton.jit
def _accumulate_update(
    grad, before, after, velocity_before, velocity_after, beta, offs, low, high, row_sizes, col_sizes, row, col, rows,
    cols, exact, share, rate, eps, limit, kept,
    MASKED: tl.constexpr, ZERO: tl.constexpr, STACKED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Do as ``accumulate``, with the update that the gradient asks for in its place: as ``precondition`` makes it; and
    with the share ``kept`` of what was there before."""
    inside = (offs >= low) & (offs < high)
    if MASKED:
        g = tl.load(grad + offs, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(before + offs, mask=inside, other=0.0)
        old = tl.load(velocity_before + offs, mask=inside, other=0.0)
    else:
        g = tl.load(grad + offs).to(tl.float32)
        r, old = tl.load(before + offs), tl.load(velocity_before + offs)
    r = r * kept
    local = tl.maximum((offs - low).to(tl.int32), 0)
    velocity, update, finite = make_update(
        g, old, local, inside, row_sizes, col_sizes, row, col, rows, cols, exact, beta, share, rate, eps, limit,
        MASKED, SIZE, STACKED,
    )  # fmt: skip
    u = r + tl.where(finite, update, float("nan"))
    nonfinite = bits_of(u) >= INFINITE
    u, velocity = tl.where(nonfinite, r, u), tl.where(finite, velocity, old)
    if MASKED:
        tl.store(after + offs, u, mask=inside)
        tl.store(velocity_after + offs, velocity, mask=inside)
        if ZERO:
            tl.store(grad + offs, tl.zeros_like(u).to(grad.dtype.element_ty), mask=inside)
    else:
        tl.store(after + offs, u)
        tl.store(velocity_after + offs, velocity)
        if ZERO:
            tl.store(grad + offs, tl.zeros_like(u).to(grad.dtype.element_ty))
    return u, nonfinite


@triton.jit
def _block(
    grad, before, after, velocity_before, velocity_after, beta, scale, offs, low, high, threshold, bit,
    row_sizes, col_sizes, row, col, rows, cols, exact, share, rate, eps, limit, kept,
    MASKED: tl.constexpr, MOMENTUM: tl.constexpr, SCALED: tl.constexpr, ZERO: tl.constexpr, UPDATE: tl.constexpr,
    STACKED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return what a lane notes of a block, to be added up: of candidates ``bit`` in the lowest byte, and how many in
    the third; of what was not finite ``bit`` in the second."""
    if UPDATE:
        u, nonfinite = _accumulate_update(
            grad, before, after, velocity_before, velocity_after, beta, offs, low, high, row_sizes, col_sizes, row, col,
            rows, cols, exact, share, rate, eps, limit, kept, MASKED, ZERO, STACKED, SIZE,
        )  # fmt: skip
    else:
        u, nonfinite = accumulate(grad, before, after, velocity_before, velocity_after, beta, scale, offs, low, high,
                                  MASKED, MOMENTUM, SCALED, ZERO)  # fmt: skip
    # Outside, u is 0: below every threshold, and finite.
    return tl.where(bits_of(u) >= threshold, HIT + bit, 0) + tl.where(nonfinite, NONFINITE * bit, 0)


@triton.jit
def _offset(word, BLOCK: tl.constexpr):
    """Return where the entry of a word's lowest bit is: a byte for each of four lanes, in it a bit for each block."""
    bit = ((word & -word).to(tl.float32).to(tl.int32, bitcast=True) >> 23 & 255) - 127
    return (bit & 7) * BLOCK + (bit >> 3)


@triton.jit
def collect(
    grad, before, after, velocity_before, velocity_after, beta, scales, places, sizes, rates, eps, betas, shares,
    kept_shares, limit, strips, segments, state, rotation, counts, indices, values, out_indices, out_values, total,
    strip_count, out_size, last,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MOMENTUM: tl.constexpr, SCALED: tl.constexpr, ZERO: tl.constexpr,
    UPDATE: tl.constexpr, STACKED: tl.constexpr,
):  # fmt: skip
    """Add the gradient and list candidates: one strip a program. On the side, clear the last message, a piece each.

    A lane only notes which of its blocks hold a candidate: listing them at once would hold up the loads behind.
    """
    pid, lane = tl.program_id(0), tl.arange(0, BLOCK)
    for piece in range(pid, tl.cdiv(out_size, BLOCK), strip_count):
        slot = piece * BLOCK + lane
        tl.store(out_indices + slot, tl.zeros([BLOCK], tl.int64), mask=slot < out_size)
        tl.store(out_values + slot, tl.zeros([BLOCK], tl.float32), mask=slot < out_size)
    if pid == 0:
        tl.store(total, 0)
    # Which strip comes first moves on with every step, so that nothing is favoured where a region overflows.
    strip = (pid + tl.load(rotation)) % strip_count
    start = tl.multiple_of(tl.load(strips + strip * STRIP + START), 128)
    low, high = tl.load(strips + strip * STRIP + LOW), tl.load(strips + strip * STRIP + HIGH)
    segment = tl.load(strips + strip * STRIP + OWNER)
    threshold = tl.maximum(tl.load(state + segment * STATE + CARRIED), 1).to(tl.int32)
    scale = 1.0
    if SCALED:
        scale = tl.load(scales + segment)
    row_sizes, col_sizes, line, col, rows, cols, exact, share, rate, least = sizes, sizes, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0
    kept = 1.0
    if UPDATE:
        place = places + strip * PLACE
        number, exact = tl.load(place + NUMBER), tl.load(place + EXACT)
        row_sizes, col_sizes = sizes + tl.load(place + ROW_AT), sizes + tl.load(place + COL_AT)
        line, col = tl.load(place + ROW).to(tl.int32), tl.load(place + COL).to(tl.int32)
        rows, cols = tl.load(place + ROWS).to(tl.int32), tl.load(place + COLS).to(tl.int32)
        beta, share = tl.load(betas + number), tl.load(shares + number)
        rate, least, kept = tl.load(rates + number), tl.load(eps + number), tl.load(kept_shares + number)
    noted = tl.zeros([BLOCK], tl.int32)
    if (low == start) & (high == start + BLOCK * BLOCKS):
        for i in range(BLOCKS):
            noted += _block(grad, before, after, velocity_before, velocity_after, beta, scale, start + i * BLOCK + lane,
                            low, high, threshold, 1 << i, row_sizes, col_sizes, line, col, rows, cols, exact, share,
                            rate, least, limit, kept, False, MOMENTUM, SCALED, ZERO, UPDATE, STACKED,
                            BLOCK * BLOCKS)  # fmt: skip
    else:
        for i in range(BLOCKS):
            noted += _block(grad, before, after, velocity_before, velocity_after, beta, scale, start + i * BLOCK + lane,
                            low, high, threshold, 1 << i, row_sizes, col_sizes, line, col, rows, cols, exact, share,
                            rate, least, limit, kept, True, MOMENTUM, SCALED, ZERO, UPDATE, STACKED,
                            BLOCK * BLOCKS)  # fmt: skip
    row = segments + segment * SEGMENT
    base, regions = tl.load(row + FIRST_REGION), tl.load(row + REGIONS)
    room, first = tl.load(row + ROOM).to(tl.int32), tl.load(row + FIRST_ENTRY)
    region = strip % regions.to(tl.int32)
    counter, first = counts + (base + region) * PAD, first + region.to(tl.int64) * room
    # Four lanes make a word, 8 bits each: so much is one thread's own, and what follows has a quarter of the work.
    lanes, byte = tl.reshape(noted, [BLOCK // 4, 4]), 8 * tl.arange(0, 4)[None, :]
    many = tl.sum(lanes >> 16, 1)
    left, wrong = tl.sum((lanes & 255) << byte, 1), tl.sum((lanes >> 8 & 255) << byte, 1)
    word = tl.arange(0, BLOCK // 4)
    spot = tl.atomic_add(counter + tl.zeros_like(word), many, mask=many > 0, sem="relaxed")
    # What is not finite leaves its index in the slot behind the list.
    index = start + _offset(wrong, BLOCK) + 4 * word
    tl.store(indices + last + tl.zeros_like(word), index.to(indices.dtype.element_ty), mask=wrong != 0)
    tl.debug_barrier()  # what was stored may be read back by another thread
    for _ in range(tl.max(many)):
        index = start + _offset(left, BLOCK) + 4 * word
        fits = (left != 0) & (spot < room)
        u = tl.load(after + index, mask=fits, other=0.0)
        tl.store(values + first + spot, u, mask=fits)
        tl.store(indices + first + spot, index.to(indices.dtype.element_ty), mask=fits)
        spot += 1
        left &= left - 1


@triton.jit
def add_histogram(values, counts, segments, state, histogram, region, segment, BLOCK: tl.constexpr):
    """Add a region's candidates to the histogram of their segment. (Made by ``collect``, entry by entry, it would cost
    several times as much.)"""
    row = segments + segment * SEGMENT
    room = tl.load(row + ROOM).to(tl.int32)
    first = tl.load(row + FIRST_ENTRY) + (region - tl.load(row + FIRST_REGION)) * room
    size = tl.minimum(tl.load(counts + region * PAD), room)
    threshold = tl.maximum(tl.load(state + segment * STATE + CARRIED), 1).to(tl.int32)
    sums = tl.zeros([BINS], tl.int32)
    for i in range(0, size, BLOCK):
        spot = i + tl.arange(0, BLOCK)
        real = spot < size
        up = bits_of(tl.load(values + first + spot, mask=real, other=0.0)) - threshold
        sums += tl.histogram(tl.where(real, _bin_of(up), 0), BINS, mask=real)
    tl.atomic_add(histogram + segment * BINS + tl.arange(0, BINS), sums, mask=sums > 0, sem="relaxed")


@triton.jit
def make_histogram(values, counts, owners, segments, state, histogram, BLOCK: tl.constexpr):
    """Make the histogram of every segment's candidates: one region a program."""
    region = tl.program_id(0)
    add_histogram(values, counts, segments, state, histogram, region, tl.load(owners + region), BLOCK)


@triton.jit
def edge_bits(bin):
    """Return how far above the threshold a bin starts, as ``reference.edge_bits``."""
    middle = ((bin - MIDDLE_FROM) << MIDDLE) + MIDDLE_BITS
    wide = ((bin - WIDE_FROM) << WIDE) + WIDE_BITS
    return tl.where(bin < MIDDLE_FROM, bin << FINE, tl.where(bin < WIDE_FROM, middle, wide))


@triton.jit
def pick(vector, index, SIZE: tl.constexpr):
    """Return ``vector[index]``."""
    return tl.sum(tl.where(tl.arange(0, SIZE) == index, vector, 0))


@triton.jit
def _estimate(after, samples, row, k, BLOCK: tl.constexpr):
    """Return the bits of a threshold, as ``reference.estimate``."""
    first, size, numel = tl.load(row + FIRST_SAMPLE), tl.load(row + SAMPLES), tl.load(row + NUMEL)
    coarse = tl.zeros([COARSE_BINS], tl.int32)
    nonzero = tl.zeros([BLOCK], tl.int32)
    for i in range(0, size, BLOCK):
        spot = i + tl.arange(0, BLOCK)
        real = spot < size
        index = tl.load(samples + first + spot, mask=real, other=0)
        bits = tl.where(real, bits_of(tl.load(after + index, mask=real, other=0.0)), 0)
        nonzero += (bits > 0).to(tl.int32)
        coarse += tl.histogram(bits >> COARSE, COARSE_BINS, mask=bits > 0)
    many = tl.sum(nonzero).to(tl.int64)
    target = 2 * k + 16
    wanted = tl.minimum(many, (target * size + numel - 1) // numel)
    reached = tl.cumsum(coarse, reverse=True).to(tl.int64)
    bin = tl.sum((reached >= wanted).to(tl.int64)) - 1
    return tl.where(many > 0, tl.maximum(bin << COARSE, 1), 0)


@triton.jit
def next_threshold(after, samples, row, own, reached, candidates, edge, BLOCK: tl.constexpr):
    """Store the threshold for the next step, as ``reference.next_threshold``; ``reached``: as there, in 64 bits."""
    k, numel = tl.load(row + K), tl.load(row + NUMEL)
    known, left, inflow = tl.load(own + CARRIED), tl.load(own + LEFT), tl.load(own + INFLOW)
    target = 2 * k + 16
    if k < numel:  # otherwise everything is sent
        if (known == 0) | (candidates == 0) | (candidates > 8 * (12 * k + 256)):
            estimated = _estimate(after, samples, row, k, BLOCK)
            tl.store(own + CARRIED, tl.where(estimated > 0, estimated, known))
            tl.store(own + LEFT, k // 2)
            tl.store(own + INFLOW, k)
        else:
            stored = tl.maximum(pick(reached, 0, BINS), 1)
            if candidates > stored:  # where a region overflowed, what it holds stands for all
                reached = reached * candidates // stored
            sent = tl.minimum(pick(reached, edge, BINS), k)
            inflow = (3 * inflow + tl.maximum(candidates - left, 0)) // 4
            left = candidates - sent
            if left + inflow > target:
                expected = tl.maximum(reached - sent, 0) * candidates + inflow * reached
                higher = tl.minimum(edge, tl.sum((expected > target * candidates).to(tl.int64)))
                up = pick(reached, higher, BINS)
                tl.store(own + CARRIED, known + edge_bits(higher))
                tl.store(own + LEFT, tl.maximum(up - sent, 0))
                tl.store(own + INFLOW, inflow * up // candidates)
            else:
                missing = target - left - inflow
                near = tl.maximum(candidates - pick(reached, NEAR, BINS), 1)
                down = tl.minimum(missing * (NEAR << FINE) // near, QUARTER)
                down = tl.where(2 * pick(reached, BINS - 1, BINS) > k, 0, down)
                tl.store(own + CARRIED, tl.maximum(known - down, 1))
                tl.store(own + LEFT, left + missing)
                tl.store(own + INFLOW, inflow)
        tl.store(own + MADE_FOR, k)


@triton.jit
def within_range(sent, u, HALF: tl.constexpr):
    """Do as ``value_range.limit``: to the end of fp16's range, or to fp32's last bit."""
    if HALF:
        size = tl.where(tl.abs(u) < 4294967296.0, 65280.0, 32768.0)
        return tl.where(tl.abs(sent) > 65504.0, tl.where(u < 0, -size, size), sent)
    else:
        return tl.where(tl.abs(sent) > LAST_BIT, tl.where(u < 0, -LAST_BIT, LAST_BIT), sent)


@triton.jit
def half_of(u, CODEC: tl.constexpr):
    """Round as the codecs do, to half precision."""
    if CODEC == 1:
        return u.to(tl.float16).to(tl.float32)
    elif CODEC == 2:
        word = u.to(tl.int32, bitcast=True)  # to the nearest, ties to even: written out, as the interpreter cuts off
        return ((word + 0x7FFF + ((word >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    else:
        return u


@triton.jit
def scale_of(peaks, shares, choice, most):
    """Return the scale of signs: the mean magnitude, at least 2**-14 of the largest, in 8 significant bits."""
    top = tl.load(peaks).to(tl.float32, bitcast=True).to(tl.float64)
    number = tl.maximum(tl.load(choice + COUNT), 1).to(tl.float64)
    mean = top * (tl.load(shares).to(tl.float64) / (number * 16777216.0))
    scale = tl.minimum(tl.maximum(mean, top * 6.103515625e-05), most).to(tl.float32)
    return (scale.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def round_for_wire(u, going, peaks, shares, choice, CODEC: tl.constexpr, HALF: tl.constexpr):
    """Return entries as they travel, what stays of each, and which of those that go can be put together again exactly.

    ``peaks``, ``shares``, ``choice``: of their segment. ``HALF``: the mean is going to be fp16.
    """
    if CODEC == 3:
        scale = scale_of(peaks, shares, choice, 32768.0 if HALF else LAST_BIT)
        sent = tl.where(tl.abs(u) >= scale / 2, tl.where(u < 0, -scale, scale), 0.0)
    elif CODEC == 4:
        scale, size = scale_of(peaks, shares, choice, 8192.0 if HALF else LAST_BIT / 4), tl.abs(u)
        level = tl.where(size > 0.75 * scale, scale, scale / 2)
        level = tl.where(size > 1.5 * scale, 2 * scale, level)
        level = tl.where(size > 3.0 * scale, 4 * scale, level)
        least = tl.where(scale < 7.888609052210118e-31, float("inf"), scale / 4)  # 2**-100
        sent = tl.where(size >= least, tl.where(u < 0, -level, level), 0.0)
    else:
        sent = within_range(half_of(u, CODEC), u, HALF or CODEC == 1)
    rest = u - sent
    if CODEC != 0:
        going = going & (sent != 0.0) & (rest + sent == u) & (u - rest == sent)
    elif HALF:  # the last bit of fp32 is subtracted exactly from all there is
        going = going & (rest + sent == u) & (u - rest == sent)
    return sent, rest, going


@triton.jit
def report_nonfinite(slot, spans, span_count, flags, BLOCK: tl.constexpr):
    """Store the flags of a gradient, and the parameter of an entry that was not finite; its slot starts again."""
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
