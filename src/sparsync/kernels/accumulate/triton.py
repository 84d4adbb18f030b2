"""Add a gradient to the residual, as Triton functions that the one pass of each operation calls.

``accumulate/reference.py`` is the specification; of updates, ``precondition/reference.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.precondition.triton import make_update

INFINITE = tl.constexpr(0x7F800000)  # bits of infinity; NaN is above


@triton.jit
def bits_of(u):
    """Return magnitudes as the integers their bits make."""
    return u.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def accumulate(
    grad, before, after, velocity_before, velocity_after, beta, scale, offs, low, high,
    MASKED: tl.constexpr, MOMENTUM: tl.constexpr, SCALED: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Write ``after = before + gradient`` (or its velocity); where that is not finite, everything stays as it was.

    Returns what then stands there (0 outside), and where it was not finite.
    """
    if MASKED:
        inside = (offs >= low) & (offs < high)
        g = tl.load(grad + offs, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(before + offs, mask=inside, other=0.0)
    else:
        g = tl.load(grad + offs).to(tl.float32)
        r = tl.load(before + offs)
    if SCALED:
        g = g * scale
    if MOMENTUM:
        old = tl.load(velocity_before + offs, mask=inside, other=0.0) if MASKED else tl.load(velocity_before + offs)
        g = old * beta + g
    u = r + g
    nonfinite = bits_of(u) >= INFINITE
    u = tl.where(nonfinite, r, u)
    if MASKED:
        tl.store(after + offs, u, mask=inside)
        if MOMENTUM:
            tl.store(velocity_after + offs, tl.where(nonfinite, old, g), mask=inside)
        if ZERO:
            tl.store(grad + offs, tl.zeros_like(u).to(grad.dtype.element_ty), mask=inside)
    else:
        tl.store(after + offs, u)
        if MOMENTUM:
            tl.store(velocity_after + offs, tl.where(nonfinite, old, g))
        if ZERO:
            tl.store(grad + offs, tl.zeros_like(u).to(grad.dtype.element_ty))
    return u, nonfinite


@triton.jit
def accumulate_update(
    grad, before, after, velocity_before, velocity_after, beta, offs, low, high, row_sizes, col_sizes, row, col, rows,
    cols, exact, share, rate, eps, limit, kept,
    MASKED: tl.constexpr, ZERO: tl.constexpr, STACKED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Do as ``accumulate``, with the update that the gradient asks for in its place: as ``precondition`` makes it; and
    with the share ``kept`` of what was there before."""
    inside = (offs >= low) & (offs < high)
    if MASKED:
        g = tl.load(grad + offs, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(before + offs, mask=inside, other=0.0)
        old = tl.load(velocity_before + offs, mask=inside, other=0.0)
    else:
        g = tl.load(grad + offs).to(tl.float32)
        r, old = tl.load(before + offs), tl.load(velocity_before + offs)
    r = r * kept
    local = tl.maximum((offs - low).to(tl.int32), 0)
    velocity, update, finite = make_update(
        g, old, local, inside, row_sizes, col_sizes, row, col, rows, cols, exact, beta, share, rate, eps, limit,
        MASKED, SIZE, STACKED,
    )  # fmt: skip
    u = r + tl.where(finite, update, float("nan"))
    nonfinite = bits_of(u) >= INFINITE
    u, velocity = tl.where(nonfinite, r, u), tl.where(finite, velocity, old)
    if MASKED:
        tl.store(after + offs, u, mask=inside)
        tl.store(velocity_after + offs, velocity, mask=inside)
        if ZERO:
            tl.store(grad + offs, tl.zeros_like(u).to(grad.dtype.element_ty), mask=inside)
    else:
        tl.store(after + offs, u)
        tl.store(velocity_after + offs, velocity)
        if ZERO:
            tl.store(grad + offs, tl.zeros_like(u).to(grad.dtype.element_ty))
    return u, nonfinite


@triton.jit
def report_nonfinite(slot, spans, span_count, flags, BLOCK: tl.constexpr):
    """Store the flags of a gradient, and the parameter of an entry that was not finite; its slot starts again."""
    where = tl.load(slot).to(tl.int64)
    parameter = tl.zeros([], tl.int32) - 1
    if where >= 0:
        for i in range(0, span_count, BLOCK):
            number = i + tl.arange(0, BLOCK)
            start = tl.load(spans + number, mask=number < span_count, other=0x7FFFFFFFFFFFFFFF)
            parameter += tl.sum((start <= where).to(tl.int32))
    tl.store(flags, (where >= 0).to(tl.int32))
    tl.store(flags + 1, parameter)
    tl.store(slot, -1)
