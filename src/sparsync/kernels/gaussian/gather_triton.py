"""What lies above Gaussian-k's last threshold listed, as Triton kernels.

``gather`` lists it, and ``close_list`` tells how many entries these are. What is listed, threshold's ``take_out`` takes
out. To refine, ``close_list`` drops a list that is too short or too long and leaves a range to look for the k-th
largest in; top-k's kernels narrow it down, ``note_limits`` notes the limit, and top-k takes out what reaches it.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.accumulate.triton import bits_of
from sparsync.kernels.gaussian.triton import UPPER
from sparsync.kernels.strips_triton import (
    BOUND,
    CAPACITY,
    CHOICE,
    COUNT,
    FIRST_ENTRY,
    FIRST_REGION,
    FIRST_STRIP,
    HIGH,
    LOW,
    NUMEL,
    OWNER,
    PAD,
    REGIONS,
    ROOM,
    SEGMENT,
    START,
    STRIP,
    STRIPS,
    K,
)
from sparsync.kernels.topk.radix_select_triton import (
    FROM_RESIDUAL,
    MAGNITUDE,
    ORIGIN,
    RANGE,
    clear_sums,
    narrow_range,
    store_range,
)

TURN, GOLDEN = tl.constexpr(1 << 20), tl.constexpr(648055)  # by the golden ratio: even from the first few steps on


@triton.jit
def gather(
    after, strips, segments, choice, rotation, counts, indices, values, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """List in a third pass what lies above each segment's last threshold, as far as it may be sent.

    A lane notes which of its blocks hold such an entry and how many do; then all lanes list them, one each at a time.
    Which strip of a segment comes first, and which entry of a strip, moves on with every step, so that nothing is
    favoured where more lie above than may be sent. Once more are counted, the strips left have nothing to do.
    """
    pid, lane = tl.program_id(0), tl.arange(0, BLOCK)
    segment = tl.load(strips + pid * STRIP + OWNER)
    row = segments + segment * SEGMENT
    capacity, counter = tl.load(row + CAPACITY).to(tl.int32), counts + segment * PAD
    origin, of_segment, strips_of_it = tl.load(row + FIRST_ENTRY), tl.load(row + FIRST_STRIP), tl.load(row + STRIPS)
    bound = tl.load(choice + segment * CHOICE + BOUND).to(tl.int32)
    turned = tl.load(rotation).to(tl.int64) * strips_of_it
    # An atomic, which one thread does for all: of a plain load, threads may see different counts and go separate ways.
    if tl.atomic_add(counter, 0, sem="relaxed") <= capacity:
        strip = of_segment + (pid - of_segment + turned // TURN) % strips_of_it
        start = tl.multiple_of(tl.load(strips + strip * STRIP + START), 128)
        low, high = tl.load(strips + strip * STRIP + LOW), tl.load(strips + strip * STRIP + HIGH)
        noted = tl.full([BLOCK], 0, tl.int32)
        if (low == start) & (high == start + BLOCK * BLOCKS):
            for i in range(BLOCKS):
                u = tl.load(after + start + i * BLOCK + lane)
                noted += tl.where(bits_of(u) >= bound, UPPER + (1 << i), 0)
        else:
            for i in range(BLOCKS):
                offs = start + i * BLOCK + lane
                u = tl.load(after + offs, mask=(offs >= low) & (offs < high), other=0.0)
                noted += tl.where(bits_of(u) >= bound, UPPER + (1 << i), 0)
        many = noted // UPPER
        total = tl.sum(many)
        if total > 0:
            before = tl.cumsum(many) - many + (turned % TURN * total // TURN).to(tl.int32)
            first = tl.atomic_add(counter, total, sem="relaxed")
            left = noted % UPPER
            for i in range(tl.max(many)):
                lowest = left & -left
                block = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
                offs = start + block * BLOCK + lane
                spot = first + (before + i) % total
                fits = (left > 0) & (spot < capacity)
                slot = origin + spot
                tl.store(values + slot, tl.load(after + offs, mask=fits, other=0.0), mask=fits)
                tl.store(indices + slot, offs.to(indices.dtype.element_ty), mask=fits)
                left -= lowest


@triton.jit(do_not_specialize=["index_bits"])
def close_list(
    segments, counts, found, choice, given, peaks, shares, rotation, ranges, fallbacks, fallen, index_bits,
    BLOCK: tl.constexpr, REFINE: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """Tell how many entries every region of the list holds: one segment a program. Counters start again."""
    segment = tl.program_id(0)
    row = segments + segment * SEGMENT
    base, regions, room = tl.load(row + FIRST_REGION), tl.load(row + REGIONS), tl.load(row + ROOM)
    many, capacity = tl.load(counts + segment * PAD), tl.load(row + CAPACITY)
    listed = tl.minimum(many, capacity)
    if REFINE:
        k = tl.load(row + K)
        short = 3 * many.to(tl.int64) < 2 * k if CARRIED else 10 * many.to(tl.int64) < 9 * k
        if (k < tl.load(row + NUMEL)) & (short | (many > capacity)):
            listed = tl.zeros_like(listed)
            store_range(ranges + segment * RANGE, 0, index_bits + MAGNITUDE, k, FROM_RESIDUAL, k)
            tl.atomic_add(fallbacks, 1, sem="relaxed")
            tl.store(fallen + segment, tl.load(fallen + segment) + 1)
        else:
            store_range(ranges + segment * RANGE, 0, -1, 0, 0, listed)  # from nowhere: the list is taken out as it is
    for i in range(0, regions, BLOCK):
        region = i + tl.arange(0, BLOCK)
        held = tl.minimum(tl.maximum(listed - region * room, 0), room)
        tl.store(found + base + region, held.to(tl.int32), mask=region < regions)
    tl.store(choice + segment * CHOICE + COUNT, listed)
    tl.debug_barrier()  # every thread has read the counter
    tl.store(counts + segment * PAD, 0)
    tl.store(given + segment, 0)
    tl.store(peaks + segment, 0)
    tl.store(shares + segment, 0)
    if segment == 0:
        tl.store(rotation, (tl.load(rotation) + GOLDEN) % TURN)


@triton.jit
def note_limits(choice, ranges, sums, rounds, segment_count):
    """Note the limit of what is looked for in the residual, and how many go: one segment a program."""
    segment = tl.program_id(0)
    low, width, wanted, number = narrow_range(ranges, sums, rounds, segment, segment_count, True)
    origin = tl.load(ranges + segment * RANGE + ORIGIN)
    store_range(ranges + (rounds * segment_count + segment) * RANGE, low, width, wanted, origin, number)
    tl.store(choice + segment * CHOICE + COUNT, number)
    clear_sums(ranges, sums, rounds, segment, segment_count)
