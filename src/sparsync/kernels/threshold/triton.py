"""About the k largest of every segment, as Triton kernels.

``candidates`` come first. ``decide`` counts them and tells from where on they go, and the threshold for the next step;
``take_out`` takes them out of the residual. ``threshold/reference.py`` is the specification.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.accumulate.round_triton import round_for_wire
from sparsync.kernels.accumulate.triton import bits_of, report_nonfinite
from sparsync.kernels.candidates.histogram_triton import BINS, add_histogram, edge_bits, pick
from sparsync.kernels.candidates.next_threshold_triton import next_threshold
from sparsync.kernels.strips_triton import (
    BOUND,
    CANDIDATES,
    CAPACITY,
    CARRIED,
    CHOICE,
    COUNT,
    EDGE,
    FIRST_ENTRY,
    FIRST_REGION,
    MOST_REGIONS,
    PAD,
    REGIONS,
    ROOM,
    SEGMENT,
    STATE,
    K,
)


@triton.jit
def decide(
    after, values, counts, found, owners, segments, samples, state, histogram, tickets, given, choice, peaks, shares,
    rotation,
    BLOCK: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """Count the candidates, one region a program; the program that counts the last of a segment's decides for it."""
    region = tl.program_id(0)
    segment = tl.load(owners + region)
    add_histogram(values, counts, segments, state, histogram, region, segment, BLOCK)
    tl.debug_barrier()  # whoever sees the ticket sees all that was counted before it
    ticket = tl.atomic_add(tickets + segment, 1, sem="acq_rel")
    if ticket == tl.load(segments + segment * SEGMENT + REGIONS) - 1:
        tl.store(tickets + segment, 0)
        _decide(after, counts, found, segments, samples, state, histogram, given, choice, peaks, shares, rotation,
                segment, SAMPLED)  # fmt: skip


@triton.jit
def _decide(
    after, counts, found, segments, samples, state, histogram, given, choice, peaks, shares, rotation, segment,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Decide from where on a segment's candidates go, and its next threshold. Counters start again."""
    row, own = segments + segment * SEGMENT, state + segment * STATE
    regions, lane = tl.load(row + FIRST_REGION), tl.arange(0, MOST_REGIONS)
    there = lane < tl.load(row + REGIONS)
    bins = tl.arange(0, BINS)
    many = tl.load(counts + (regions + lane) * PAD, mask=there, other=0)
    reached = tl.cumsum(tl.load(histogram + segment * BINS + bins), reverse=True)
    threshold = tl.maximum(tl.load(own + CARRIED), 1)
    k = tl.load(row + K)
    edge = tl.minimum(tl.sum((reached > k).to(tl.int32)), BINS - 1).to(tl.int64)
    few = 100 * pick(reached, edge, BINS) < 99 * k
    edge = tl.where((edge > 0) & few, edge - 1, edge)
    candidates = tl.sum(many.to(tl.int64))
    tl.store(counts + (regions + lane) * PAD, tl.zeros([MOST_REGIONS], tl.int32), mask=there)
    tl.store(found + regions + lane, tl.minimum(many, tl.load(row + ROOM).to(tl.int32)), mask=there)
    tl.store(histogram + segment * BINS + bins, tl.zeros([BINS], tl.int32))
    mine = choice + segment * CHOICE
    tl.store(mine + CANDIDATES, candidates)
    tl.store(mine + EDGE, edge)
    tl.store(mine + BOUND, threshold + edge_bits(edge))
    tl.store(mine + COUNT, pick(reached, edge, BINS).to(tl.int64))
    tl.store(given + segment, pick(reached, edge + 1, BINS))  # those above it go in any case
    tl.store(peaks + segment, 0)
    tl.store(shares + segment, 0)
    if segment == 0:
        tl.store(rotation, (tl.load(rotation) * 5 + 40503) & 0xFFFFF)
    next_threshold(after, samples, row, own, reached.to(tl.int64), candidates, edge, BLOCK)


@triton.jit
def _mine(values, found, owners, segments, choice, regions, BLOCK: tl.constexpr):
    """Return a program's piece of the candidates: whose they are, their magnitudes, and which of them go."""
    pid = tl.program_id(0)
    region = pid % regions
    segment = tl.load(owners + region)
    row = segments + segment * SEGMENT
    first = tl.load(row + FIRST_ENTRY) + (region - tl.load(row + FIRST_REGION)) * tl.load(row + ROOM)
    spot = pid // regions * BLOCK + tl.arange(0, BLOCK)
    real = spot < tl.load(found + region)
    bits = bits_of(tl.load(values + first + spot, mask=real, other=0.0))
    return segment, bits, real & (bits >= tl.load(choice + segment * CHOICE + BOUND))


@triton.jit
def find_peaks(values, found, owners, segments, choice, peaks, regions, BLOCK: tl.constexpr):
    """Find the largest magnitude that goes, of every segment, for one scale that all share."""
    if tl.program_id(0) // regions * BLOCK < tl.load(found + tl.program_id(0) % regions):
        segment, bits, going = _mine(values, found, owners, segments, choice, regions, BLOCK)
        tl.atomic_max(peaks + segment, tl.max(tl.where(going, bits, 0)), sem="relaxed")


@triton.jit
def sum_shares(values, found, owners, segments, choice, peaks, shares, regions, BLOCK: tl.constexpr):
    """Sum up what goes, of every segment, in 2**-24ths of the peak: integers add up to the same in any order."""
    if tl.program_id(0) // regions * BLOCK < tl.load(found + tl.program_id(0) % regions):
        segment, bits, going = _mine(values, found, owners, segments, choice, regions, BLOCK)
        top = tl.maximum(tl.load(peaks + segment), 0x00800000).to(tl.float32, bitcast=True)
        part = (tl.div_rn(bits.to(tl.float32, bitcast=True), top) * 16777216.0).to(tl.int64)
        tl.atomic_add(shares + segment, tl.sum(tl.where(going, part, 0)), sem="relaxed")


@triton.jit
def take_out(
    after, velocity_after, indices, values, found, owners, segments, spans, given, choice, peaks, shares, out_indices,
    out_values, total, flags, regions, takers, span_count, last,
    BLOCK: tl.constexpr, CODEC: tl.constexpr, HALF: tl.constexpr, MASKING: tl.constexpr,
):  # fmt: skip
    """Take the entries to send out of the residual: ``takers`` programs a region. The first one stores the flags."""
    if tl.program_id(0) == 0:
        report_nonfinite(indices + last, spans, span_count, flags, BLOCK)
    else:
        pid = tl.program_id(0) - 1
        region = pid % regions
        size, segment = tl.load(found + region), tl.load(owners + region)
        row, mine = segments + segment * SEGMENT, choice + segment * CHOICE
        capacity = tl.load(row + CAPACITY).to(tl.int32)
        first = tl.load(row + FIRST_ENTRY) + (region - tl.load(row + FIRST_REGION)) * tl.load(row + ROOM)
        bound, reached = tl.load(mine + BOUND), tl.load(mine + COUNT)
        for i in range(pid // regions * BLOCK, size, takers * BLOCK):
            spot = i + tl.arange(0, BLOCK)
            real = spot < size
            u = tl.load(values + first + spot, mask=real, other=0.0)
            index = tl.load(indices + first + spot, mask=real, other=0).to(tl.int64)
            going = real & (bits_of(u) >= bound)
            sent, rest, going = round_for_wire(u, going, peaks + segment, shares + segment, mine, CODEC, HALF)
            number = tl.cumsum(going.to(tl.int32))
            many = tl.max(number)
            if many > 0:
                if reached > capacity:  # of the lowest bin: first come, first served
                    edge = tl.load(mine + EDGE)
                    above = bound + edge_bits(edge + 1) - edge_bits(edge)
                    lowest = going & ((bits_of(u) < above) | (edge == BINS - 1))
                    in_line = tl.cumsum(lowest.to(tl.int32))
                    free = capacity - tl.atomic_add(given + segment, tl.max(in_line), sem="relaxed")
                    going = going & ((lowest == 0) | (in_line <= free))
                    number = tl.cumsum(going.to(tl.int32))
                    many = tl.max(number)
                slot = tl.atomic_add(total, many.to(tl.int64), sem="relaxed") + number - 1
                tl.store(out_indices + slot, index, mask=going)
                tl.store(out_values + slot, sent, mask=going)
                tl.store(after + index, rest, mask=going)
                if MASKING:
                    tl.store(velocity_after + index, tl.zeros_like(u), mask=going)
