"""Gaussian-k with a threshold that is carried on, as Triton kernels: in place of ``triton.walk``, what is counted at a
ladder of thresholds is looked at, to find the two that k is between, those between them that k is between, and last to
choose one of these.
``reference.hold`` is the specification."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.gaussian import reference
from sparsync.kernels.gaussian.triton import THRESHOLDS, bound_of, total_counts
from sparsync.kernels.strips_triton import BOUND, CAPACITY, CHOICE, NUMEL, SEGMENT, K

ENDS, RUNGS = tl.constexpr(len(reference.LADDER)), tl.constexpr(len(reference.LADDER) - 2)
MOST = tl.constexpr(reference.MOST)


@triton.jit
def _rungs(k, n0, n1, n2, n3, n4, n5):
    """Return how many of the counts reach k; they fall."""
    lower = (n0 >= k).to(tl.int32) + (n1 >= k).to(tl.int32) + (n2 >= k).to(tl.int32)
    return lower + (n3 >= k).to(tl.int32) + (n4 >= k).to(tl.int32) + (n5 >= k).to(tl.int32)


@triton.jit
def _between(ladder, brackets, segment, at):
    """Return the two neighbours, among the thresholds counted last, that k is between."""
    start, end = tl.load(brackets + 2 * segment), tl.load(brackets + 2 * segment + 1)
    low, high = tl.load(ladder + ENDS + at), tl.load(ladder + ENDS + at + 1)
    return start + (end - start) * low, start + (end - start) * high


@triton.jit
def narrow(
    segments, thresholds, counts_above, ladder, brackets, bounds, strip_count, BLOCK: tl.constexpr, FIRST: tl.constexpr
):
    """Note between which thresholds k is, and the bounds of those that are counted next: one segment a program."""
    segment = tl.program_id(0)
    row = segments + segment * SEGMENT
    n0, n1, n2, n3, n4, n5 = total_counts(row, counts_above, strip_count, BLOCK)
    at = _rungs(tl.load(row + K), n0, n1, n2, n3, n4, n5)
    if FIRST:
        t = tl.load(thresholds + segment)
        low, high = t * tl.load(ladder + at), t * tl.load(ladder + at + 1)
    else:
        low, high = _between(ladder, brackets, segment, at)
        tl.debug_barrier()  # every thread has read what is written next
    tl.store(brackets + 2 * segment, low)
    tl.store(brackets + 2 * segment + 1, high)
    number = tl.arange(0, THRESHOLDS)  # the last two stand for nothing
    steps = tl.load(ladder + ENDS + 1 + number, mask=number < RUNGS, other=0.0)
    tl.store(bounds + segment * THRESHOLDS + number, bound_of(low + (high - low) * steps))


@triton.jit
def settle(segments, fitted, counts_above, ladder, brackets, carried, choice, strip_count, BLOCK: tl.constexpr):
    """Choose the threshold, and note the factor that the next step begins from: one segment a program."""
    segment = tl.program_id(0)
    row = segments + segment * SEGMENT
    k, numel, capacity = tl.load(row + K), tl.load(row + NUMEL), tl.load(row + CAPACITY)
    n0, n1, n2, n3, n4, n5 = total_counts(row, counts_above, strip_count, BLOCK)
    at = _rungs(k, n0, n1, n2, n3, n4, n5)
    low, high = _between(ladder, brackets, segment, at)
    many = tl.where(at < 2, n0, tl.where(at == 2, n1, tl.where(at == 3, n2, n3)))
    many = tl.where(at < 5, many, tl.where(at == 5, n4, n5))
    few = tl.where(at == 0, n0, tl.where(at == 1, n1, tl.where(at == 2, n2, n3)))
    few = tl.where(at < 4, few, tl.where(at == 4, n4, n5))
    inside = (at > 0) & (at < RUNGS)
    share = (many - k).to(tl.float64) / tl.where(inside, many - few, 1).to(tl.float64)
    t = low + (high - low) * tl.where(inside, share, 0.5)
    t = tl.where((at < RUNGS) & (3 * few >= 2 * k), high, t)
    t = tl.where((at > 0) & (many <= capacity), low, t)
    fit = tl.load(fitted + segment)
    factor = tl.minimum(tl.maximum(t / tl.where(fit > 0, fit, 1.0), 1 / MOST), MOST)
    tl.store(carried + segment, tl.where((fit > 0) & (k < numel), factor, tl.load(carried + segment)))
    tl.store(choice + segment * CHOICE + BOUND, tl.where(k < numel, bound_of(t), 1).to(tl.int64))
