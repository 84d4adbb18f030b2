"""DGC's selection as Triton kernels: a threshold from a random sample, then the first of its shares that enough reach.

``draw`` reads the sample, and ``exact.tally`` finds its threshold digit by digit. ``climb`` counts how many entries
reach the threshold and each of the lower ones that the loop could try, in one pass over the candidates; ``rule`` picks
one. Where candidates were lost, the same is done over the residual, and where it lies below the floor too, unless even
the candidates are too many to send: then the k largest go, and these are among them. ``DGCK.choose`` is the
specification.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels import draws
from sparsync.kernels.exact import (
    CANDIDATES,
    MAGNITUDE,
    RANGE,
    RESIDUAL,
    SLOTS,
    _bin_of_limit,
    _block_of,
    _gathered,
    _needed,
    _range,
    _store,
)
from sparsync.kernels.fused import BINS, CHOICE, PAD, SEGMENT, STATE, STRIP, _bits

WORD, STRIDE = tl.constexpr(draws.WORD), tl.constexpr(draws.STRIDE)
FIRST_FACTOR, SECOND_FACTOR = tl.constexpr(draws.FACTORS[0]), tl.constexpr(draws.FACTORS[1])
SHARE = tl.constexpr(draws.SHARE)
RUNGS = tl.constexpr(draws.ROUNDS + 1)  # thresholds that may be tried
STEPS = tl.constexpr(32)  # at least that many
DIGITS = tl.constexpr(draws.DIGITS)
SAMPLE = tl.constexpr(4)  # the seed's share of the key, first run, runs, least


@triton.jit
def _scramble(x):
    """As ``draws.scramble``."""
    x = ((x ^ (x >> 16)) * FIRST_FACTOR) & WORD
    x = ((x ^ (x >> 13)) * SECOND_FACTOR) & WORD
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["step"])
def draw(
    after, owners, pieces, sizes, samples, run_ends, run_shifts, segments, ranges, drawn, step, halvings,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The sample's entries, a piece of them a program."""
    piece = tl.program_id(0)
    segment = tl.load(owners + piece)
    row, own = pieces + segment * SEGMENT, samples + segment * SAMPLE
    numel = tl.load(segments + segment * SEGMENT + 8)
    if piece == tl.load(row + 2):
        _store(ranges + segment * RANGE, 0, MAGNITUDE, tl.load(row), CANDIDATES, tl.load(row))
    spot = tl.arange(0, BLOCK)
    number = (piece - tl.load(row + 2)) * BLOCK + spot.to(tl.int64)
    real = spot < tl.load(sizes + piece)
    position = number
    if tl.load(row + 1) < numel:
        key = _scramble((tl.load(own) + step.to(tl.int64) * STRIDE) & WORD)
        one = _scramble((key + number * STRIDE) & WORD)
        two = _scramble((one + key + 1) & WORD)
        position = ((one << 30) | (two >> 2)) % numel
    ends = run_ends + tl.load(own + 1)
    run = tl.zeros([BLOCK], tl.int64)
    for i in range(halvings):
        later = run + (tl.full([], 1, tl.int64) << (halvings - 1 - i))
        there = later <= tl.load(own + 2)
        run = tl.where(there & (tl.load(ends + later - 1, mask=there, other=0) <= position), later, run)
    place = position + tl.load(run_shifts + tl.load(own + 1) + run, mask=real, other=0)
    tl.store(drawn + tl.load(row + 5) + number, tl.load(after + place, mask=real, other=0.0), mask=real)


@triton.jit
def _threshold(sample_ranges, sample_sums, segment, segment_count):
    low, _, _, _ = _range(sample_ranges, sample_sums, DIGITS, segment, segment_count, False)
    return low.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _rungs(u, real, threshold):
    """How many entries reach the threshold and how many of its shares: of all (``RUNGS``) down to none."""
    bits = _bits(u)
    rung = tl.zeros_like(bits)
    for _ in tl.static_range(RUNGS):
        rung += (bits >= threshold.to(tl.int32, bitcast=True)).to(tl.int32)
        threshold = threshold * SHARE
    return tl.histogram(rung, STEPS, mask=real & (bits > 0))


@triton.jit
def _rungs_of_strip(
    after, start, begin, stop, threshold, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr
):
    seen = tl.zeros([STEPS], tl.int32)
    for i in range(BLOCKS):
        _, real, u = _block_of(after, start + i * BLOCK, begin, stop, BLOCK, MASKED)
        seen += _rungs(u, real, threshold)
    return seen


@triton.jit
def climb(values, counts, owners, segments, sample_ranges, sample_sums, rungs, segment_count, PIECE: tl.constexpr):
    """How many candidates reach which threshold: one region a program."""
    region = tl.program_id(0)
    segment = tl.load(owners + region)
    row = segments + segment * SEGMENT
    room = tl.load(row + 4).to(tl.int32)
    first = tl.load(row + 5) + (region - tl.load(row + 2)) * room
    size = tl.minimum(tl.load(counts + region * PAD), room)
    threshold = _threshold(sample_ranges, sample_sums, segment, segment_count)
    seen = tl.zeros([STEPS], tl.int32)
    for i in range(0, size, PIECE):
        spot = i + tl.arange(0, PIECE)
        u = tl.load(values + first + spot, mask=spot < size, other=0.0)
        seen += _rungs(u, spot < size, threshold)
    tl.atomic_add(rungs + segment * STEPS + tl.arange(0, STEPS), seen, mask=seen > 0, sem="relaxed")


@triton.jit
def climb_all(
    after, strips, ranges, sample_ranges, sample_sums, rungs, strip_count, segment_count,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The same in the residual of those segments that need it."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    if _needed(ranges, segment_count) > 0:
        known = tl.zeros([], tl.int64) - 1
        threshold = tl.zeros([], tl.float32)
        for strip in range(pid * strip_count // programs, (pid + 1) * strip_count // programs):
            segment = tl.load(strips + strip * STRIP + 3)
            if tl.load(ranges + segment * RANGE + 3) == RESIDUAL:
                if segment != known:
                    threshold = _threshold(sample_ranges, sample_sums, segment, segment_count)
                    known = segment
                start = tl.multiple_of(tl.load(strips + strip * STRIP), 128)
                begin, stop = tl.load(strips + strip * STRIP + 1), tl.load(strips + strip * STRIP + 2)
                if (begin == start) & (stop == start + BLOCK * BLOCKS):
                    seen = _rungs_of_strip(after, start, begin, stop, threshold, BLOCK, BLOCKS, False)
                else:
                    seen = _rungs_of_strip(after, start, begin, stop, threshold, BLOCK, BLOCKS, True)
                tl.atomic_add(rungs + segment * STEPS + tl.arange(0, STEPS), seen, mask=seen > 0, sem="relaxed")


@triton.jit
def _climbed(rungs, threshold, least):
    """The first threshold that enough reach, or the last; and how many reach it."""
    lane = tl.arange(0, STEPS)
    reached = tl.cumsum(tl.load(rungs + lane), reverse=True)  # of rung r: how many reach threshold RUNGS - r
    tl.debug_barrier()  # every warp has read them all: they start again
    taken, many = threshold, tl.sum(tl.where(lane == RUNGS, reached, 0))
    for i in tl.static_range(1, RUNGS):
        further = (many < least) & (taken > 0)
        taken = tl.where(further, taken * SHARE, taken)
        many = tl.where(further, tl.sum(tl.where(lane == RUNGS - i, reached, 0)), many)
    return taken.to(tl.int32, bitcast=True).to(tl.int64), many.to(tl.int64)


@triton.jit(do_not_specialize=["index_bits"])
def rule(
    counts, found, segments, samples, state, histogram, choice, ranges, sample_ranges, sample_sums, rungs, fallbacks,
    peaks, shares, index_bits, segment_count,
):  # fmt: skip
    """Which threshold a segment's candidates decide for, if they can: one segment a program."""
    segment = tl.program_id(0)
    row, mine, own = segments + segment * SEGMENT, choice + segment * CHOICE, ranges + segment * RANGE
    candidates, complete = _gathered(counts, found, row)
    k, capacity, numel = tl.load(row), tl.load(row + 1), tl.load(row + 8)
    floor = tl.maximum(tl.load(state + segment * STATE), 1)
    edge, low, width, wanted = _bin_of_limit(histogram + segment * BINS, k, floor, index_bits)
    threshold = _threshold(sample_ranges, sample_sums, segment, segment_count)
    limit, many = _climbed(rungs + segment * STEPS, threshold, tl.load(samples + segment * SAMPLE + 3))
    if k >= numel:
        _store(own, 0, -1, 0, CANDIDATES, candidates)
    elif complete & ((limit >= floor) | (floor == 1) | (many > capacity)):
        if many > capacity:
            _store(own, low, width, wanted, CANDIDATES, k)
        else:
            _store(own, limit << index_bits, -1, 0, CANDIDATES, many)
    else:
        _store(own, 0, -1, 0, RESIDUAL, 0)
        tl.atomic_add(fallbacks, 1, sem="relaxed")
    tl.store(rungs + segment * STEPS + tl.arange(0, STEPS), tl.zeros([STEPS], tl.int32))
    tl.store(mine, candidates)
    tl.store(mine + 1, edge)
    tl.store(peaks + segment, 0)
    tl.store(shares + segment, 0)


@triton.jit(do_not_specialize=["index_bits"])
def rule_all(segments, samples, ranges, sample_ranges, sample_sums, rungs, index_bits, segment_count):
    """The same where the residual was counted. As many entries as reach the threshold are its largest: looked for as
    such, they leave a floor for the next step behind. Sums start again."""
    segment = tl.program_id(0)
    row, own = segments + segment * SEGMENT, ranges + segment * RANGE
    if tl.load(own + 3) == RESIDUAL:
        threshold = _threshold(sample_ranges, sample_sums, segment, segment_count)
        _, many = _climbed(rungs + segment * STEPS, threshold, tl.load(samples + segment * SAMPLE + 3))
        many = tl.where(many > tl.load(row + 1), tl.load(row), many)
        _store(own, 0, index_bits + MAGNITUDE, many, RESIDUAL, many)
        tl.store(rungs + segment * STEPS + tl.arange(0, STEPS), tl.zeros([STEPS], tl.int32))
    for step in range(DIGITS):
        used = step * segment_count + segment
        if tl.load(sample_ranges + used * RANGE + 1) >= 0:
            tl.store(sample_sums + used * SLOTS + tl.arange(0, SLOTS), tl.zeros([SLOTS], tl.int32))
