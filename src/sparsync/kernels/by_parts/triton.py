"""Whole vectors that are summed in parts, as Triton kernels. Halves of a word are read and written as their bits."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.message.triton import HEADER, INFINITE, rounded

NAN = tl.constexpr(0x7FC0)  # the bits of one, of bf16


@triton.jit
def _store(place, at, value, mask, HALF: tl.constexpr):
    """Store values as they travel, to the nearest, ties to even: written out, as the interpreter would cut off."""
    if HALF:
        word = value.to(tl.int32, bitcast=True)
        near = tl.where((word & 0x7FFFFFFF) < INFINITE, word + 0x7FFF + ((word >> 16) & 1), word) >> 16
        tl.store(place + at, tl.where((word & 0x7FFFFFFF) > INFINITE, NAN, near).to(tl.int16), mask=mask)
    else:
        tl.store(place + at, value, mask=mask)


@triton.jit
def _load(place, at, mask, HALF: tl.constexpr):
    if HALF:
        return (tl.load(place + at, mask=mask, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(place + at, mask=mask, other=0.0)


@triton.jit
def pack(whole, header, rows, values, numel, part, words, BLOCK: tl.constexpr, HALF: tl.constexpr):
    """Write a piece of one rank's message; beyond the vector's end it holds 0."""
    piece, rank = tl.program_id(0), tl.program_id(1).to(tl.int64)
    entry = piece * BLOCK + tl.arange(0, BLOCK)
    at = rank * part + entry
    value = tl.load(whole + at, mask=(entry < part) & (at < numel), other=0.0).to(tl.float32)
    first = rank * words + HEADER
    _store(values, (first * 2 if HALF else first) + entry, value, entry < part, HALF)
    if piece == 0:
        word = tl.arange(0, HEADER)
        tl.store(rows + rank * words + word, tl.load(header + word))


@triton.jit
def add(values, own, part, workers, words, BLOCK: tl.constexpr, HALF: tl.constexpr):
    """Add a piece of all ranks' values, in their order."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in range(workers):
        first = tl.cast(rank, tl.int64) * words + HEADER
        value = _load(values, (first * 2 if HALF else first) + entry, entry < part, HALF)
        total = tl.where(rank == 0, value, total + value)  # of 0 the sign counts, too
    _store(own, entry, total, entry < part, HALF)


@triton.jit
def write_mean(sums, out, overflow, numel, divisor, BLOCK: tl.constexpr, HALF: tl.constexpr, CHECK: tl.constexpr):
    """Write a piece of the mean."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < numel
    mean = tl.div_rn(_load(sums, entry, inside, HALF), divisor + tl.zeros([BLOCK], tl.float32))
    mean = rounded(mean, out)
    tl.store(out + entry, mean.to(out.dtype.element_ty), mask=inside)
    if CHECK:
        nonfinite = inside & ((mean.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= INFINITE)
        if tl.sum(nonfinite.to(tl.int32)) > 0:
            tl.store(overflow, 1)
