"""The pass that candidates come from, as a Triton kernel: add the gradient, collect what is above a carried threshold.

``collect`` is the only pass over memory: it adds the gradient to the residual and appends every entry at or above its
segment's threshold to a list of candidates, about 2 k of them; ``make_histogram`` (``histogram_triton.py``) counts
these. Top-k, threshold and DGC choose among them, and find the threshold for the next step
(``next_threshold_triton.py``). Nothing waits for the host.

A segment's candidates go to several regions of the list, each with a counter of its own: at one counter for all, the
entries would queue up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.accumulate.triton import accumulate, accumulate_update, bits_of
from sparsync.kernels.precondition.triton import COL, COL_AT, COLS, EXACT, NUMBER, PLACE, ROW, ROW_AT, ROWS
from sparsync.kernels.strips_triton import (
    CARRIED,
    FIRST_ENTRY,
    FIRST_REGION,
    HIGH,
    LOW,
    OWNER,
    PAD,
    REGIONS,
    ROOM,
    SEGMENT,
    START,
    STATE,
    STRIP,
)

HIT, NONFINITE = tl.constexpr(1 << 16), tl.constexpr(1 << 8)  # units of the bytes that ``_block`` notes


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
        u, nonfinite = accumulate_update(
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
