"""What an exchange comes to, as Triton kernels: headers and results are checked, and acted upon, on the device."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync import sparse
from sparsync.kernels.accumulate.triton import INFINITE
from sparsync.kernels.checksum.triton import sum_pieces
from sparsync.kernels.message.header_triton import ENTRIES, FLAGS, HEADER, SUM, WORDS

FAILED, NONFINITE = tl.constexpr(sparse.FAILED), tl.constexpr(sparse.NONFINITE)
LARGEST = tl.constexpr(3.4028234663852886e38)  # number of fp32


@triton.jit(do_not_specialize=["here"])
def check_messages(
    rows, stride, words, workers, programs, version, number, sums, failed_exchange, nonfinite_step, reports, here,
    further, BLOCK: tl.constexpr, LANES: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Add up the checksums of all messages, ``programs`` of us for each; the last of all to be done looks at the
    headers, and makes the ``number`` of the exchange that of the next. ``sums``: one for each message, then the number
    of programs that are done; all 0 before and after."""
    rank = tl.program_id(1).to(tl.int64)
    total = sum_pieces(rows + rank * stride, words, tl.program_id(0), programs, BLOCK)
    tl.atomic_add(sums + rank, total, sem="relaxed")
    done = tl.atomic_add(sums + workers, tl.full([], 1, tl.int64), sem="acq_rel")
    if done == workers * programs - 1:
        following = tl.load(number) + 1
        tl.store(number, following)
        _check_headers(
            rows, stride, workers, version, following, sums, failed_exchange, nonfinite_step, reports + here, further,
            LANES, AGAIN,
        )  # fmt: skip
        tl.store(sums + workers, tl.full([], 0, tl.int64))


@triton.jit
def _check_headers(
    rows, stride, workers, version, number, sums, failed_exchange, nonfinite_step, report, further,
    LANES: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Check all headers: ``failed_exchange`` becomes, and stays, the number of the first exchange in which headers
    disagree, a rank failed or a message is not what its checksum says; ``nonfinite_step`` becomes 1 where a gradient
    was not finite; ``report`` gets the headers, with what is wrong with their checksums. Those of a further round
    (``AGAIN``) ``further`` gets, and ``report`` only if it is the first that is wrong."""
    wrong, nonfinite = 0, 0
    word = tl.arange(0, WORDS)
    first = tl.load(rows + word, mask=word < HEADER, other=0)
    seen = further if AGAIN else report
    for i in range(0, workers, LANES):
        rank = i + tl.arange(0, LANES)
        there = (rank < workers)[:, None] & (word < HEADER)[None, :]
        header = tl.load(rows + rank[:, None].to(tl.int64) * stride + word[None, :], mask=there, other=0)
        own = tl.atomic_xchg(sums + rank, tl.zeros([LANES], tl.int64), mask=rank < workers, sem="relaxed")
        low, high = own.to(tl.int32), (own >> 32).to(tl.int32)
        header = header ^ tl.where((word == SUM)[None, :], low[:, None], 0)
        header = header ^ tl.where((word == SUM + 1)[None, :], high[:, None], 0)
        tl.store(seen + rank[:, None] * HEADER + word[None, :], header, mask=there)
        differs = there & (word < ENTRIES)[None, :] & (header != first[None, :])
        damaged = there & (word >= SUM)[None, :] & (header != 0)
        flags = tl.where(there & (word == FLAGS)[None, :], header, 0)
        wrong += tl.sum((differs | damaged).to(tl.int32)) + tl.sum(((flags & FAILED) != 0).to(tl.int32))
        nonfinite += tl.sum(((flags & NONFINITE) != 0).to(tl.int32))
    wrong += tl.sum(((word == 0) & (first != version)).to(tl.int32))
    first_wrong = tl.load(failed_exchange)
    if AGAIN & (wrong > 0) & (first_wrong == 0):
        tl.debug_barrier()
        for i in range(0, workers * HEADER, LANES):
            at = i + tl.arange(0, LANES)
            here = at < workers * HEADER
            tl.store(report + at, tl.load(further + at, mask=here, other=0), mask=here)
    tl.store(failed_exchange, tl.where(first_wrong != 0, first_wrong, tl.where(wrong > 0, number, 0)).to(tl.int32))
    tl.store(nonfinite_step, tl.load(nonfinite_step) | (nonfinite > 0).to(tl.int32))


@triton.jit
def check_finite(out, numel, overflow, programs, BLOCK: tl.constexpr):
    """Set ``overflow`` where anything in ``out`` is not finite."""
    pid = tl.program_id(0)
    nonfinite = 0
    for piece in range(pid, tl.cdiv(numel, BLOCK), programs):
        at = piece * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(out + at, mask=at < numel, other=0.0).to(tl.float32)
        nonfinite += tl.sum(((value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= INFINITE).to(tl.int32))
    if nonfinite > 0:
        tl.store(overflow, 1)


@triton.jit
def poison(
    out, numel, starts, spans, failed_exchange, nonfinite_step, programs, BLOCK: tl.constexpr, UNDONE: tl.constexpr
):
    """Clear ``out`` once an exchange has failed; write NaN where a gradient was not finite, for the optimizer to see.

    ``UNDONE``: also where an exchange failed, as what other units of the step brought must not be applied either.
    """
    pid = tl.program_id(0)
    if tl.load(failed_exchange) != 0:
        word = tl.where(tl.load(nonfinite_step) + UNDONE != 0, 0x7FC00000, 0)
        fill = (tl.zeros([BLOCK], tl.int32) + word).to(tl.float32, bitcast=True).to(out.dtype.element_ty)
        for piece in range(pid, tl.cdiv(numel, BLOCK), programs):
            at = piece * BLOCK + tl.arange(0, BLOCK)
            tl.store(out + at, fill, mask=at < numel)
    elif tl.load(nonfinite_step) != 0:
        for piece in range(pid, tl.cdiv(spans, BLOCK), programs):
            span = piece * BLOCK + tl.arange(0, BLOCK)
            at = tl.load(starts + span, mask=span < spans, other=0)
            nan = tl.full([BLOCK], 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
            tl.store(out + at, nan.to(out.dtype.element_ty), mask=span < spans)


@triton.jit
def _not_applied(nonfinite_step, failed_exchange, number):
    """Return whether nothing of exchange ``number`` of this step is applied: where the step's gradient was not finite
    somewhere, or this exchange or one before it failed."""
    first_wrong = tl.load(failed_exchange)
    return (tl.load(nonfinite_step) != 0) | ((first_wrong != 0) & (first_wrong <= number))


@triton.jit(do_not_specialize=["first", "number"])
def put_back(residual, indices, values, first, size, nonfinite_step, failed_exchange, number, BLOCK: tl.constexpr):
    """Add ``size`` of the entries that exchange ``number`` rejected, from ``first`` on, to the residual, unless nothing
    of it is applied; sums saturate."""
    if _not_applied(nonfinite_step, failed_exchange, number) == 0:
        entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(values + first + entry, mask=entry < size, other=0.0)
        real = value != 0.0
        index = tl.load(indices + first + entry, mask=real, other=0)
        total = tl.load(residual + index, mask=real, other=0.0) + value
        tl.store(residual + index, tl.minimum(tl.maximum(total, -LARGEST), LARGEST), mask=real)


@triton.jit(do_not_specialize=["number"])
def restore(residual, indices, values, count, nonfinite_step, failed_exchange, number, BLOCK: tl.constexpr):
    """Return what was sent in exchange ``number`` to the residual if it is not applied."""
    if _not_applied(nonfinite_step, failed_exchange, number):
        entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        real = entry < tl.load(count)
        index = tl.load(indices + entry, mask=real, other=0)
        value = tl.load(values + entry, mask=real, other=0.0)
        tl.store(residual + index, tl.load(residual + index, mask=real, other=0.0) + value, mask=real)


@triton.jit(do_not_specialize=["number"])
def restore_dense(residual, values, numel, nonfinite_step, failed_exchange, number, programs, BLOCK: tl.constexpr):
    """Do the same where everything was sent."""
    if _not_applied(nonfinite_step, failed_exchange, number):
        for piece in range(tl.program_id(0), tl.cdiv(numel, BLOCK), programs):
            at = piece * BLOCK + tl.arange(0, BLOCK)
            inside = at < numel
            value = tl.load(values + at, mask=inside, other=0.0)
            tl.store(residual + at, tl.load(residual + at, mask=inside, other=0.0) + value, mask=inside)
