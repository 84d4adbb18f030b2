"""The mean of messages, as Triton kernels: equal bit for bit to ``sparse.write_mean``.

Sums go tile by tile of the gradient, in rank order within a tile; messages being sorted, a tile's entries are
neighbours. An index that lies elsewhere, whatever the message says, is never followed: it is left out, and the exchange
has failed.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from sparsync import value_range
from sparsync.kernels.accumulate.triton import INFINITE, bits_of
from sparsync.kernels.message.decode_triton import fail, value_of
from sparsync.kernels.message.header_triton import ENTRIES
from sparsync.kernels.partition.triton import place_of

TOP = tl.constexpr(value_range.HALF)  # fp16's largest number


@triton.jit
def find_tiles(rows, stride, indices, index_stride, failed_exchange, number, begins, tiles, capacity,
           TILE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Find where each tile's entries begin in every message, by bisection. Exchange ``number`` fails where a message
    has more entries than there is room for, or some before the first tile or behind the last."""
    rank = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    said = tl.load(rows + rank * stride + ENTRIES)
    said = tl.where(tl.load(failed_exchange) == 0, said, 0)
    count = tl.minimum(tl.maximum(said, 0), capacity)
    below = tl.zeros([BLOCK], tl.int32)  # how many entries lie before the tile
    for i in tl.static_range(STEPS):
        further = below + (1 << (STEPS - 1 - i))
        there = further <= count
        index = tl.load(indices + rank * index_stride + further - 1, mask=there, other=0)
        below = tl.where(there & (index.to(tl.int64) < tile.to(tl.int64) * TILE), further, below)
    tl.store(begins + rank * (tiles + 1) + tile, below, mask=tile <= tiles)
    outside = ((tile == 0) & (below != 0)) | ((tile == tiles) & (below != said))
    fail(outside, failed_exchange, number)


@triton.jit
def rounded(mean, out):
    """Return fp32 that ``out`` holds exactly."""
    if out.dtype.element_ty == tl.bfloat16:  # to the nearest, ties to even: the interpreter would cut off
        word = mean.to(tl.int32, bitcast=True)
        word = (word + 0x7FFF + ((word >> 16) & 1)) & -0x10000
        return tl.where((bits_of(mean) < INFINITE), word.to(tl.float32, bitcast=True), mean)
    elif out.dtype.element_ty == tl.float16:  # a sum that was rounded beyond its range stays finite
        near = tl.where(bits_of(mean) < INFINITE, tl.minimum(tl.maximum(mean, -TOP), TOP), mean)
        return near.to(tl.float16).to(tl.float32)
    else:
        return mean.to(out.dtype.element_ty).to(tl.float32)


@triton.jit
def _write_mean(own, out, index, base, real, divisor, overflow, CHECK: tl.constexpr):
    """Write the mean of entries that are summed up, and clear their sums: of ranks that share one, the first does."""
    total = tl.atomic_xchg(own + (index - base), tl.zeros_like(index), mask=real, sem="relaxed")
    total = tl.where(real, total, 0).to(tl.float32, bitcast=True)
    mean = rounded(tl.div_rn(total, divisor), out)
    tl.store(out + index, mean.to(out.dtype.element_ty), mask=real & (total != 0.0))
    if CHECK:
        nonfinite = real & (bits_of(mean) >= INFINITE)
        if tl.sum(nonfinite.to(tl.int32)) > 0:
            tl.store(overflow, 1)


@triton.jit
def _list_sums(own, out, listed, slot, index, base, real):
    """List entries that are summed up, and clear their sums: of ranks that share one, the first does."""
    total = tl.atomic_xchg(own + (index - base), tl.zeros_like(index), mask=real, sem="relaxed")
    tl.store(out + slot, total.to(tl.float32, bitcast=True), mask=real)
    tl.store(listed + slot, index, mask=real)


@triton.jit
def _within(index, base, numel, TILE: tl.constexpr):
    """Return which indices lie within their tile."""
    return (index >= base) & (index < tl.minimum(base + TILE, numel))


@triton.jit
def _add(spot, value, mask):
    """Add to sums, which are kept as the integers their bits make."""
    total = tl.load(spot, mask=mask, other=0).to(tl.float32, bitcast=True) + value
    tl.store(spot, total.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def sum_tiles(
    rows, rows16, stride, indices, index_stride, begins, scratch, out, overflow, failed_exchange, number, starts,
    owners, spans, segments, tiles, programs, workers, divisor, values_at, plane, numel, listed, room, part,
    TILE: tl.constexpr, LANES: tl.constexpr, RANKS: tl.constexpr, CODEC: tl.constexpr, STEPS: tl.constexpr,
    CHECK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write the mean of all messages into ``out``, which is zero: tile by tile, the ranks one after another.

    With ``PARTS``, they are about what rank ``part`` owns of a gradient; then ``out`` is a list with ``room`` for each
    rank's entries, which gets their sums, and ``listed`` their rows. Of entries that share a sum, one gets it.

    Sums are made in a scratch that is zero again when a tile is done. ``RANKS``: where a tile has few entries, those of
    so many ranks are read at once. Entries that do not lie within their tile are left out, and exchange ``number``
    fails.
    """
    pid = tl.program_id(0)
    own = scratch + pid * TILE
    lane, member = tl.arange(0, LANES), tl.arange(0, RANKS).to(tl.int64)
    astray, many_astray = tl.zeros([RANKS, LANES], tl.int32), tl.zeros([LANES], tl.int32)
    for tile in range(pid, tiles, programs):
        base = tile * TILE
        first = tl.load(begins + member * (tiles + 1) + tile, mask=member < workers, other=0)
        last = tl.load(begins + member * (tiles + 1) + tile + 1, mask=member < workers, other=0)
        if (tl.max(last - first) <= LANES) & (workers <= RANKS):
            entry = first[:, None] + lane[None, :]
            real = entry < last[:, None]
            index = tl.load(indices + member[:, None] * index_stride + entry, mask=real, other=0)
            inside = _within(index, base, numel, TILE)
            astray |= (real & (inside == 0)).to(tl.int32)
            real = real & inside
            value = value_of(rows, rows16, member[:, None] * stride, entry, place_of(index, part, PARTS), real, starts,
                             owners, spans, segments, values_at, plane, CODEC, STEPS)  # fmt: skip
            spot = own + (index - base)
            for rank in range(workers):
                mine = real & (member[:, None] == rank)
                _add(spot, value, mine)
                tl.debug_barrier()
            if PARTS:
                _list_sums(own, out, listed, member[:, None] * room + entry, index, base, real)
            else:
                _write_mean(own, out, index, base, real, divisor, overflow, CHECK)
        else:
            for group in range(0, workers, RANKS):
                ranks = group + member
                first = tl.load(begins + ranks * (tiles + 1) + tile, mask=ranks < workers, other=0)
                last = tl.load(begins + ranks * (tiles + 1) + tile + 1, mask=ranks < workers, other=0)
                if tl.max(last - first) <= LANES:
                    entry = first[:, None] + lane[None, :]
                    real = entry < last[:, None]
                    index = tl.load(indices + ranks[:, None] * index_stride + entry, mask=real, other=0)
                    inside = _within(index, base, numel, TILE)
                    astray |= (real & (inside == 0)).to(tl.int32)
                    real = real & inside
                    value = value_of(rows, rows16, ranks[:, None] * stride, entry, place_of(index, part, PARTS), real,
                                     starts, owners, spans, segments, values_at, plane, CODEC, STEPS)  # fmt: skip
                    spot = own + (index - base)
                    for rank in range(group, tl.minimum(group + RANKS, workers)):
                        mine = real & (ranks[:, None] == rank)
                        _add(spot, value, mine)
                        tl.debug_barrier()
                else:
                    for rank in range(group, tl.minimum(group + RANKS, workers)):
                        row, near = tl.cast(rank, tl.int64) * stride, tl.cast(rank, tl.int64) * index_stride
                        start = tl.load(begins + rank * (tiles + 1) + tile)
                        stop = tl.load(begins + rank * (tiles + 1) + tile + 1)
                        for i in range(start, stop, LANES):
                            entry = i + lane
                            real = entry < stop
                            index = tl.load(indices + near + entry, mask=real, other=0)
                            inside = _within(index, base, numel, TILE)
                            many_astray |= (real & (inside == 0)).to(tl.int32)
                            real = real & inside
                            value = value_of(rows, rows16, row, entry, place_of(index, part, PARTS), real, starts,
                                             owners, spans, segments, values_at, plane, CODEC, STEPS)  # fmt: skip
                            spot = own + (index - base)
                            _add(spot, value, real)
                        tl.debug_barrier()
            for group in range(0, workers, RANKS):
                ranks = group + member
                first = tl.load(begins + ranks * (tiles + 1) + tile, mask=ranks < workers, other=0)
                last = tl.load(begins + ranks * (tiles + 1) + tile + 1, mask=ranks < workers, other=0)
                for i in range(0, tl.max(last - first), LANES):
                    entry = first[:, None] + i + lane[None, :]
                    real = entry < last[:, None]
                    index = tl.load(indices + ranks[:, None] * index_stride + entry, mask=real, other=0)
                    real = real & _within(index, base, numel, TILE)
                    if PARTS:
                        _list_sums(own, out, listed, ranks[:, None] * room + entry, index, base, real)
                    else:
                        _write_mean(own, out, index, base, real, divisor, overflow, CHECK)
        tl.debug_barrier()
    fail(tl.max(astray, 0) | many_astray, failed_exchange, number)
