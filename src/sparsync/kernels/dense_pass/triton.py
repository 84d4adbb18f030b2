"""A gradient that is sent whole, as Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.accumulate.round_triton import within_range

INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def send_dense(
    grad, before, after, velocity_before, velocity_after, out, first, beta, scale, numel, programs,
    BLOCK: tl.constexpr, KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, SCALED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Send all that came and all that was kept: ``out = before + gradient`` (or its velocity), and nothing stays but
    what is out of range: fp16's (``HALF``), or near the end of fp32's. ``first`` becomes the lowest index that is not
    finite; there, everything stays as it was."""
    pid = tl.program_id(0)
    for piece in range(pid, tl.cdiv(numel, BLOCK), programs):
        at = piece * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        u = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            u = u * tl.load(scale)
            if not KEEPS:  # the gradient itself is what is sent
                tl.store(grad + at, u.to(grad.dtype.element_ty), mask=inside)
        kept = u
        if KEEPS:
            kept = tl.load(before + at, mask=inside, other=0.0)
            if MOMENTUM:
                old = tl.load(velocity_before + at, mask=inside, other=0.0)
                u = old * beta + u
            velocity = u
            u = kept + u
        nonfinite = (u.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= INFINITE
        if KEEPS:
            # In this order: on the way to ``out`` threads meet, so all have read ``before``, which ``after`` may be.
            # (Of a half-precision gradient, one thread may read what another clears.)
            u = tl.where(nonfinite, kept, u)
            sent = within_range(u, u, HALF)
            if HALF:
                rest = u - sent
                sent = tl.where((rest + sent == u) & (u - rest == sent), sent, 0.0)
            tl.store(out + at, sent, mask=inside)
            tl.store(after + at, u - sent, mask=inside)
            if MOMENTUM:
                tl.store(velocity_after + at, tl.where(nonfinite, old, velocity), mask=inside)
        lowest = tl.min(tl.where(nonfinite & inside, at, 0x7FFFFFFF))
        if lowest < 0x7FFFFFFF:
            tl.atomic_min(first, lowest, sem="relaxed")


@triton.jit
def report_first(first, starts, spans, words, BLOCK: tl.constexpr):
    """Store the flags of a gradient, and the parameter of the lowest index ``first`` that is not finite, which starts
    again. One program."""
    where = tl.load(first)
    nonfinite = where < 0x7FFFFFFF
    parameter = tl.zeros([], tl.int32) - 1
    if nonfinite:
        for i in range(0, spans, BLOCK):
            span = i + tl.arange(0, BLOCK)
            start = tl.load(starts + span, mask=span < spans, other=0x7FFFFFFFFFFFFFFF)
            parameter += tl.sum((start <= where).to(tl.int32))
    tl.store(words, nonfinite.to(tl.int32))
    tl.store(words + 1, parameter)
    tl.store(first, 0x7FFFFFFF)
