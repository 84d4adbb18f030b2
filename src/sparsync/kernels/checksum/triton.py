"""The checksum of messages as Triton kernels: equal bit for bit to the reference, as integers have no order."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.checksum import reference
from sparsync.kernels.message import header

SUM = tl.constexpr(header.SUM)
FIRST, STEP = tl.constexpr(reference.FIRST), tl.constexpr(reference.STEP)


@triton.jit
def weighted(word, at):
    """Return what words at these places of a message add to its checksum."""
    counts = (at < SUM) | (at >= SUM + 2)
    factor = (at * STEP + FIRST).to(tl.uint32).to(tl.int64)
    return tl.where(counts, word.to(tl.uint32, bitcast=True).to(tl.int64) * factor, 0)


@triton.jit
def sum_pieces(row, words, first, programs, BLOCK: tl.constexpr):
    """Return what every ``programs``-th piece of the message at ``row``, from piece ``first`` on, adds."""
    total = tl.zeros([BLOCK], tl.int64)
    for piece in range(first, tl.cdiv(words, BLOCK), programs):
        at = piece * BLOCK + tl.arange(0, BLOCK)
        total += weighted(tl.load(row + at, mask=at < words, other=0), at)
    return tl.sum(total)


@triton.jit
def sum_messages(rows, stride, words, sums, programs, BLOCK: tl.constexpr):
    """Add the checksums of messages to ``sums``."""
    rank = tl.program_id(1).to(tl.int64)
    total = sum_pieces(rows + rank * stride, words, tl.program_id(0), programs, BLOCK)
    tl.atomic_add(sums + rank, total, sem="relaxed")
