"""The header of a message, as Triton kernels write it; ``header.py`` describes it."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from sparsync import sparse
from sparsync.kernels.checksum.triton import weighted
from sparsync.kernels.message import header
from sparsync.kernels.message.bitmap_triton import sum_before

FAILED = tl.constexpr(sparse.FAILED)
HEADER, WORDS = tl.constexpr(header.HEADER), tl.constexpr(header.LANES)  # words
SUM = tl.constexpr(header.SUM)
SEQUENCE, UNIT, DIGEST = map(tl.constexpr, (header.SEQUENCE, header.UNIT, header.DIGEST))
ENTRIES, FLAGS, WHERE = map(tl.constexpr, (header.ENTRIES, header.FLAGS, header.WHERE))
EXTRA = tl.constexpr(header.EXTRA)


@triton.jit
def store_header(
    message, entries, extra, flags, where, failed_exchange, version, sequence, unit, digest, SEALED: tl.constexpr
):
    """Write a header; ``sequence`` is where the number of the exchange stands. It says so where an exchange has failed
    here before, so that no other rank goes on alone. ``SEALED``: it travels alone."""
    word = tl.arange(0, WORDS)
    header = tl.where(word == 0, version, 0) + tl.where(word == SEQUENCE, tl.load(sequence) & 0x7FFFFFFF, 0)
    header += tl.where(word == UNIT, unit, 0) + tl.where(word == DIGEST, digest, 0)
    header += tl.where(word == ENTRIES, entries, 0) + tl.where(word == EXTRA, extra, 0)
    own = tl.load(flags) | tl.where(tl.load(failed_exchange) != 0, FAILED, 0)
    header += tl.where(word == FLAGS, own, 0) + tl.where(word == WHERE, tl.load(where), 0)
    header = header.to(tl.int32)
    if SEALED:
        total = tl.sum(weighted(header, word))
        header += tl.where(word == SUM, total.to(tl.int32), 0) + tl.where(
            word == SUM + 1, (total >> 32).to(tl.int32), 0
        )
    tl.store(message + word, header, mask=word < HEADER)


@triton.jit(do_not_specialize=["unit", "digest"])
def write_header(
    sums, blocks, count, flags, where, failed_exchange, message, version, sequence, unit, digest, BLOCK: tl.constexpr,
    SEALED: tl.constexpr,
):  # fmt: skip
    """Make sums what lies before them, and write the header: one program."""
    sum_before(sums, blocks, BLOCK)
    entries = tl.load(count).to(tl.int32)
    store_header(
        message, entries, 0, flags, where, failed_exchange, version, sequence, unit, digest, SEALED
    )  # fmt: skip
