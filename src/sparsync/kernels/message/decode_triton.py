"""Indices and values read from messages, as Triton kernels: equal bit for bit to what ``wire`` reads.

Where a message says what cannot be, the exchange has failed (``fail``).
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.message.bitmap_triton import popcount
from sparsync.kernels.message.encode_triton import segment_of
from sparsync.kernels.message.header_triton import ENTRIES, HEADER


@triton.jit
def fail(wrong, failed_exchange, number):
    """Make the exchange whose number stands at ``number`` a failed one where anything is wrong, unless an earlier one
    has failed."""
    if tl.sum(wrong.to(tl.int32)) > 0:
        first_wrong = tl.load(failed_exchange)
        tl.store(failed_exchange, tl.where(first_wrong != 0, first_wrong, tl.load(number)).to(tl.int32))


@triton.jit
def count_ones(rows, stride, at, words, sums, blocks, BLOCK: tl.constexpr):
    """Count the bits that are set in each block of the messages' high words."""
    block, rank = tl.program_id(0), tl.program_id(1).to(tl.int64)  # all rows may be more than 2**31 words
    word = block * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(rows + rank * stride + at + word, mask=word < words, other=0)
    tl.store(sums + rank * blocks + block, tl.sum(popcount(bits)))


@triton.jit
def expand(
    rows, stride, at, words, sums, blocks, indices, capacity, failed_exchange, number, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Find the indices of Elias-Fano coded messages, in order. Exchange ``number`` fails where these are not as many as
    the header says."""
    block, rank = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = rows + rank * stride
    other = tl.arange(0, BLOCKS)
    before = tl.sum(tl.load(sums + rank * blocks + other, mask=other < block, other=0))
    word = block * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(row + at + word, mask=word < words, other=0)
    ones = popcount(bits)
    place = before + tl.cumsum(ones, 0) - ones
    last = (block == blocks - 1) & (tl.arange(0, BLOCK) == BLOCK - 1)
    fail(last & (place + ones != tl.load(row + ENTRIES)), failed_exchange, number)
    for bit in range(32):
        mine = ((bits >> bit) & 1) != 0
        mine = mine & (place < capacity)
        index = (word.to(tl.int64) * 32 + bit - place) << WIDTH
        if WIDTH > 0:
            low = place.to(tl.int64) * WIDTH
            spot = row + HEADER + (low >> 5)
            one = tl.load(spot, mask=mine, other=0).to(tl.int64) & 0xFFFFFFFF
            two = tl.load(spot + 1, mask=mine, other=0).to(tl.int64)
            index = index | (((one | (two << 32)) >> (low & 31)) & ((tl.full([], 1, tl.int64) << WIDTH) - 1))
        index = tl.minimum(index, 0x7FFFFFFF)  # of one that is too large, no bit gets lost: it stays too large
        tl.store(indices + rank * capacity + place, index.to(tl.int32), mask=mine)
        place += mine.to(tl.int32)


@triton.jit
def value_of(
    rows, rows16, row, entry, index, real, starts, owners, spans, segments, values_at, plane,
    CODEC: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Return the values of entries of messages that begin at ``row``; ``plane``: words of a bit of every value."""
    if CODEC == 0:
        return tl.load(rows + row + values_at + entry, mask=real, other=0).to(tl.float32, bitcast=True)
    elif CODEC == 1:
        half = tl.load(rows16 + 2 * (row + values_at) + entry, mask=real, other=0)
        return half.to(tl.float16, bitcast=True).to(tl.float32)
    elif CODEC == 2:
        half = tl.load(rows16 + 2 * (row + values_at) + entry, mask=real, other=0).to(tl.int32)
        return (half << 16).to(tl.float32, bitcast=True)
    else:
        segment = segment_of(index, starts, owners, spans, STEPS)
        scale = tl.load(rows + row + values_at + segment, mask=real, other=0)
        bits = rows + row + values_at + segments + (entry >> 5)
        lane = (entry & 31).to(tl.int32)
        if CODEC == 4:
            low = (tl.load(bits + plane, mask=real, other=0) >> lane) & 1
            high = (tl.load(bits + 2 * plane, mask=real, other=0) >> lane) & 1
            scale -= (((scale >> 23) - low - 2 * high) & 3) << 23
        size = scale.to(tl.float32, bitcast=True)
        return tl.where(((tl.load(bits, mask=real, other=0) >> lane) & 1) != 0, -size, size)
