"""Messages as Triton kernels: sorted, packed, unpacked and summed on the device, equal bit for bit to what ``wire`` and
``sparse.write_mean`` make of them. Nothing waits for the host.

Entries are sorted without sorting: a bitmap of the gradient is marked, and an entry's place in the message is the
number of bits before its own. Sums go tile by tile of the gradient, in rank order within a tile; messages being sorted,
a tile's entries are neighbours. An index that lies elsewhere, whatever the message says, is never followed: it is left
out, and the exchange has failed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync import sparse, value_range
from sparsync.kernels.checksum.triton import sum_pieces, weighted
from sparsync.kernels.message import header
from sparsync.kernels.partition.triton import place_of

INFINITE = tl.constexpr(0x7F800000)
TOP = tl.constexpr(value_range.HALF)  # fp16's largest number
FAILED = tl.constexpr(sparse.FAILED)
HEADER, WORDS = tl.constexpr(header.HEADER), tl.constexpr(header.LANES)  # words
SUM = tl.constexpr(header.SUM)
SEQUENCE, UNIT, DIGEST = map(tl.constexpr, (header.SEQUENCE, header.UNIT, header.DIGEST))
ENTRIES, FLAGS, WHERE = map(tl.constexpr, (header.ENTRIES, header.FLAGS, header.WHERE))
EXTRA = tl.constexpr(header.EXTRA)
LINE = tl.constexpr(32)  # words of the bitmap that are counted together: one line of the cache
LINES = tl.constexpr(128)  # of these, a program


@triton.jit
def _popcount(word):
    """Return how many bits are set."""
    w = word.to(tl.uint32, bitcast=True)
    w = w - ((w >> 1) & 0x55555555)
    w = (w & 0x33333333) + ((w >> 2) & 0x33333333)
    w = (w + (w >> 4)) & 0x0F0F0F0F
    return ((w * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def bit_at(number):
    """Return a word with this bit alone."""
    return (tl.full([], 1, tl.int64) << number).to(tl.int32)


@triton.jit
def mark(indices, count, bitmap, message, words, programs, BLOCK: tl.constexpr):
    """Set the bit of every entry; on the side, clear the last message."""
    pid = tl.program_id(0)
    entry = pid * BLOCK + tl.arange(0, BLOCK)
    real = entry < tl.load(count)
    index = tl.load(indices + entry, mask=real, other=0)
    tl.atomic_or(bitmap + (index >> 5), bit_at(index & 31), mask=real, sem="relaxed")
    for piece in range(pid, tl.cdiv(words, BLOCK), programs):
        word = piece * BLOCK + tl.arange(0, BLOCK)
        tl.store(message + word, tl.zeros([BLOCK], tl.int32), mask=word < words)


@triton.jit
def unmark(indices, count, bitmap, message, words, checksum, programs, BLOCK: tl.constexpr, PIECE: tl.constexpr):
    """Clear the bitmap again; on the side, ``programs`` of us add up the checksum of the message, which is 0."""
    pid = tl.program_id(0)
    entry = pid * BLOCK + tl.arange(0, BLOCK)
    real = entry < tl.load(count)
    index = tl.load(indices + entry, mask=real, other=0)
    tl.store(bitmap + (index >> 5), tl.zeros([BLOCK], tl.int32), mask=real)
    if pid < programs:
        tl.atomic_add(checksum, sum_pieces(message, words, pid, programs, PIECE), sem="relaxed")


@triton.jit
def count_marks(bitmap, lines, sums):
    """Count the bits that are set before each line, within a program's lines; and in all of them."""
    pid = tl.program_id(0)
    line = pid * LINES + tl.arange(0, LINES)
    word = line[:, None] * LINE + tl.arange(0, LINE)[None, :]
    number = tl.sum(_popcount(tl.load(bitmap + word)), 1)
    tl.store(lines + line, tl.cumsum(number, 0) - number)
    tl.store(sums + pid, tl.sum(number))


@triton.jit
def sum_before(sums, blocks, BLOCK: tl.constexpr):
    """Make sums what lies before them, and return all of them together: one program."""
    before = 0
    for i in range(0, blocks, BLOCK):
        block = i + tl.arange(0, BLOCK)
        number = tl.load(sums + block, mask=block < blocks, other=0)
        tl.store(sums + block, before + tl.cumsum(number, 0) - number, mask=block < blocks)
        before += tl.sum(number)
    return before


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


@triton.jit
def segment_of(index, starts, owners, spans, STEPS: tl.constexpr):
    """Return the number of the segment an index lies in."""
    span = tl.zeros_like(index)
    for i in tl.static_range(STEPS):
        further = span + (1 << (STEPS - 1 - i))
        there = further < spans
        start = tl.load(starts + further, mask=there, other=0)
        span = tl.where(there & (start <= index), further, span)
    return tl.load(owners + span)


@triton.jit
def marks_before(place, real, bitmap, lines, sums):
    """Return how many marks lie before some places of the bitmap."""
    line, own = place >> 10, ((place >> 5) & 31).to(tl.int32)
    lane = tl.arange(0, LINE)
    word = tl.load(bitmap + line[:, None] * LINE + lane[None, :], mask=real[:, None], other=0)
    below = bit_at(place & 31) - 1
    word = tl.where(lane[None, :] == own[:, None], word & below[:, None], word)
    before = tl.sum(tl.where(lane[None, :] <= own[:, None], _popcount(word), 0), 1)
    return tl.load(sums + (place >> 17), mask=real, other=0) + tl.load(lines + line, mask=real, other=0) + before


@triton.jit
def put_entries(
    message, message16, number, index, value, segment, real, high_at, values_at, segments, plane,
    WIDTH: tl.constexpr, CODEC: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Write entries to the places ``number`` of their messages, which begin at ``message``, one for all or each its
    own; ``segment``: of each, where values have a scale, which is written, too (``SCALES``)."""
    if WIDTH < 0:
        tl.store(message + HEADER + number, index.to(tl.int32), mask=real)
    else:
        if WIDTH > 0:
            at = number * WIDTH
            low = (index.to(tl.int64) & ((tl.full([], 1, tl.int64) << WIDTH) - 1)) << (at & 31)
            tl.atomic_or(message + HEADER + (at >> 5), low.to(tl.int32), mask=real, sem="relaxed")
            over = (low >> 32).to(tl.int32)
            tl.atomic_or(message + HEADER + (at >> 5) + 1, over, mask=real & (over != 0), sem="relaxed")
        high = (index >> WIDTH) + number
        tl.atomic_or(message + high_at + (high >> 5), bit_at(high & 31), mask=real, sem="relaxed")
    if CODEC == 0:
        tl.store(message + values_at + number, value.to(tl.int32, bitcast=True), mask=real)
    elif CODEC == 1:
        tl.store(message16 + 2 * values_at + number, value.to(tl.float16).to(tl.int16, bitcast=True), mask=real)
    elif CODEC == 2:  # rounded already: the upper half is all there is
        tl.store(message16 + 2 * values_at + number, (value.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=real)
    else:
        size = tl.abs(value).to(tl.int32, bitcast=True)
        sign, bit = message + values_at + segments + (number >> 5), bit_at(number & 31)
        tl.atomic_or(sign, bit, mask=real & (value < 0), sem="relaxed")
        if SCALES and CODEC == 3:
            tl.store(message + values_at + segment, size, mask=real)
        elif SCALES:  # the largest
            tl.atomic_max(message + values_at + segment, size, mask=real, sem="relaxed")
        if CODEC == 4:  # of which power of 2 a value is tell the last two bits of its exponent
            tl.atomic_or(sign + plane, bit, mask=real & ((size & 0x00800000) != 0), sem="relaxed")
            tl.atomic_or(sign + 2 * plane, bit, mask=real & ((size & 0x01000000) != 0), sem="relaxed")


@triton.jit
def write(
    indices, values, count, bitmap, lines, sums, message, message16, starts, owners, spans, high_at, values_at,
    segments, plane, BLOCK: tl.constexpr, WIDTH: tl.constexpr, CODEC: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write every entry to its place in the message: the number of marked entries before it. ``WIDTH``: of the low bits
    of an Elias-Fano coded index, or -1 for plain integers."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = entry < tl.load(count)
    index = tl.load(indices + entry, mask=real, other=0)
    value = tl.load(values + entry, mask=real, other=0.0)
    number = marks_before(index, real, bitmap, lines, sums).to(tl.int64)
    segment = tl.zeros_like(index)
    if CODEC >= 3:
        segment = segment_of(index, starts, owners, spans, STEPS)
    put_entries(
        message, message16, number, index, value, segment, real, high_at, values_at, segments, plane, WIDTH, CODEC,
        True,
    )  # fmt: skip


@triton.jit
def fail(wrong, failed_exchange, number):
    """Make the exchange whose number stands at ``number`` a failed one where anything is wrong, unless an earlier one
    has failed."""
    if tl.sum(wrong.to(tl.int32)) > 0:
        first_wrong = tl.load(failed_exchange)
        tl.store(failed_exchange, tl.where(first_wrong != 0, first_wrong, tl.load(number)).to(tl.int32))


@triton.jit
def count_ones(rows, stride, at, words, sums, blocks, BLOCK: tl.constexpr):
    """Count the bits that are set in each block of the messages' high words."""
    block, rank = tl.program_id(0), tl.program_id(1).to(tl.int64)  # all rows may be more than 2**31 words
    word = block * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(rows + rank * stride + at + word, mask=word < words, other=0)
    tl.store(sums + rank * blocks + block, tl.sum(_popcount(bits)))


@triton.jit
def expand(
    rows, stride, at, words, sums, blocks, indices, capacity, failed_exchange, number, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Find the indices of Elias-Fano coded messages, in order. Exchange ``number`` fails where these are not as many as
    the header says."""
    block, rank = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = rows + rank * stride
    other = tl.arange(0, BLOCKS)
    before = tl.sum(tl.load(sums + rank * blocks + other, mask=other < block, other=0))
    word = block * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(row + at + word, mask=word < words, other=0)
    ones = _popcount(bits)
    place = before + tl.cumsum(ones, 0) - ones
    last = (block == blocks - 1) & (tl.arange(0, BLOCK) == BLOCK - 1)
    fail(last & (place + ones != tl.load(row + ENTRIES)), failed_exchange, number)
    for bit in range(32):
        mine = ((bits >> bit) & 1) != 0
        mine = mine & (place < capacity)
        index = (word.to(tl.int64) * 32 + bit - place) << WIDTH
        if WIDTH > 0:
            low = place.to(tl.int64) * WIDTH
            spot = row + HEADER + (low >> 5)
            one = tl.load(spot, mask=mine, other=0).to(tl.int64) & 0xFFFFFFFF
            two = tl.load(spot + 1, mask=mine, other=0).to(tl.int64)
            index = index | (((one | (two << 32)) >> (low & 31)) & ((tl.full([], 1, tl.int64) << WIDTH) - 1))
        index = tl.minimum(index, 0x7FFFFFFF)  # of one that is too large, no bit gets lost: it stays too large
        tl.store(indices + rank * capacity + place, index.to(tl.int32), mask=mine)
        place += mine.to(tl.int32)


@triton.jit
def find_tiles(rows, stride, indices, index_stride, failed_exchange, number, begins, tiles, capacity,
           TILE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Find where each tile's entries begin in every message, by bisection. Exchange ``number`` fails where a message
    has more entries than there is room for, or some before the first tile or behind the last."""
    rank = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    said = tl.load(rows + rank * stride + ENTRIES)
    said = tl.where(tl.load(failed_exchange) == 0, said, 0)
    count = tl.minimum(tl.maximum(said, 0), capacity)
    below = tl.zeros([BLOCK], tl.int32)  # how many entries lie before the tile
    for i in tl.static_range(STEPS):
        further = below + (1 << (STEPS - 1 - i))
        there = further <= count
        index = tl.load(indices + rank * index_stride + further - 1, mask=there, other=0)
        below = tl.where(there & (index.to(tl.int64) < tile.to(tl.int64) * TILE), further, below)
    tl.store(begins + rank * (tiles + 1) + tile, below, mask=tile <= tiles)
    outside = ((tile == 0) & (below != 0)) | ((tile == tiles) & (below != said))
    fail(outside, failed_exchange, number)


@triton.jit
def value_of(
    rows, rows16, row, entry, index, real, starts, owners, spans, segments, values_at, plane,
    CODEC: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Return the values of entries of messages that begin at ``row``; ``plane``: words of a bit of every value."""
    if CODEC == 0:
        return tl.load(rows + row + values_at + entry, mask=real, other=0).to(tl.float32, bitcast=True)
    elif CODEC == 1:
        half = tl.load(rows16 + 2 * (row + values_at) + entry, mask=real, other=0)
        return half.to(tl.float16, bitcast=True).to(tl.float32)
    elif CODEC == 2:
        half = tl.load(rows16 + 2 * (row + values_at) + entry, mask=real, other=0).to(tl.int32)
        return (half << 16).to(tl.float32, bitcast=True)
    else:
        segment = segment_of(index, starts, owners, spans, STEPS)
        scale = tl.load(rows + row + values_at + segment, mask=real, other=0)
        bits = rows + row + values_at + segments + (entry >> 5)
        lane = (entry & 31).to(tl.int32)
        if CODEC == 4:
            low = (tl.load(bits + plane, mask=real, other=0) >> lane) & 1
            high = (tl.load(bits + 2 * plane, mask=real, other=0) >> lane) & 1
            scale -= (((scale >> 23) - low - 2 * high) & 3) << 23
        size = scale.to(tl.float32, bitcast=True)
        return tl.where(((tl.load(bits, mask=real, other=0) >> lane) & 1) != 0, -size, size)


@triton.jit
def rounded(mean, out):
    """Return fp32 that ``out`` holds exactly."""
    if out.dtype.element_ty == tl.bfloat16:  # to the nearest, ties to even: the interpreter would cut off
        word = mean.to(tl.int32, bitcast=True)
        word = (word + 0x7FFF + ((word >> 16) & 1)) & -0x10000
        return tl.where((_magnitude(mean) < INFINITE), word.to(tl.float32, bitcast=True), mean)
    elif out.dtype.element_ty == tl.float16:  # a sum that was rounded beyond its range stays finite
        near = tl.where(_magnitude(mean) < INFINITE, tl.minimum(tl.maximum(mean, -TOP), TOP), mean)
        return near.to(tl.float16).to(tl.float32)
    else:
        return mean.to(out.dtype.element_ty).to(tl.float32)


@triton.jit
def _write_mean(own, out, index, base, real, divisor, overflow, CHECK: tl.constexpr):
    """Write the mean of entries that are summed up, and clear their sums: of ranks that share one, the first does."""
    total = tl.atomic_xchg(own + (index - base), tl.zeros_like(index), mask=real, sem="relaxed")
    total = tl.where(real, total, 0).to(tl.float32, bitcast=True)
    mean = rounded(tl.div_rn(total, divisor), out)
    tl.store(out + index, mean.to(out.dtype.element_ty), mask=real & (total != 0.0))
    if CHECK:
        nonfinite = real & (_magnitude(mean) >= INFINITE)
        if tl.sum(nonfinite.to(tl.int32)) > 0:
            tl.store(overflow, 1)


@triton.jit
def _list_sums(own, out, listed, slot, index, base, real):
    """List entries that are summed up, and clear their sums: of ranks that share one, the first does."""
    total = tl.atomic_xchg(own + (index - base), tl.zeros_like(index), mask=real, sem="relaxed")
    tl.store(out + slot, total.to(tl.float32, bitcast=True), mask=real)
    tl.store(listed + slot, index, mask=real)


@triton.jit
def _within(index, base, numel, TILE: tl.constexpr):
    """Return which indices lie within their tile."""
    return (index >= base) & (index < tl.minimum(base + TILE, numel))


@triton.jit
def _add(spot, value, mask):
    """Add to sums, which are kept as the integers their bits make."""
    total = tl.load(spot, mask=mask, other=0).to(tl.float32, bitcast=True) + value
    tl.store(spot, total.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _magnitude(value):
    """Return magnitudes as the integers their bits make."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def sum_tiles(
    rows, rows16, stride, indices, index_stride, begins, scratch, out, overflow, failed_exchange, number, starts,
    owners, spans, segments, tiles, programs, workers, divisor, values_at, plane, numel, listed, room, part,
    TILE: tl.constexpr, LANES: tl.constexpr, RANKS: tl.constexpr, CODEC: tl.constexpr, STEPS: tl.constexpr,
    CHECK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write the mean of all messages into ``out``, which is zero: tile by tile, the ranks one after another.

    With ``PARTS``, they are about what rank ``part`` owns of a gradient; then ``out`` is a list with ``room`` for each
    rank's entries, which gets their sums, and ``listed`` their rows. Of entries that share a sum, one gets it.

    Sums are made in a scratch that is zero again when a tile is done. ``RANKS``: where a tile has few entries, those of
    so many ranks are read at once. Entries that do not lie within their tile are left out, and exchange ``number``
    fails.
    """
    pid = tl.program_id(0)
    own = scratch + pid * TILE
    lane, member = tl.arange(0, LANES), tl.arange(0, RANKS).to(tl.int64)
    astray, many_astray = tl.zeros([RANKS, LANES], tl.int32), tl.zeros([LANES], tl.int32)
    for tile in range(pid, tiles, programs):
        base = tile * TILE
        first = tl.load(begins + member * (tiles + 1) + tile, mask=member < workers, other=0)
        last = tl.load(begins + member * (tiles + 1) + tile + 1, mask=member < workers, other=0)
        if (tl.max(last - first) <= LANES) & (workers <= RANKS):
            entry = first[:, None] + lane[None, :]
            real = entry < last[:, None]
            index = tl.load(indices + member[:, None] * index_stride + entry, mask=real, other=0)
            inside = _within(index, base, numel, TILE)
            astray |= (real & (inside == 0)).to(tl.int32)
            real = real & inside
            value = value_of(rows, rows16, member[:, None] * stride, entry, place_of(index, part, PARTS), real, starts,
                             owners, spans, segments, values_at, plane, CODEC, STEPS)  # fmt: skip
            spot = own + (index - base)
            for rank in range(workers):
                mine = real & (member[:, None] == rank)
                _add(spot, value, mine)
                tl.debug_barrier()
            if PARTS:
                _list_sums(own, out, listed, member[:, None] * room + entry, index, base, real)
            else:
                _write_mean(own, out, index, base, real, divisor, overflow, CHECK)
        else:
            for group in range(0, workers, RANKS):
                ranks = group + member
                first = tl.load(begins + ranks * (tiles + 1) + tile, mask=ranks < workers, other=0)
                last = tl.load(begins + ranks * (tiles + 1) + tile + 1, mask=ranks < workers, other=0)
                if tl.max(last - first) <= LANES:
                    entry = first[:, None] + lane[None, :]
                    real = entry < last[:, None]
                    index = tl.load(indices + ranks[:, None] * index_stride + entry, mask=real, other=0)
                    inside = _within(index, base, numel, TILE)
                    astray |= (real & (inside == 0)).to(tl.int32)
                    real = real & inside
                    value = value_of(rows, rows16, ranks[:, None] * stride, entry, place_of(index, part, PARTS), real,
                                     starts, owners, spans, segments, values_at, plane, CODEC, STEPS)  # fmt: skip
                    spot = own + (index - base)
                    for rank in range(group, tl.minimum(group + RANKS, workers)):
                        mine = real & (ranks[:, None] == rank)
                        _add(spot, value, mine)
                        tl.debug_barrier()
                else:
                    for rank in range(group, tl.minimum(group + RANKS, workers)):
                        row, near = tl.cast(rank, tl.int64) * stride, tl.cast(rank, tl.int64) * index_stride
                        start = tl.load(begins + rank * (tiles + 1) + tile)
                        stop = tl.load(begins + rank * (tiles + 1) + tile + 1)
                        for i in range(start, stop, LANES):
                            entry = i + lane
                            real = entry < stop
                            index = tl.load(indices + near + entry, mask=real, other=0)
                            inside = _within(index, base, numel, TILE)
                            many_astray |= (real & (inside == 0)).to(tl.int32)
                            real = real & inside
                            value = value_of(rows, rows16, row, entry, place_of(index, part, PARTS), real, starts,
                                             owners, spans, segments, values_at, plane, CODEC, STEPS)  # fmt: skip
                            spot = own + (index - base)
                            _add(spot, value, real)
                        tl.debug_barrier()
            for group in range(0, workers, RANKS):
                ranks = group + member
                first = tl.load(begins + ranks * (tiles + 1) + tile, mask=ranks < workers, other=0)
                last = tl.load(begins + ranks * (tiles + 1) + tile + 1, mask=ranks < workers, other=0)
                for i in range(0, tl.max(last - first), LANES):
                    entry = first[:, None] + i + lane[None, :]
                    real = entry < last[:, None]
                    index = tl.load(indices + ranks[:, None] * index_stride + entry, mask=real, other=0)
                    real = real & _within(index, base, numel, TILE)
                    if PARTS:
                        _list_sums(own, out, listed, ranks[:, None] * room + entry, index, base, real)
                    else:
                        _write_mean(own, out, index, base, real, divisor, overflow, CHECK)
        tl.debug_barrier()
    fail(tl.max(astray, 0) | many_astray, failed_exchange, number)


@triton.jit
def gather_mean(
    rows, rows16, stride, indices, index_stride, begins, out, gathered, products, starts, owners, spans, segments,
    tiles, capacity, pieces, values_at, plane, numel, peaks, BLOCK: tl.constexpr, CODEC: tl.constexpr,
    STEPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Gather what was written for the entries of every message, and sum up its products with their values; of fp16 note
    the largest."""
    piece, rank = tl.program_id(0), tl.program_id(1).to(tl.int64)
    entry = piece * BLOCK + tl.arange(0, BLOCK)
    real = entry < tl.load(begins + rank * (tiles + 1) + tiles)
    index = place_of(tl.load(indices + rank * index_stride + entry, mask=real, other=0), rank, PARTS)
    real = real & (index >= 0) & (index < numel)
    value = value_of(rows, rows16, rank * stride, entry, index, real, starts, owners, spans, segments, values_at, plane,
                   CODEC, STEPS)  # fmt: skip
    mean = tl.load(out + index, mask=real, other=0.0).to(tl.float32)
    tl.store(gathered + rank * capacity + entry, mean, mask=real)
    product = tl.where(real, value, 0.0).to(tl.float64) * mean.to(tl.float64)
    tl.store(products + rank * pieces + piece, tl.sum(product))
    if out.dtype.element_ty == tl.float16:
        finite = real & (_magnitude(mean) < INFINITE)
        tl.store(peaks + rank * pieces + piece, tl.max(tl.where(finite, tl.abs(mean), 0.0)))


@triton.jit(do_not_specialize=["scale"])
def find_factor(products, size, workers, norms, parts, scale, factor, peaks, BLOCK: tl.constexpr, HALF: tl.constexpr):
    """Store what gives a mean ``scale`` times the norm of ``norms``; ``scale``, where either norm is 0 or unknown, and
    less where that leaves fp16's range (``HALF``). One program."""
    lane = tl.arange(0, BLOCK)
    squares, wanted = tl.full([BLOCK], 0.0, tl.float64), tl.full([BLOCK], 0.0, tl.float64)
    for i in range(0, size, BLOCK):
        squares += tl.load(products + i + lane, mask=i + lane < size, other=0.0)
    for i in range(0, parts, BLOCK):
        norm = tl.load(norms + i + lane, mask=i + lane < parts, other=0.0).to(tl.float64)
        wanted += norm * norm
    own = tl.sqrt(tl.maximum(tl.sum(squares), 0.0) / workers).to(tl.float32)
    norm = tl.sqrt(tl.sum(wanted)).to(tl.float32)
    known = (own > 0.0) & (norm > 0.0)
    found = tl.where(known, tl.div_rn(norm, tl.where(known, own, 1.0)), 1.0) * scale
    if HALF:
        peak = tl.full([BLOCK], 0.0, tl.float32)
        for i in range(0, size, BLOCK):
            peak = tl.maximum(peak, tl.load(peaks + i + lane, mask=i + lane < size, other=0.0))
        most = tl.max(peak)
        room = tl.div_rn(tl.full([], TOP, tl.float32), tl.where(most > 0.0, most, 1.0))
        found = tl.where(most > 0.0, tl.minimum(found, room), found)
    tl.store(factor, found)


@triton.jit
def multiply_mean(
    indices, index_stride, begins, gathered, factor, out, tiles, capacity, numel,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write what was gathered, multiplied: of ranks that share an entry, all write the same."""
    rank = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = entry < tl.load(begins + rank * (tiles + 1) + tiles)
    index = place_of(tl.load(indices + rank * index_stride + entry, mask=real, other=0), rank, PARTS)
    real = real & (index >= 0) & (index < numel)
    mean = rounded(tl.load(gathered + rank * capacity + entry, mask=real, other=0.0) * tl.load(factor), out)
    tl.store(out + index, mean.to(out.dtype.element_ty), mask=real)
