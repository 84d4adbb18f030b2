"""DGC's selection as Triton kernels: a threshold from a random sample, then the first of its shares that enough reach.

``draw`` reads the sample, and top-k's ``count_digits`` finds its threshold digit by digit. ``count_rungs`` counts how
many entries reach the threshold and each of the lower ones that the loop could try, in one pass over the candidates;
``pick_threshold`` picks one. Where candidates were lost, the same is done over the residual, and where the threshold
lies below the carried one too, unless even the candidates are too many to send: then the k largest go, and these are
among them. ``DGCK.choose`` is the specification.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels import rng
from sparsync.kernels.accumulate.triton import bits_of
from sparsync.kernels.candidates.histogram_triton import BINS
from sparsync.kernels.dgc import launch, reference
from sparsync.kernels.strips import SampleRow
from sparsync.kernels.strips_triton import (
    CANDIDATES,
    CAPACITY,
    CARRIED,
    CHOICE,
    EDGE,
    FIRST_ENTRY,
    FIRST_REGION,
    HIGH,
    LOW,
    NUMEL,
    OWNER,
    PAD,
    ROOM,
    SEGMENT,
    START,
    STATE,
    STRIP,
    K,
)
from sparsync.kernels.topk.radix_select_triton import (
    FROM_CANDIDATES,
    FROM_RESIDUAL,
    MAGNITUDE,
    ORIGIN,
    RANGE,
    SLOTS,
    WIDTH,
    load_block,
    narrow_range,
    residual_searches,
    store_range,
)
from sparsync.kernels.topk.triton import bin_of_limit, close_lists

MASK_32, STRIDE = tl.constexpr(rng.MASK_32), tl.constexpr(rng.STRIDE)
FIRST_FACTOR, SECOND_FACTOR = tl.constexpr(rng.FACTORS[0]), tl.constexpr(rng.FACTORS[1])
SHARE = tl.constexpr(reference.SHARE)
RUNGS = tl.constexpr(reference.ROUNDS + 1)  # thresholds that may be tried
STEPS = tl.constexpr(32)  # at least that many
DIGITS = tl.constexpr(launch.DIGITS)
SAMPLE = tl.constexpr(len(SampleRow._fields))
SEED, FIRST_RUN, RUNS, LEAST = map(tl.constexpr, range(SAMPLE.value))


@triton.jit
def _scramble(x):
    """Do as ``rng.scramble``."""
    x = ((x ^ (x >> 16)) * FIRST_FACTOR) & MASK_32
    x = ((x ^ (x >> 13)) * SECOND_FACTOR) & MASK_32
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["step"])
def draw(
    after, owners, pieces, sizes, samples, run_ends, run_shifts, segments, ranges, drawn, step, halvings,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Read the sample's entries, a piece of them a program."""
    piece = tl.program_id(0)
    segment = tl.load(owners + piece)
    row, own = pieces + segment * SEGMENT, samples + segment * SAMPLE
    numel = tl.load(segments + segment * SEGMENT + NUMEL)
    if piece == tl.load(row + FIRST_REGION):
        store_range(ranges + segment * RANGE, 0, MAGNITUDE, tl.load(row + K), FROM_CANDIDATES, tl.load(row + K))
    spot = tl.arange(0, BLOCK)
    number = (piece - tl.load(row + FIRST_REGION)) * BLOCK + spot.to(tl.int64)
    real = spot < tl.load(sizes + piece)
    position = number
    if tl.load(row + CAPACITY) < numel:
        key = _scramble((tl.load(own + SEED) + step.to(tl.int64) * STRIDE) & MASK_32)
        one = _scramble((key + number * STRIDE) & MASK_32)
        two = _scramble((one + key + 1) & MASK_32)
        position = ((one << 30) | (two >> 2)) % numel
    ends = run_ends + tl.load(own + FIRST_RUN)
    run = tl.zeros([BLOCK], tl.int64)
    for i in range(halvings):
        later = run + (tl.full([], 1, tl.int64) << (halvings - 1 - i))
        there = later <= tl.load(own + RUNS)
        run = tl.where(there & (tl.load(ends + later - 1, mask=there, other=0) <= position), later, run)
    index = position + tl.load(run_shifts + tl.load(own + FIRST_RUN) + run, mask=real, other=0)
    tl.store(drawn + tl.load(row + FIRST_ENTRY) + number, tl.load(after + index, mask=real, other=0.0), mask=real)


@triton.jit
def _threshold(sample_ranges, sample_sums, segment, segment_count):
    """Return the threshold that the sample's digits tell."""
    low, _, _, _ = narrow_range(sample_ranges, sample_sums, DIGITS, segment, segment_count, False)
    return low.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _rungs(u, real, threshold):
    """Count the entries by how many of the threshold and its shares they reach: all (``RUNGS``) down to none."""
    bits = bits_of(u)
    rung = tl.zeros_like(bits)
    for _ in tl.static_range(RUNGS):
        rung += (bits >= threshold.to(tl.int32, bitcast=True)).to(tl.int32)
        threshold = threshold * SHARE
    return tl.histogram(rung, STEPS, mask=real & (bits > 0))


@triton.jit
def _rungs_of_strip(
    after, start, begin, stop, threshold, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr
):
    """Count those of a strip of the residual."""
    seen = tl.zeros([STEPS], tl.int32)
    for i in range(BLOCKS):
        _, real, u = load_block(after, start + i * BLOCK, begin, stop, BLOCK, MASKED)
        seen += _rungs(u, real, threshold)
    return seen


@triton.jit
def count_rungs(
    values, counts, owners, segments, sample_ranges, sample_sums, rungs, segment_count, PIECE: tl.constexpr
):
    """Count how many candidates reach which threshold: one region a program."""
    region = tl.program_id(0)
    segment = tl.load(owners + region)
    row = segments + segment * SEGMENT
    room = tl.load(row + ROOM).to(tl.int32)
    first = tl.load(row + FIRST_ENTRY) + (region - tl.load(row + FIRST_REGION)) * room
    size = tl.minimum(tl.load(counts + region * PAD), room)
    threshold = _threshold(sample_ranges, sample_sums, segment, segment_count)
    seen = tl.zeros([STEPS], tl.int32)
    for i in range(0, size, PIECE):
        spot = i + tl.arange(0, PIECE)
        u = tl.load(values + first + spot, mask=spot < size, other=0.0)
        seen += _rungs(u, spot < size, threshold)
    tl.atomic_add(rungs + segment * STEPS + tl.arange(0, STEPS), seen, mask=seen > 0, sem="relaxed")


@triton.jit
def count_rungs_of_residual(
    after, strips, ranges, sample_ranges, sample_sums, rungs, strip_count, segment_count,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Count the same in the residual of those segments that need it."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    if residual_searches(ranges, segment_count) > 0:
        known = tl.zeros([], tl.int64) - 1
        threshold = tl.zeros([], tl.float32)
        for strip in range(pid * strip_count // programs, (pid + 1) * strip_count // programs):
            segment = tl.load(strips + strip * STRIP + OWNER)
            if tl.load(ranges + segment * RANGE + ORIGIN) == FROM_RESIDUAL:
                if segment != known:
                    threshold = _threshold(sample_ranges, sample_sums, segment, segment_count)
                    known = segment
                start = tl.multiple_of(tl.load(strips + strip * STRIP + START), 128)
                begin, stop = tl.load(strips + strip * STRIP + LOW), tl.load(strips + strip * STRIP + HIGH)
                if (begin == start) & (stop == start + BLOCK * BLOCKS):
                    seen = _rungs_of_strip(after, start, begin, stop, threshold, BLOCK, BLOCKS, False)
                else:
                    seen = _rungs_of_strip(after, start, begin, stop, threshold, BLOCK, BLOCKS, True)
                tl.atomic_add(rungs + segment * STEPS + tl.arange(0, STEPS), seen, mask=seen > 0, sem="relaxed")


@triton.jit
def _first_reached(rungs, threshold, least):
    """Return the first threshold that enough reach, or the last; and how many reach it."""
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
def pick_threshold(
    counts, found, segments, samples, state, histogram, choice, ranges, sample_ranges, sample_sums, rungs, fallbacks,
    peaks, shares, index_bits, segment_count,
):  # fmt: skip
    """Pick the threshold that a segment's candidates decide for, if they can: one segment a program."""
    segment = tl.program_id(0)
    row, mine, own = segments + segment * SEGMENT, choice + segment * CHOICE, ranges + segment * RANGE
    candidates, complete = close_lists(counts, found, row)
    k, capacity, numel = tl.load(row + K), tl.load(row + CAPACITY), tl.load(row + NUMEL)
    carried = tl.maximum(tl.load(state + segment * STATE + CARRIED), 1)
    edge, low, width, wanted = bin_of_limit(histogram + segment * BINS, k, carried, index_bits)
    threshold = _threshold(sample_ranges, sample_sums, segment, segment_count)
    limit, many = _first_reached(rungs + segment * STEPS, threshold, tl.load(samples + segment * SAMPLE + LEAST))
    if k >= numel:
        store_range(own, 0, -1, 0, FROM_CANDIDATES, candidates)
    elif complete & ((limit >= carried) | (carried == 1) | (many > capacity)):
        if many > capacity:
            store_range(own, low, width, wanted, FROM_CANDIDATES, k)
        else:
            store_range(own, limit << index_bits, -1, 0, FROM_CANDIDATES, many)
    else:
        store_range(own, 0, -1, 0, FROM_RESIDUAL, 0)
        tl.atomic_add(fallbacks, 1, sem="relaxed")
    tl.store(rungs + segment * STEPS + tl.arange(0, STEPS), tl.zeros([STEPS], tl.int32))
    tl.store(mine + CANDIDATES, candidates)
    tl.store(mine + EDGE, edge)
    tl.store(peaks + segment, 0)
    tl.store(shares + segment, 0)


@triton.jit(do_not_specialize=["index_bits"])
def pick_threshold_of_residual(segments, samples, ranges, sample_ranges, sample_sums, rungs, index_bits, segment_count):
    """Pick the same where the residual was counted. As many entries as reach the threshold are its largest: looked for
    as such, they leave a threshold for the next step behind. Sums start again."""
    segment = tl.program_id(0)
    row, own = segments + segment * SEGMENT, ranges + segment * RANGE
    if tl.load(own + ORIGIN) == FROM_RESIDUAL:
        threshold = _threshold(sample_ranges, sample_sums, segment, segment_count)
        _, many = _first_reached(rungs + segment * STEPS, threshold, tl.load(samples + segment * SAMPLE + LEAST))
        many = tl.where(many > tl.load(row + CAPACITY), tl.load(row + K), many)
        store_range(own, 0, index_bits + MAGNITUDE, many, FROM_RESIDUAL, many)
        tl.store(rungs + segment * STEPS + tl.arange(0, STEPS), tl.zeros([STEPS], tl.int32))
    for step in range(DIGITS):
        used = step * segment_count + segment
        if tl.load(sample_ranges + used * RANGE + WIDTH) >= 0:
            tl.store(sample_sums + used * SLOTS + tl.arange(0, SLOTS), tl.zeros([SLOTS], tl.int32))
