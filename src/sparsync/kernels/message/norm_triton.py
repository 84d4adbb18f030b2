"""The mean of messages given another norm, as Triton kernels: what ``sparse.give_norm`` does."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.accumulate.triton import INFINITE, bits_of
from sparsync.kernels.message.decode_triton import value_of
from sparsync.kernels.message.mean_triton import TOP, rounded
from sparsync.kernels.partition.triton import place_of


@triton.jit
def gather_mean(
    rows, rows16, stride, indices, index_stride, begins, out, gathered, products, starts, owners, spans, segments,
    tiles, capacity, pieces, values_at, plane, numel, peaks, BLOCK: tl.constexpr, CODEC: tl.constexpr,
    STEPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Gather what was written for the entries of every message, and sum up its products with their values; of fp16 note
    the largest."""
    piece, rank = tl.program_id(0), tl.program_id(1).to(tl.int64)
    entry = piece * BLOCK + tl.arange(0, BLOCK)
    real = entry < tl.load(begins + rank * (tiles + 1) + tiles)
    index = place_of(tl.load(indices + rank * index_stride + entry, mask=real, other=0), rank, PARTS)
    real = real & (index >= 0) & (index < numel)
    value = value_of(rows, rows16, rank * stride, entry, index, real, starts, owners, spans, segments, values_at, plane,
                   CODEC, STEPS)  # fmt: skip
    mean = tl.load(out + index, mask=real, other=0.0).to(tl.float32)
    tl.store(gathered + rank * capacity + entry, mean, mask=real)
    product = tl.where(real, value, 0.0).to(tl.float64) * mean.to(tl.float64)
    tl.store(products + rank * pieces + piece, tl.sum(product))
    if out.dtype.element_ty == tl.float16:
        finite = real & (bits_of(mean) < INFINITE)
        tl.store(peaks + rank * pieces + piece, tl.max(tl.where(finite, tl.abs(mean), 0.0)))


@triton.jit(do_not_specialize=["scale"])
def find_factor(products, size, workers, norms, parts, scale, factor, peaks, BLOCK: tl.constexpr, HALF: tl.constexpr):
    """Store what gives a mean ``scale`` times the norm of ``norms``; ``scale``, where either norm is 0 or unknown, and
    less where that leaves fp16's range (``HALF``). One program."""
    lane = tl.arange(0, BLOCK)
    squares, wanted = tl.full([BLOCK], 0.0, tl.float64), tl.full([BLOCK], 0.0, tl.float64)
    for i in range(0, size, BLOCK):
        squares += tl.load(products + i + lane, mask=i + lane < size, other=0.0)
    for i in range(0, parts, BLOCK):
        norm = tl.load(norms + i + lane, mask=i + lane < parts, other=0.0).to(tl.float64)
        wanted += norm * norm
    own = tl.sqrt(tl.maximum(tl.sum(squares), 0.0) / workers).to(tl.float32)
    norm = tl.sqrt(tl.sum(wanted)).to(tl.float32)
    known = (own > 0.0) & (norm > 0.0)
    found = tl.where(known, tl.div_rn(norm, tl.where(known, own, 1.0)), 1.0) * scale
    if HALF:
        peak = tl.full([BLOCK], 0.0, tl.float32)
        for i in range(0, size, BLOCK):
            peak = tl.maximum(peak, tl.load(peaks + i + lane, mask=i + lane < size, other=0.0))
        most = tl.max(peak)
        room = tl.div_rn(tl.full([], TOP, tl.float32), tl.where(most > 0.0, most, 1.0))
        found = tl.where(most > 0.0, tl.minimum(found, room), found)
    tl.store(factor, found)


@triton.jit
def multiply_mean(
    indices, index_stride, begins, gathered, factor, out, tiles, capacity, numel,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write what was gathered, multiplied: of ranks that share an entry, all write the same."""
    rank = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = entry < tl.load(begins + rank * (tiles + 1) + tiles)
    index = place_of(tl.load(indices + rank * index_stride + entry, mask=real, other=0), rank, PARTS)
    real = real & (index >= 0) & (index < numel)
    mean = rounded(tl.load(gathered + rank * capacity + entry, mask=real, other=0.0) * tl.load(factor), out)
    tl.store(out + index, mean.to(out.dtype.element_ty), mask=real)
