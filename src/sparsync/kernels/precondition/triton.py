"""Make the update that a gradient asks for, as a Triton kernel: one pass for all tensors.

A strip's first entry has its row and column from a table. From there on they are counted in 32 bits, and by a
multiplication where a division would be: the integer ones would take longer than memory does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.precondition.places import PlaceRow
from sparsync.kernels.strips import Strip

STRIP, PLACE = tl.constexpr(len(Strip._fields)), tl.constexpr(len(PlaceRow._fields))
START, LOW, HIGH = (tl.constexpr(i) for i in range(3))
NUMBER, EXACT, ROW_AT, COL_AT, ROW, COL, ROWS, COLS = map(tl.constexpr, range(PLACE.value))
INFINITE = tl.constexpr(0x7F800000)  # bits of infinity; NaN is above


@triton.jit
def _finite(u):
    return (u.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < INFINITE


@triton.jit
def _wraps(at, period, SIZE: tl.constexpr):
    """Return ``at // period``, where ``at`` is less than ``period + SIZE``.

    Half a step from every multiple of ``period`` at least, the product of floats is on its right side.
    """
    inverse = tl.full([], 1.0, tl.float32) / period.to(tl.float32)
    many = ((at.to(tl.float32) + 0.5) * inverse).to(tl.int32)
    return tl.where(period >= SIZE, (at >= period).to(tl.int32), many)


@triton.jit
def make_update(
    g, old, local, inside, row_sizes, col_sizes, row, col, rows, cols, exact, beta, share, rate, eps, limit,
    MASKED: tl.constexpr, SIZE: tl.constexpr, STACKED: tl.constexpr,
):  # fmt: skip
    """Return the velocity and the update of the entries that lie ``local`` behind the strip's first one, and where both
    are finite. ``SIZE`` is more than any of ``local``."""
    velocity = old * beta + g * share
    at = local + col
    down = _wraps(at, cols, SIZE)
    across = at - down * cols
    if STACKED:
        across += _wraps(down + row, rows, SIZE) * cols
    if MASKED:
        size = tl.load(row_sizes + down, mask=inside, other=1.0)
        other = tl.load(col_sizes + across, mask=inside, other=1.0)
    else:
        size, other = tl.load(row_sizes + down), tl.load(col_sizes + across)
    ratio = tl.div_rn(velocity, tl.where(exact != 0, size, size * other) + eps)
    update = tl.where(ratio > limit, limit, tl.where(ratio < -limit, -limit, ratio)) * rate
    return velocity, update, _finite(velocity) & _finite(update)


@triton.jit
def _block(
    grad, before, after, out, at, first, last, row_sizes, col_sizes, row, col, rows, cols, exact, beta, share, rate,
    eps, limit, MASKED: tl.constexpr, SIZE: tl.constexpr, STACKED: tl.constexpr,
):  # fmt: skip
    """Make the updates of a block, whose entries are ``at`` from where the pointers point to."""
    inside, local = (at >= first) & (at < last), tl.maximum(at - first, 0)
    if MASKED:
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        old = tl.load(before + at, mask=inside, other=0.0)
    else:
        g, old = tl.load(grad + at).to(tl.float32), tl.load(before + at)
    velocity, update, finite = make_update(
        g, old, local, inside, row_sizes, col_sizes, row, col, rows, cols, exact, beta, share, rate, eps, limit,
        MASKED, SIZE, STACKED,
    )  # fmt: skip
    velocity, update = tl.where(finite, velocity, old), tl.where(finite, update, float("nan"))
    if MASKED:
        tl.store(after + at, velocity, mask=inside)
        tl.store(out + at, update, mask=inside)
    else:
        tl.store(after + at, velocity)
        tl.store(out + at, update)


@triton.jit
def precondition(
    grad, before, after, out, strips, places, sizes, rates, eps, betas, shares, limit,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STACKED: tl.constexpr,
):  # fmt: skip
    """Make the updates of one strip a program."""
    strip, lane = tl.program_id(0), tl.arange(0, BLOCK)
    start = tl.multiple_of(tl.load(strips + strip * STRIP + START), 128)
    first = (tl.load(strips + strip * STRIP + LOW) - start).to(tl.int32)
    last = (tl.load(strips + strip * STRIP + HIGH) - start).to(tl.int32)
    place = places + strip * PLACE
    number, exact = tl.load(place + NUMBER), tl.load(place + EXACT)
    row_sizes, col_sizes = sizes + tl.load(place + ROW_AT), sizes + tl.load(place + COL_AT)
    row, col = tl.load(place + ROW).to(tl.int32), tl.load(place + COL).to(tl.int32)
    rows, cols = tl.load(place + ROWS).to(tl.int32), tl.load(place + COLS).to(tl.int32)
    beta, share = tl.load(betas + number), tl.load(shares + number)
    rate, least = tl.load(rates + number), tl.load(eps + number)
    if (first == 0) & (last == BLOCK * BLOCKS):
        for i in range(BLOCKS):
            _block(grad + start, before + start, after + start, out + start, i * BLOCK + lane, first, last, row_sizes,
                   col_sizes, row, col, rows, cols, exact, beta, share, rate, least, limit, False, BLOCK * BLOCKS,
                   STACKED)  # fmt: skip
    else:
        for i in range(BLOCKS):
            _block(grad + start, before + start, after + start, out + start, i * BLOCK + lane, first, last, row_sizes,
                   col_sizes, row, col, rows, cols, exact, beta, share, rate, least, limit, True, BLOCK * BLOCKS,
                   STACKED)  # fmt: skip


@triton.jit
def shrink(residual, strips, places, kept_shares, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Multiply the residual of one strip a program by the share that is kept of it."""
    row, kept = strips + tl.program_id(0) * STRIP, tl.load(kept_shares + tl.load(places + tl.program_id(0) * PLACE))
    low, high = tl.load(row + LOW), tl.load(row + HIGH)
    if kept != 1.0:
        for i in range(BLOCKS):
            at = tl.load(row + START) + i * BLOCK + tl.arange(0, BLOCK)
            inside = (at >= low) & (at < high)
            tl.store(residual + at, tl.load(residual + at, mask=inside, other=0.0) * kept, mask=inside)
