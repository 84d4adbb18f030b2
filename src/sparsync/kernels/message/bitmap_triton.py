"""Entries sorted without sorting, as Triton kernels: a bitmap of the gradient is marked, and an entry's place in the
message is the number of bits before its own."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.checksum.triton import sum_pieces

LINE = tl.constexpr(32)  # words of the bitmap that are counted together: one line of the cache
LINES = tl.constexpr(128)  # of these, a program


@triton.jit
def popcount(word):
    """Return how many bits are set."""
    w = word.to(tl.uint32, bitcast=True)
    w = w - ((w >> 1) & 0x55555555)
    w = (w & 0x33333333) + ((w >> 2) & 0x33333333)
    w = (w + (w >> 4)) & 0x0F0F0F0F
    return ((w * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def bit_at(number):
    """Return a word with this bit alone."""
    return (tl.full([], 1, tl.int64) << number).to(tl.int32)


@triton.jit
def mark(indices, count, bitmap, message, words, programs, BLOCK: tl.constexpr):
    """Set the bit of every entry; on the side, clear the last message."""
    pid = tl.program_id(0)
    entry = pid * BLOCK + tl.arange(0, BLOCK)
    real = entry < tl.load(count)
    index = tl.load(indices + entry, mask=real, other=0)
    tl.atomic_or(bitmap + (index >> 5), bit_at(index & 31), mask=real, sem="relaxed")
    for piece in range(pid, tl.cdiv(words, BLOCK), programs):
        word = piece * BLOCK + tl.arange(0, BLOCK)
        tl.store(message + word, tl.zeros([BLOCK], tl.int32), mask=word < words)


@triton.jit
def unmark(indices, count, bitmap, message, words, checksum, programs, BLOCK: tl.constexpr, PIECE: tl.constexpr):
    """Clear the bitmap again; on the side, ``programs`` of us add up the checksum of the message, which is 0."""
    pid = tl.program_id(0)
    entry = pid * BLOCK + tl.arange(0, BLOCK)
    real = entry < tl.load(count)
    index = tl.load(indices + entry, mask=real, other=0)
    tl.store(bitmap + (index >> 5), tl.zeros([BLOCK], tl.int32), mask=real)
    if pid < programs:
        tl.atomic_add(checksum, sum_pieces(message, words, pid, programs, PIECE), sem="relaxed")


@triton.jit
def count_marks(bitmap, lines, sums):
    """Count the bits that are set before each line, within a program's lines; and in all of them."""
    pid = tl.program_id(0)
    line = pid * LINES + tl.arange(0, LINES)
    word = line[:, None] * LINE + tl.arange(0, LINE)[None, :]
    number = tl.sum(popcount(tl.load(bitmap + word)), 1)
    tl.store(lines + line, tl.cumsum(number, 0) - number)
    tl.store(sums + pid, tl.sum(number))


@triton.jit
def sum_before(sums, blocks, BLOCK: tl.constexpr):
    """Make sums what lies before them, and return all of them together: one program."""
    before = 0
    for i in range(0, blocks, BLOCK):
        block = i + tl.arange(0, BLOCK)
        number = tl.load(sums + block, mask=block < blocks, other=0)
        tl.store(sums + block, before + tl.cumsum(number, 0) - number, mask=block < blocks)
        before += tl.sum(number)
    return before


@triton.jit
def marks_before(place, real, bitmap, lines, sums):
    """Return how many marks lie before some places of the bitmap."""
    line, own = place >> 10, ((place >> 5) & 31).to(tl.int32)
    lane = tl.arange(0, LINE)
    word = tl.load(bitmap + line[:, None] * LINE + lane[None, :], mask=real[:, None], other=0)
    below = bit_at(place & 31) - 1
    word = tl.where(lane[None, :] == own[:, None], word & below[:, None], word)
    before = tl.sum(tl.where(lane[None, :] <= own[:, None], popcount(word), 0), 1)
    return tl.load(sums + (place >> 17), mask=real, other=0) + tl.load(lines + line, mask=real, other=0) + before
