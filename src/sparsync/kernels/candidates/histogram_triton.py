"""The histogram of every segment's candidates, as Triton kernels: how far each lies above the carried threshold.

``threshold/reference.py`` is the specification of its bins.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.accumulate.triton import bits_of
from sparsync.kernels.strips_triton import CARRIED, FIRST_ENTRY, FIRST_REGION, PAD, ROOM, SEGMENT, STATE
from sparsync.kernels.threshold import reference

BINS = tl.constexpr(reference.BINS)
FINE, MIDDLE, WIDE = tl.constexpr(reference.FINE), tl.constexpr(reference.MIDDLE), tl.constexpr(reference.WIDE)
MIDDLE_FROM, WIDE_FROM = tl.constexpr(reference.MIDDLE_FROM), tl.constexpr(reference.WIDE_FROM)
MIDDLE_BITS, WIDE_BITS = tl.constexpr(reference.MIDDLE_BITS), tl.constexpr(reference.WIDE_BITS)


@triton.jit
def _bin_of(up):
    """Return the bins of magnitudes that lie ``up`` above the threshold, as ``reference.bins_of``."""
    wide = tl.minimum(((up - WIDE_BITS) >> WIDE) + WIDE_FROM, BINS - 1)
    middle = ((up - MIDDLE_BITS) >> MIDDLE) + MIDDLE_FROM
    return tl.where(up < MIDDLE_BITS, up >> FINE, tl.where(up < WIDE_BITS, middle, wide))


@triton.jit
def add_histogram(values, counts, segments, state, histogram, region, segment, BLOCK: tl.constexpr):
    """Add a region's candidates to the histogram of their segment. (Made by ``collect``, entry by entry, it would cost
    several times as much.)"""
    row = segments + segment * SEGMENT
    room = tl.load(row + ROOM).to(tl.int32)
    first = tl.load(row + FIRST_ENTRY) + (region - tl.load(row + FIRST_REGION)) * room
    size = tl.minimum(tl.load(counts + region * PAD), room)
    threshold = tl.maximum(tl.load(state + segment * STATE + CARRIED), 1).to(tl.int32)
    sums = tl.zeros([BINS], tl.int32)
    for i in range(0, size, BLOCK):
        spot = i + tl.arange(0, BLOCK)
        real = spot < size
        up = bits_of(tl.load(values + first + spot, mask=real, other=0.0)) - threshold
        sums += tl.histogram(tl.where(real, _bin_of(up), 0), BINS, mask=real)
    tl.atomic_add(histogram + segment * BINS + tl.arange(0, BINS), sums, mask=sums > 0, sem="relaxed")


@triton.jit
def make_histogram(values, counts, owners, segments, state, histogram, BLOCK: tl.constexpr):
    """Make the histogram of every segment's candidates: one region a program."""
    region = tl.program_id(0)
    add_histogram(values, counts, segments, state, histogram, region, tl.load(owners + region), BLOCK)


@triton.jit
def edge_bits(bin):
    """Return how far above the threshold a bin starts, as ``reference.edge_bits``."""
    middle = ((bin - MIDDLE_FROM) << MIDDLE) + MIDDLE_BITS
    wide = ((bin - WIDE_FROM) << WIDE) + WIDE_BITS
    return tl.where(bin < MIDDLE_FROM, bin << FINE, tl.where(bin < WIDE_FROM, middle, wide))


@triton.jit
def pick(vector, index, SIZE: tl.constexpr):
    """Return ``vector[index]``."""
    return tl.sum(tl.where(tl.arange(0, SIZE) == index, vector, 0))
