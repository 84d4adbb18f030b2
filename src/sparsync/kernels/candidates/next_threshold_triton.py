"""The threshold that is carried over to the next step, as Triton functions: from the histogram of candidates, or where
that tells nothing from a sample of the residual.

``threshold/reference.py`` is the specification.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.accumulate.triton import bits_of
from sparsync.kernels.candidates.histogram_triton import BINS, FINE, edge_bits, pick
from sparsync.kernels.strips_triton import CARRIED, FIRST_SAMPLE, INFLOW, LEFT, MADE_FOR, NUMEL, SAMPLES, K
from sparsync.kernels.threshold import reference

NEAR, QUARTER = tl.constexpr(reference.NEAR), tl.constexpr(reference.OCTAVE // 4)
COARSE, COARSE_BINS = tl.constexpr(reference.COARSE), tl.constexpr(2048)


@triton.jit
def _estimate(after, samples, row, k, BLOCK: tl.constexpr):
    """Return the bits of a threshold, as ``reference.estimate``."""
    first, size, numel = tl.load(row + FIRST_SAMPLE), tl.load(row + SAMPLES), tl.load(row + NUMEL)
    coarse = tl.zeros([COARSE_BINS], tl.int32)
    nonzero = tl.zeros([BLOCK], tl.int32)
    for i in range(0, size, BLOCK):
        spot = i + tl.arange(0, BLOCK)
        real = spot < size
        index = tl.load(samples + first + spot, mask=real, other=0)
        bits = tl.where(real, bits_of(tl.load(after + index, mask=real, other=0.0)), 0)
        nonzero += (bits > 0).to(tl.int32)
        coarse += tl.histogram(bits >> COARSE, COARSE_BINS, mask=bits > 0)
    many = tl.sum(nonzero).to(tl.int64)
    target = 2 * k + 16
    wanted = tl.minimum(many, (target * size + numel - 1) // numel)
    reached = tl.cumsum(coarse, reverse=True).to(tl.int64)
    bin = tl.sum((reached >= wanted).to(tl.int64)) - 1
    return tl.where(many > 0, tl.maximum(bin << COARSE, 1), 0)


@triton.jit
def next_threshold(after, samples, row, own, reached, candidates, edge, BLOCK: tl.constexpr):
    """Store the threshold for the next step, as ``reference.next_threshold``; ``reached``: as there, in 64 bits."""
    k, numel = tl.load(row + K), tl.load(row + NUMEL)
    known, left, inflow = tl.load(own + CARRIED), tl.load(own + LEFT), tl.load(own + INFLOW)
    target = 2 * k + 16
    if k < numel:  # otherwise everything is sent
        if (known == 0) | (candidates == 0) | (candidates > 8 * (12 * k + 256)):
            estimated = _estimate(after, samples, row, k, BLOCK)
            tl.store(own + CARRIED, tl.where(estimated > 0, estimated, known))
            tl.store(own + LEFT, k // 2)
            tl.store(own + INFLOW, k)
        else:
            stored = tl.maximum(pick(reached, 0, BINS), 1)
            if candidates > stored:  # where a region overflowed, what it holds stands for all
                reached = reached * candidates // stored
            sent = tl.minimum(pick(reached, edge, BINS), k)
            inflow = (3 * inflow + tl.maximum(candidates - left, 0)) // 4
            left = candidates - sent
            if left + inflow > target:
                expected = tl.maximum(reached - sent, 0) * candidates + inflow * reached
                higher = tl.minimum(edge, tl.sum((expected > target * candidates).to(tl.int64)))
                up = pick(reached, higher, BINS)
                tl.store(own + CARRIED, known + edge_bits(higher))
                tl.store(own + LEFT, tl.maximum(up - sent, 0))
                tl.store(own + INFLOW, inflow * up // candidates)
            else:
                missing = target - left - inflow
                near = tl.maximum(candidates - pick(reached, NEAR, BINS), 1)
                down = tl.minimum(missing * (NEAR << FINE) // near, QUARTER)
                down = tl.where(2 * pick(reached, BINS - 1, BINS) > k, 0, down)
                tl.store(own + CARRIED, tl.maximum(known - down, 1))
                tl.store(own + LEFT, left + missing)
                tl.store(own + INFLOW, inflow)
        tl.store(own + MADE_FOR, k)
