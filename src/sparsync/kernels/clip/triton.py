"""How much a gradient is clipped, as Triton kernels: a pass that only reads, and one program for each segment.

Sums are made in float64 and in a fixed order: the same gradient gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.strips import Strip

STRIP, GROUP = tl.constexpr(len(Strip._fields)), tl.constexpr(2)  # columns of strips, and of their groups
START, LOW, HIGH = (tl.constexpr(i) for i in range(3))
INFINITE = tl.constexpr(0x7F800000)  # bits of infinity; NaN is above


@triton.jit
def _square(g):
    """Return squares in float64, where that of no float32 overflows; 0 of what is not finite."""
    g = g.to(tl.float32)
    nonfinite = (g.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= INFINITE
    wide = tl.where(nonfinite, 0.0, g).to(tl.float64)
    return wide * wide


@triton.jit
def squares(grad, strips, sums, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Sum up the squares of one strip a program."""
    strip, lane = tl.program_id(0), tl.arange(0, BLOCK)
    start = tl.multiple_of(tl.load(strips + strip * STRIP + START), 128)
    low, high = tl.load(strips + strip * STRIP + LOW), tl.load(strips + strip * STRIP + HIGH)
    total = tl.full([BLOCK], 0.0, tl.float64)
    if (low == start) & (high == start + BLOCK * BLOCKS):
        for i in range(BLOCKS):
            total += _square(tl.load(grad + start + i * BLOCK + lane))
    else:
        for i in range(BLOCKS):
            offs = start + i * BLOCK + lane
            total += _square(tl.load(grad + offs, mask=(offs >= low) & (offs < high), other=0.0))
    tl.store(sums + strip, tl.sum(total))


@triton.jit
def scale(sums, groups, limit, scales, BLOCK: tl.constexpr):
    """Find what brings the norm of a group down to ``limit``, or 1 where it is no larger: one group a program."""
    group, lane = tl.program_id(0), tl.arange(0, BLOCK)
    first, strips = tl.load(groups + group * GROUP), tl.load(groups + group * GROUP + 1)
    total = tl.full([BLOCK], 0.0, tl.float64)
    for i in range(0, strips, BLOCK):
        total += tl.load(sums + first + i + lane, mask=i + lane < strips, other=0.0)
    norm, most = tl.sqrt(tl.sum(total)), tl.load(limit)
    large = norm > most
    tl.store(scales + group, (tl.where(large, most, 1.0) / tl.where(large, norm, 1.0)).to(tl.float32))
