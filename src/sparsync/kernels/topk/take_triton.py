"""What reaches its segment's limit taken out of the residual, as a Triton kernel."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.accumulate.round_triton import round_for_wire
from sparsync.kernels.accumulate.triton import bits_of
from sparsync.kernels.strips_triton import (
    CHOICE,
    FIRST_ENTRY,
    FIRST_REGION,
    HIGH,
    LOW,
    OWNER,
    ROOM,
    SEGMENT,
    START,
    STRIP,
)
from sparsync.kernels.topk.radix_select_triton import (
    FROM_CANDIDATES,
    FROM_RESIDUAL,
    ORIGIN,
    RANGE,
    RANGE_LOW,
    key_of,
    load_block,
    residual_searches,
)

PEAK, SHARE, TAKE = map(tl.constexpr, range(3))  # actions


@triton.jit
def _act(
    u, index, going, segment, after, velocity_after, choice, peaks, shares, out_indices, out_values, total,
    ACTION: tl.constexpr, CODEC: tl.constexpr, HALF: tl.constexpr, MASKING: tl.constexpr,
):  # fmt: skip
    """Find the peak of entries that go, or sum up their shares of it, or take them all out."""
    if tl.max(going.to(tl.int32)) > 0:
        if ACTION == PEAK:
            tl.atomic_max(peaks + segment, tl.max(tl.where(going, bits_of(u), 0)), sem="relaxed")
        elif ACTION == SHARE:
            top = tl.maximum(tl.load(peaks + segment), 0x00800000).to(tl.float32, bitcast=True)
            part = (tl.div_rn(tl.abs(u), top) * 16777216.0).to(tl.int64)
            tl.atomic_add(shares + segment, tl.sum(tl.where(going, part, 0)), sem="relaxed")
        else:
            sent, rest, exact = round_for_wire(
                u, going, peaks + segment, shares + segment, choice + segment * CHOICE, CODEC, HALF
            )
            number = tl.cumsum(exact.to(tl.int32))
            slot = tl.atomic_add(total, tl.max(number).to(tl.int64), sem="relaxed") + number - 1
            tl.store(out_indices + slot, index, mask=exact)
            tl.store(out_values + slot, sent, mask=exact)
            tl.store(after + index, rest, mask=exact)
            if MASKING:
                tl.store(velocity_after + index, tl.zeros_like(u), mask=exact)


@triton.jit
def _act_on_strip(
    start, begin, stop, limit, index_bits, highest, segment, after, velocity_after, choice, peaks, shares, out_indices,
    out_values, total,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ACTION: tl.constexpr, CODEC: tl.constexpr, HALF: tl.constexpr,
    MASKING: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Do so with what reaches the limit in a strip of the residual."""
    for i in range(BLOCKS):
        index, real, u = load_block(after, start + i * BLOCK, begin, stop, BLOCK, MASKED)
        going = real & (bits_of(u) > 0) & (key_of(bits_of(u), index, index_bits, highest) >= limit)
        _act(u, index, going, segment, after, velocity_after, choice, peaks, shares, out_indices, out_values, total,
             ACTION, CODEC, HALF, MASKING)  # fmt: skip


@triton.jit(do_not_specialize=["index_bits", "highest"])
def take_largest(
    after, velocity_after, indices, values, found, owners, segments, strips, ranges, choice, peaks, shares, out_indices,
    out_values, total, rounds, index_bits, highest, regions, chunks, strip_count, segment_count,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PIECE: tl.constexpr,
    ACTION: tl.constexpr, CODEC: tl.constexpr, HALF: tl.constexpr, MASKING: tl.constexpr,
):  # fmt: skip
    """Act on every entry that reaches its segment's limit: from the candidates, or from the residual."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    limits = ranges + rounds * segment_count * RANGE
    for piece in range(pid, regions * chunks, programs):
        region, begin = piece % regions, piece // regions * PIECE
        size, segment = tl.load(found + region), tl.load(owners + region)
        if (begin < size) & (tl.load(limits + segment * RANGE + ORIGIN) == FROM_CANDIDATES):
            row = segments + segment * SEGMENT
            first = tl.load(row + FIRST_ENTRY) + (region - tl.load(row + FIRST_REGION)) * tl.load(row + ROOM)
            spot = begin + tl.arange(0, PIECE)
            real = spot < size
            u = tl.load(values + first + spot, mask=real, other=0.0)
            index = tl.load(indices + first + spot, mask=real, other=0).to(tl.int64)
            limit = tl.load(limits + segment * RANGE + RANGE_LOW)
            going = real & (key_of(bits_of(u), index, index_bits, highest) >= limit)
            _act(u, index, going, segment, after, velocity_after, choice, peaks, shares, out_indices, out_values, total,
                 ACTION, CODEC, HALF, MASKING)  # fmt: skip
    if residual_searches(limits, segment_count) > 0:
        for strip in range(pid * strip_count // programs, (pid + 1) * strip_count // programs):
            segment = tl.load(strips + strip * STRIP + OWNER)
            if tl.load(limits + segment * RANGE + ORIGIN) == FROM_RESIDUAL:
                start = tl.multiple_of(tl.load(strips + strip * STRIP + START), 128)
                begin, stop = tl.load(strips + strip * STRIP + LOW), tl.load(strips + strip * STRIP + HIGH)
                limit = tl.load(limits + segment * RANGE + RANGE_LOW)
                if (begin == start) & (stop == start + BLOCK * BLOCKS):
                    _act_on_strip(start, begin, stop, limit, index_bits, highest, segment, after, velocity_after,
                                  choice, peaks, shares, out_indices, out_values, total,
                                  BLOCK, BLOCKS, ACTION, CODEC, HALF, MASKING, False)  # fmt: skip
                else:
                    _act_on_strip(start, begin, stop, limit, index_bits, highest, segment, after, velocity_after,
                                  choice, peaks, shares, out_indices, out_values, total,
                                  BLOCK, BLOCKS, ACTION, CODEC, HALF, MASKING, True)  # fmt: skip
