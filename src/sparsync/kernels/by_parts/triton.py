"""Whole vectors that are summed in parts, as Triton kernels. Values in messages are read and written as their bits.

A vector is two pieces: of the first, sums travel as fp32 in any case. A rank's part of a message is its part of the
first piece, then that of the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.accumulate.triton import INFINITE
from sparsync.kernels.message.header_triton import HEADER, WORDS
from sparsync.kernels.message.mean_triton import rounded

NAN = tl.constexpr(0x7FC0)  # the bits of one, of bf16


@triton.jit
def _half(value):
    """Return the bits of bf16, to the nearest, ties to even: written out, as the interpreter would cut off."""
    word = value.to(tl.int32, bitcast=True)
    near = tl.where((word & 0x7FFFFFFF) < INFINITE, word + 0x7FFF + ((word >> 16) & 1), word) >> 16
    return tl.where((word & 0x7FFFFFFF) > INFINITE, NAN, near)


@triton.jit
def _value(half):
    """Return what bits of bf16 stand for."""
    return (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def pack(whole, header, rows, rows16, full, numel, full_part, part, words, BLOCK: tl.constexpr, HALF: tl.constexpr):
    """Write a piece of one rank's message; beyond the vector's end it holds 0."""
    piece, rank = tl.program_id(0), tl.program_id(1).to(tl.int64)
    entry = piece * BLOCK + tl.arange(0, BLOCK)
    there = entry < full_part + part
    first = entry < full_part
    at = tl.where(first, rank * full_part + entry, full + rank * part + entry - full_part)
    inside = there & (at < tl.where(first, full, numel))
    value = tl.load(whole + at, mask=inside, other=0.0).to(tl.float32)
    if HALF:
        tl.store(rows16 + 2 * (rank * words + HEADER) + entry, _half(value).to(tl.int16), mask=there)
    else:
        tl.store(rows + rank * words + HEADER + entry, value.to(tl.int32, bitcast=True), mask=there)
    if piece == 0:
        word = tl.arange(0, WORDS)
        own = tl.load(header + word, mask=word < HEADER, other=0)
        tl.store(rows + rank * words + word, own, mask=word < HEADER)


@triton.jit
def add(
    rows, rows16, own, own16, full, numel, full_part, part, workers, words, BLOCK: tl.constexpr, HALF: tl.constexpr
):
    """Add a piece of all ranks' values, in their order."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there, first = entry < full_part + part, entry < full_part
    total = tl.zeros([BLOCK], tl.float32)
    for rank in range(workers):
        row = tl.cast(rank, tl.int64) * words + HEADER
        if HALF:
            value = _value(tl.load(rows16 + 2 * row + entry, mask=there, other=0))
        else:
            value = tl.load(rows + row + entry, mask=there, other=0).to(tl.float32, bitcast=True)
        total = tl.where(rank == 0, value, total + value)  # of 0 the sign counts, too
    if HALF:
        tl.store(own16 + full_part + entry, _half(total).to(tl.int16), mask=there & (entry >= full_part))
        there = first
    tl.store(own + entry, total.to(tl.int32, bitcast=True), mask=there)


@triton.jit
def write_mean(
    sums, sums16, out, overflow, full, numel, full_part, part, words, divisor,
    BLOCK: tl.constexpr, HALF: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Write a piece of the mean."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, first = entry < numel, entry < full
    own = tl.maximum(tl.where(first, full_part, part), 1)  # entries of a rank
    local = tl.where(first, entry, entry - full)
    rank, at = (local // own).to(tl.int64), local % own
    if HALF:
        total = tl.load(sums + rank * words + at, mask=inside & first, other=0).to(tl.float32, bitcast=True)
        half = tl.load(sums16 + 2 * (rank * words + full_part) + at, mask=inside & (entry >= full), other=0)
        total = tl.where(first, total, _value(half))
    else:
        at = tl.where(first, at, full_part + at)
        total = tl.load(sums + rank * words + at, mask=inside, other=0).to(tl.float32, bitcast=True)
    mean = rounded(tl.div_rn(total, divisor + tl.zeros([BLOCK], tl.float32)), out)
    tl.store(out + entry, mean.to(out.dtype.element_ty), mask=inside)
    if CHECK:
        nonfinite = inside & ((mean.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= INFINITE)
        if tl.sum(nonfinite.to(tl.int32)) > 0:
            tl.store(overflow, 1)


@triton.jit
def cut_off(grad, before, rest, numel, BLOCK: tl.constexpr):
    """Round the gradient with what was kept of it, and store what is cut off; 0 sends nothing."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    came = tl.load(grad + at, mask=inside, other=0.0)
    total = tl.load(before + at, mask=inside, other=0.0) + came
    sent = _value(_half(tl.where(came != 0.0, total, 0.0)))
    tl.store(rest + at, total - sent, mask=inside)
    tl.store(grad + at, sent, mask=inside)


@triton.jit
def keep_rest(good, rest, before, after, numel, BLOCK: tl.constexpr):
    """Store what was cut off, or what was kept before, as the step was good (above 0) or not."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    old = tl.load(before + at, mask=at < numel, other=0.0)
    new = tl.load(rest + at, mask=at < numel, other=0.0)
    tl.store(after + at, tl.where(tl.load(good) > 0.0, new, old), mask=at < numel)
