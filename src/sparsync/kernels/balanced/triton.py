"""A gradient that is summed in parts, as Triton kernels: messages to all owners, made at once; what an owner sends of
its sums; and the result from all owners' messages. Nothing waits for the host.

Messages are made as in ``message/``, on one bitmap: of all owners' rows, one owner after another, or of this
rank's own. Sums come as a list, in any order, zeros between them; as of equal magnitudes the lower row goes first,
which of them go does not depend on the order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.accumulate.round_triton import half_of, scale_of, within_range
from sparsync.kernels.accumulate.triton import INFINITE, bits_of
from sparsync.kernels.checksum.triton import sum_pieces
from sparsync.kernels.message.bitmap_triton import bit_at, marks_before, sum_before
from sparsync.kernels.message.decode_triton import fail, value_of
from sparsync.kernels.message.encode_triton import put_entries, segment_of
from sparsync.kernels.message.header_triton import ENTRIES, SUM, store_header
from sparsync.kernels.message.mean_triton import rounded
from sparsync.kernels.partition.triton import owner_of, place_of
from sparsync.kernels.strips_triton import CHOICE, COUNT
from sparsync.kernels.topk.radix_select_triton import clear_sums, key_of, narrow_range

PEAK, SHARE, TAKE = map(tl.constexpr, range(3))  # actions
LARGEST = tl.constexpr(3.4028234663852886e38)  # number of fp32
LARGEST_BF16 = tl.constexpr(3.3895313892515355e38)


@triton.jit
def _entries(indices, values, count, BLOCK: tl.constexpr):
    """Return a block of entries: indices, values, and which are real; zeros are not."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = entry < tl.load(count)
    index = tl.load(indices + entry, mask=real, other=0).to(tl.int32)
    value = tl.load(values + entry, mask=real, other=0.0)
    return entry, index, value, real & (value != 0.0)


@triton.jit
def _mark_of(index, stride, PARTS: tl.constexpr, SUMS: tl.constexpr):
    """Return the owner of entries, their rows, and their marks' places; of sums (``SUMS``) there is one owner, and
    indices are rows."""
    if SUMS:
        return tl.zeros_like(index), index, index
    else:
        row = index // PARTS
        owner = owner_of(index, row, PARTS)
        return owner, row, owner * stride + row


@triton.jit
def mark(indices, values, count, bitmap, stride, BLOCK: tl.constexpr, PARTS: tl.constexpr, SUMS: tl.constexpr):
    """Set the bit of every entry; ``stride``: bits of an owner."""
    _, index, _, real = _entries(indices, values, count, BLOCK)
    _, _, place = _mark_of(index, stride, PARTS, SUMS)
    tl.atomic_or(bitmap + (place >> 5), bit_at(place & 31), mask=real, sem="relaxed")


@triton.jit(do_not_specialize=["unit", "digest"])
def write_headers(
    sums, blocks, count, flags, where, failed_exchange, messages, words, capacity, version, sequence, unit, digest,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Make an owner's sums what lies before them, and write the header of its message: one program each. ``count``: of
    all that is sent, which it says, too."""
    part = tl.program_id(0)
    entries = tl.minimum(sum_before(sums + part * blocks, blocks, BLOCK), capacity)
    store_header(
        messages + part.to(tl.int64) * words, entries, tl.load(count).to(tl.int32), flags, where, failed_exchange,
        version, sequence, unit, digest, False,
    )  # fmt: skip


@triton.jit
def raise_largest(largest, segment, bits, real):
    """Raise what is the largest of each segment; if all are of one, at once: at one place they would queue."""
    first, last = tl.min(tl.where(real, segment, 0x7FFFFFFF)), tl.max(tl.where(real, segment, -1))
    if first == last:
        tl.atomic_max(largest + first, tl.max(tl.where(real, bits, 0)), sem="relaxed")
    elif last >= 0:
        tl.atomic_max(largest + segment, bits, mask=real, sem="relaxed")


@triton.jit
def add_up(sums, place, number, real):
    """Add numbers up, each in its place; likewise."""
    first, last = tl.min(tl.where(real, place, 0x7FFFFFFF)), tl.max(tl.where(real, place, -1))
    if first == last:
        tl.atomic_add(sums + first, tl.sum(tl.where(real, number, 0)), sem="relaxed")
    elif last >= 0:
        tl.atomic_add(sums + place, number, mask=real, sem="relaxed")


@triton.jit
def write(
    indices, values, count, bitmap, lines, sums, messages, messages16, stay_indices, stay_values, starts, owners, spans,
    words, stride, rank, high_at, values_at, segments, plane, capacity, size, numel,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, CODEC: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """Write every entry to its place in its owner's message. Those for which that has no room stay: of ``size`` entries
    each."""
    entry, index, value, real = _entries(indices, values, count, BLOCK)
    owner, row, place = _mark_of(index, stride, PARTS, SUMS)
    number = marks_before(place, real, bitmap, lines, sums)
    going = real & (number < capacity)
    if SUMS:
        index = place_of(row, rank, PARTS)
    else:
        stays = real & (number >= capacity)
        tl.store(stay_indices + entry, tl.where(stays, index, entry % numel).to(tl.int64), mask=entry < size)
        tl.store(stay_values + entry, tl.where(stays, value, 0.0), mask=entry < size)
    segment = tl.zeros_like(index)
    if CODEC >= 3:
        segment = segment_of(index, starts, owners, spans, STEPS)
    base = owner.to(tl.int64) * words
    put_entries(
        messages + base, messages16 + 2 * base, number.to(tl.int64), row, value, segment, going, high_at, values_at,
        segments, plane, WIDTH, CODEC, not SUMS,
    )  # fmt: skip
    if SUMS and CODEC >= 3:  # a sum that is not finite is larger than the others
        raise_largest(messages + values_at, segment, bits_of(value), going)


@triton.jit
def seal(messages, words, programs, totals, BLOCK: tl.constexpr):
    """Write the checksums of messages, ``programs`` of us for each: the last to be done does. ``totals``: of each
    message the sum, and the number of programs that are done; 0 before and after."""
    part = tl.program_id(1).to(tl.int64)
    message, own = messages + part * words, totals + 2 * part
    tl.atomic_add(own, sum_pieces(message, words, tl.program_id(0), programs, BLOCK), sem="relaxed")
    done = tl.atomic_add(own + 1, tl.full([], 1, tl.int64), sem="acq_rel")
    if done == programs - 1:
        total = tl.atomic_xchg(own, tl.full([], 0, tl.int64), sem="relaxed")
        tl.store(own + 1, tl.full([], 0, tl.int64))
        tl.store(message + SUM, total.to(tl.int32))
        tl.store(message + SUM + 1, (total >> 32).to(tl.int32))


@triton.jit
def set_limit(ranges, digits, rounds, limit, peaks, shares, choice, segments, BLOCK: tl.constexpr):
    """Note the key from which on sums go, and let all that is counted start again: one program."""
    low, _, _, _ = narrow_range(ranges, digits, rounds, 0, 1, True)
    tl.store(limit, low)
    clear_sums(ranges, digits, rounds, 0, 1)
    for i in range(0, segments, BLOCK):
        segment = i + tl.arange(0, BLOCK)
        there = segment < segments
        tl.store(peaks + segment, tl.zeros([BLOCK], tl.int32), mask=there)
        tl.store(shares + segment, tl.zeros([BLOCK], tl.int64), mask=there)
        tl.store(choice + segment * CHOICE + COUNT, tl.zeros([BLOCK], tl.int64), mask=there)


@triton.jit
def _round(u, segment, peaks, shares, choice, CODEC: tl.constexpr):
    """Return sums as the codec's ``round`` makes them, without any limit but the codec's own."""
    if CODEC == 0:
        return u
    elif CODEC == 1:
        return within_range(half_of(u, CODEC), u, True)
    elif CODEC == 2:
        sent = half_of(u, CODEC)
        return tl.where(tl.abs(sent) > LARGEST_BF16, tl.where(u < 0, -LARGEST_BF16, LARGEST_BF16), sent)
    else:
        scale = scale_of(peaks + segment, shares + segment, choice + segment * CHOICE, LARGEST)
        size = tl.abs(u)
        if CODEC == 3:
            level, least = scale, scale / 2
        else:
            level = tl.where(size > 0.75 * scale, scale, scale / 2)
            level = tl.where(size > 1.5 * scale, 2 * scale, level)
            level = tl.where(size > 3.0 * scale, 4 * scale, level)
            least = tl.where(scale < 7.888609052210118e-31, float("inf"), scale / 4)  # 2**-100
        return tl.where(size >= least, tl.where(u < 0, -level, level), 0.0)


@triton.jit
def act_on_sums(
    values, rows, size, limit, index_bits, highest, peaks, shares, choice, left_indices, left_values, starts, owners,
    spans, rank, numel, failed_exchange, number,
    BLOCK: tl.constexpr, ACTION: tl.constexpr, CODEC: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Find the peak of sums that go, segment by segment, and how many these are; or sum up their shares of it; or make
    them what travels, the others 0, and note what is left of all. Exchange ``number`` fails where one lies outside the
    gradient. A sum that is not finite goes as it is, and nothing is left of it."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = entry < size
    u = tl.load(values + entry, mask=there, other=0.0)
    row = tl.load(rows + entry, mask=there & (u != 0.0), other=0)
    bits, place = bits_of(u), place_of(row, rank, PARTS)
    going = (bits > 0) & (key_of(bits, row.to(tl.int64), index_bits, highest) >= tl.load(limit))
    finite = bits < INFINITE
    segment = tl.zeros_like(row)
    if CODEC >= 3:
        segment = segment_of(place, starts, owners, spans, STEPS)
    if ACTION == TAKE:
        sent = tl.where(finite, _round(tl.where(finite, u, 0.0), segment, peaks, shares, choice, CODEC), u)
        sent = tl.where(going, sent, 0.0)
        outside = (bits > 0) & (place >= numel)
        fail(outside, failed_exchange, number)
        at = tl.where((bits > 0) & (place < numel), place, entry % numel)
        tl.store(values + entry, sent, mask=there)
        tl.store(left_indices + entry, at.to(tl.int64), mask=there)
        tl.store(left_values + entry, tl.where(finite & (outside == 0), u - sent, 0.0), mask=there)
    else:
        if ACTION == PEAK:
            raise_largest(peaks, segment, tl.where(finite, bits, 0), going)
            add_up(choice + COUNT, segment * CHOICE, going.to(tl.int64), going)
        else:
            top = tl.load(peaks + segment, mask=going, other=0)
            top = tl.maximum(top, 0x00800000).to(tl.float32, bitcast=True)
            usable = going & finite
            part = (tl.div_rn(tl.where(usable, tl.abs(u), 0.0), top) * 16777216.0).to(tl.int64)
            add_up(shares, segment, part, going)


@triton.jit
def write_mean(
    rows, rows16, stride, indices, index_stride, counts, out, overflow, failed_exchange, number, starts, owners, spans,
    segments, capacity, part_rows, numel, divisor, values_at, plane,
    BLOCK: tl.constexpr, CODEC: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Write the mean from all owners' messages into ``out``, which is zero. Exchange ``number`` fails where a message
    has more entries than there is room for, or some outside the gradient; ``counts``: how many are read of each."""
    owner = tl.program_id(1)
    said = tl.load(rows + owner.to(tl.int64) * stride + ENTRIES)
    said = tl.where(tl.load(failed_exchange) == 0, said, 0)
    count = tl.where((said >= 0) & (said <= capacity), said, 0)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = entry < count
    row = tl.load(indices + owner.to(tl.int64) * index_stride + entry, mask=real, other=0)
    inside = (row >= 0) & (row < part_rows)
    place = place_of(tl.where(inside, row, 0), owner, PARTS)
    inside = inside & (place < numel)
    fail((real & (inside == 0)) | ((entry == 0) & (said != count)), failed_exchange, number)
    real = real & inside
    value = value_of(rows, rows16, owner.to(tl.int64) * stride, entry, place, real, starts, owners, spans, segments,
                     values_at, plane, CODEC, STEPS)  # fmt: skip
    mean = rounded(tl.div_rn(value, divisor + tl.zeros([BLOCK], tl.float32)), out)
    tl.store(out + place, mean.to(out.dtype.element_ty), mask=real)
    if tl.program_id(0) == 0:
        tl.store(counts + owner, count)
    if CHECK:
        nonfinite = real & ((mean.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= INFINITE)
        if tl.sum(nonfinite.to(tl.int32)) > 0:
            tl.store(overflow, 1)
