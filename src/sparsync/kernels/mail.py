"""Messages as Triton kernels: sorted, packed, unpacked and summed on the device, equal bit for bit to what ``wire`` and
``sparse.write_mean`` make of them. Nothing waits for the host.

Entries are sorted without sorting: a bitmap of the gradient is marked, and an entry's place in the message is the
number of bits before its own. Sums go tile by tile of the gradient, in rank order within a tile; messages being sorted,
a tile's entries are neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITE = tl.constexpr(0x7F800000)
HEADER = tl.constexpr(8)  # words
LINE = tl.constexpr(32)  # words of the bitmap that are counted together: one line of the cache
LINES = tl.constexpr(128)  # of these, a program
FAILED, NONFINITE = tl.constexpr(2), tl.constexpr(1)


@triton.jit
def _popcount(word):
    w = word.to(tl.uint32, bitcast=True)
    w = w - ((w >> 1) & 0x55555555)
    w = (w & 0x33333333) + ((w >> 2) & 0x33333333)
    w = (w + (w >> 4)) & 0x0F0F0F0F
    return ((w * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _bit(number):
    """A word with this bit alone."""
    return (tl.full([], 1, tl.int64) << number).to(tl.int32)


@triton.jit
def mark(places, count, bitmap, message, words, programs, BLOCK: tl.constexpr):
    """Set the bit of every entry; on the side, clear the last message."""
    pid = tl.program_id(0)
    entry = pid * BLOCK + tl.arange(0, BLOCK)
    real = entry < tl.load(count)
    place = tl.load(places + entry, mask=real, other=0)
    tl.atomic_or(bitmap + (place >> 5), _bit(place & 31), mask=real, sem="relaxed")
    for piece in range(pid, tl.cdiv(words, BLOCK), programs):
        word = piece * BLOCK + tl.arange(0, BLOCK)
        tl.store(message + word, tl.zeros([BLOCK], tl.int32), mask=word < words)


@triton.jit
def unmark(places, count, bitmap, BLOCK: tl.constexpr):
    """Clear the bitmap again."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = entry < tl.load(count)
    place = tl.load(places + entry, mask=real, other=0)
    tl.store(bitmap + (place >> 5), tl.zeros([BLOCK], tl.int32), mask=real)


@triton.jit
def tally(bitmap, lines, sums):
    """How many bits are set before each line, within a program's lines; and in all of them."""
    pid = tl.program_id(0)
    line = pid * LINES + tl.arange(0, LINES)
    word = line[:, None] * LINE + tl.arange(0, LINE)[None, :]
    number = tl.sum(_popcount(tl.load(bitmap + word)), 1)
    tl.store(lines + line, tl.cumsum(number, 0) - number)
    tl.store(sums + pid, tl.sum(number))


@triton.jit(do_not_specialize=["sequence", "unit", "digest"])
def head(sums, blocks, count, flags, where, message, version, sequence, unit, digest, BLOCK: tl.constexpr):
    """Sums become what lies before them; and the header is written. One program."""
    before = 0
    for i in range(0, blocks, BLOCK):
        block = i + tl.arange(0, BLOCK)
        number = tl.load(sums + block, mask=block < blocks, other=0)
        tl.store(sums + block, before + tl.cumsum(number, 0) - number, mask=block < blocks)
        before += tl.sum(number)
    tl.store(message, version)
    tl.store(message + 1, sequence)
    tl.store(message + 2, unit)
    tl.store(message + 3, digest)
    tl.store(message + 4, tl.load(count).to(tl.int32))
    tl.store(message + 5, tl.load(flags))
    tl.store(message + 6, tl.load(where))


@triton.jit
def _segment(place, starts, owners, spans, STEPS: tl.constexpr):
    """The number of the segment an index lies in."""
    span = tl.zeros_like(place)
    for i in tl.static_range(STEPS):
        further = span + (1 << (STEPS - 1 - i))
        there = further < spans
        start = tl.load(starts + further, mask=there, other=0)
        span = tl.where(there & (start <= place), further, span)
    return tl.load(owners + span)


@triton.jit
def write(
    places, values, count, bitmap, lines, sums, message, message16, starts, owners, spans, high_at, values_at, segments,
    plane, BLOCK: tl.constexpr, WIDTH: tl.constexpr, CODEC: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Every entry to its place in the message: the number of marked entries before it. ``WIDTH``: of the low bits of an
    Elias-Fano coded index, or -1 for plain integers."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = entry < tl.load(count)
    place = tl.load(places + entry, mask=real, other=0)
    value = tl.load(values + entry, mask=real, other=0.0)
    line, own = place >> 10, ((place >> 5) & 31).to(tl.int32)
    lane = tl.arange(0, LINE)
    word = tl.load(bitmap + line[:, None] * LINE + lane[None, :], mask=real[:, None], other=0)
    below = _bit(place & 31) - 1
    word = tl.where(lane[None, :] == own[:, None], word & below[:, None], word)
    before = tl.sum(tl.where(lane[None, :] <= own[:, None], _popcount(word), 0), 1)
    number = (
        tl.load(sums + (place >> 17), mask=real, other=0) + tl.load(lines + line, mask=real, other=0) + before
    ).to(tl.int64)
    if WIDTH < 0:
        tl.store(message + HEADER + number, place.to(tl.int32), mask=real)
    else:
        if WIDTH > 0:
            at = number * WIDTH
            low = (place & ((tl.full([], 1, tl.int64) << WIDTH) - 1)) << (at & 31)
            tl.atomic_or(message + HEADER + (at >> 5), low.to(tl.int32), mask=real, sem="relaxed")
            over = (low >> 32).to(tl.int32)
            tl.atomic_or(message + HEADER + (at >> 5) + 1, over, mask=real & (over != 0), sem="relaxed")
        high = (place >> WIDTH) + number
        tl.atomic_or(message + high_at + (high >> 5), _bit(high & 31), mask=real, sem="relaxed")
    if CODEC == 0:
        tl.store(message + values_at + number, value.to(tl.int32, bitcast=True), mask=real)
    elif CODEC == 1:
        tl.store(message16 + 2 * values_at + number, value.to(tl.float16).to(tl.int16, bitcast=True), mask=real)
    elif CODEC == 2:  # rounded already: the upper half is all there is
        tl.store(message16 + 2 * values_at + number, (value.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=real)
    else:
        segment, size = _segment(place, starts, owners, spans, STEPS), tl.abs(value).to(tl.int32, bitcast=True)
        sign, bit = message + values_at + segments + (number >> 5), _bit(number & 31)
        tl.atomic_or(sign, bit, mask=real & (value < 0), sem="relaxed")
        if CODEC == 3:
            tl.store(message + values_at + segment, size, mask=real)
        else:  # the largest is the scale, and of which power of 2 a value is tell the last two bits of its exponent
            tl.atomic_max(message + values_at + segment, size, mask=real, sem="relaxed")
            tl.atomic_or(sign + plane, bit, mask=real & ((size & 0x00800000) != 0), sem="relaxed")
            tl.atomic_or(sign + 2 * plane, bit, mask=real & ((size & 0x01000000) != 0), sem="relaxed")


@triton.jit(do_not_specialize=["number", "here"])
def check_headers(rows, stride, workers, version, number, verdict, bad, news, here, LANES: tl.constexpr):
    """Look at all headers of exchange ``number``: ``verdict`` becomes, and stays, the number of the first exchange in
    which they disagree or a rank failed; ``bad`` becomes 1 where a gradient was not finite; ``news`` gets a copy of
    them, from ``here`` on. One program."""
    wrong, odd = 0, 0
    word = tl.arange(0, HEADER)
    first = tl.load(rows + word)
    for i in range(0, workers, LANES):
        rank = i + tl.arange(0, LANES)
        there = (rank < workers)[:, None]
        header = tl.load(rows + rank[:, None] * stride + word[None, :], mask=there, other=0)
        tl.store(news + here + rank[:, None] * HEADER + word[None, :], header, mask=there)
        differs = there & (word < 4)[None, :] & (header != first[None, :])
        flags = tl.where(there & (word == 5)[None, :], header, 0)
        wrong += tl.sum(differs.to(tl.int32)) + tl.sum(((flags & FAILED) != 0).to(tl.int32))
        odd += tl.sum(((flags & NONFINITE) != 0).to(tl.int32))
    wrong += tl.sum(((word == 0) & (first != version)).to(tl.int32))
    first_wrong = tl.load(verdict)
    tl.store(verdict, tl.where(first_wrong != 0, first_wrong, tl.where(wrong > 0, number, 0)).to(tl.int32))
    tl.store(bad, tl.load(bad) | (odd > 0).to(tl.int32))


@triton.jit
def ones(rows, stride, at, words, sums, blocks, BLOCK: tl.constexpr):
    """How many bits are set in each block of the messages' high words."""
    block, rank = tl.program_id(0), tl.program_id(1).to(tl.int64)  # all rows may be more than 2**31 words
    word = block * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(rows + rank * stride + at + word, mask=word < words, other=0)
    tl.store(sums + rank * blocks + block, tl.sum(_popcount(bits)))


@triton.jit
def expand(
    rows, stride, at, words, sums, blocks, places, capacity, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The indices of Elias-Fano coded messages, in order."""
    block, rank = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = rows + rank * stride
    other = tl.arange(0, BLOCKS)
    before = tl.sum(tl.load(sums + rank * blocks + other, mask=other < block, other=0))
    word = block * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(row + at + word, mask=word < words, other=0)
    number = _popcount(bits)
    number = before + tl.cumsum(number, 0) - number
    for bit in range(32):
        mine = ((bits >> bit) & 1) != 0
        mine = mine & (number < capacity)
        place = (word.to(tl.int64) * 32 + bit - number) << WIDTH
        if WIDTH > 0:
            low = number.to(tl.int64) * WIDTH
            spot = row + HEADER + (low >> 5)
            one = tl.load(spot, mask=mine, other=0).to(tl.int64) & 0xFFFFFFFF
            two = tl.load(spot + 1, mask=mine, other=0).to(tl.int64)
            place = place | (((one | (two << 32)) >> (low & 31)) & ((tl.full([], 1, tl.int64) << WIDTH) - 1))
        tl.store(places + rank * capacity + number, place.to(tl.int32), mask=mine)
        number += mine.to(tl.int32)


@triton.jit
def divide(rows, stride, places, place_stride, verdict, begins, tiles, capacity, TILE: tl.constexpr,
           STEPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Where each tile's entries begin in every message, by bisection."""
    rank = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.minimum(tl.maximum(tl.load(rows + rank * stride + 4), 0), capacity)
    count = tl.where(tl.load(verdict) == 0, count, 0)
    below = tl.zeros([BLOCK], tl.int32)  # how many entries lie before the tile
    for i in tl.static_range(STEPS):
        further = below + (1 << (STEPS - 1 - i))
        there = further <= count
        place = tl.load(places + rank * place_stride + further - 1, mask=there, other=0)
        below = tl.where(there & (place.to(tl.int64) < tile.to(tl.int64) * TILE), further, below)
    tl.store(begins + rank * (tiles + 1) + tile, below, mask=tile <= tiles)


@triton.jit
def _value(
    rows, rows16, row, entry, place, real, starts, owners, spans, segments, values_at, plane,
    CODEC: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The values of entries of messages that begin at ``row``; ``plane``: words of a bit of every value."""
    if CODEC == 0:
        return tl.load(rows + row + values_at + entry, mask=real, other=0).to(tl.float32, bitcast=True)
    elif CODEC == 1:
        half = tl.load(rows16 + 2 * (row + values_at) + entry, mask=real, other=0)
        return half.to(tl.float16, bitcast=True).to(tl.float32)
    elif CODEC == 2:
        half = tl.load(rows16 + 2 * (row + values_at) + entry, mask=real, other=0).to(tl.int32)
        return (half << 16).to(tl.float32, bitcast=True)
    else:
        segment = _segment(place, starts, owners, spans, STEPS)
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
def _take(own, out, place, base, real, divisor, overflow, CHECK: tl.constexpr):
    """Write the mean of entries that are summed up, and clear their sums: of ranks that share one, the first does."""
    total = tl.atomic_xchg(own + (place - base), tl.zeros_like(place), mask=real, sem="relaxed")
    total = tl.where(real, total, 0).to(tl.float32, bitcast=True)
    mean = tl.div_rn(total, divisor)
    if out.dtype.element_ty == tl.bfloat16:  # to the nearest, ties to even: the interpreter would cut off
        word = mean.to(tl.int32, bitcast=True)
        word = (word + 0x7FFF + ((word >> 16) & 1)) & -0x10000
        mean = tl.where((_magnitude(total) < INFINITE), word.to(tl.float32, bitcast=True), mean)
    else:
        mean = mean.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + place, mean.to(out.dtype.element_ty), mask=real & (total != 0.0))
    if CHECK:
        odd = real & (_magnitude(mean) >= INFINITE)
        if tl.sum(odd.to(tl.int32)) > 0:
            tl.store(overflow, 1)


@triton.jit
def _add(spot, value, mask):
    """Add to sums, which are kept as the integers their bits make."""
    total = tl.load(spot, mask=mask, other=0).to(tl.float32, bitcast=True) + value
    tl.store(spot, total.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _magnitude(value):
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def settle(
    rows, rows16, stride, places, place_stride, begins, scratch, out, overflow, starts, owners, spans, segments, tiles,
    programs, workers, divisor, values_at, plane,
    TILE: tl.constexpr, LANES: tl.constexpr, RANKS: tl.constexpr, CODEC: tl.constexpr, STEPS: tl.constexpr,
    CHECK: tl.constexpr,
):  # fmt: skip
    """The mean of all messages, written into ``out``, which is zero: tile by tile, the ranks one after another.

    Sums are made in a scratch that is zero again when a tile is done. ``RANKS``: where a tile has few entries, those of
    all ranks are read at once.
    """
    pid = tl.program_id(0)
    own = scratch + pid * TILE
    lane, member = tl.arange(0, LANES), tl.arange(0, RANKS).to(tl.int64)
    for tile in range(pid, tiles, programs):
        base = tile * TILE
        first = tl.load(begins + member * (tiles + 1) + tile, mask=member < workers, other=0)
        last = tl.load(begins + member * (tiles + 1) + tile + 1, mask=member < workers, other=0)
        if (tl.max(last - first) <= LANES) & (workers <= RANKS):
            entry = first[:, None] + lane[None, :]
            real = entry < last[:, None]
            place = tl.load(places + member[:, None] * place_stride + entry, mask=real, other=0)
            value = _value(rows, rows16, member[:, None] * stride, entry, place, real, starts, owners, spans, segments,
                           values_at, plane, CODEC, STEPS)  # fmt: skip
            spot = own + (place - base)
            for rank in range(workers):
                mine = real & (member[:, None] == rank)
                _add(spot, value, mine)
                tl.debug_barrier()
            _take(own, out, place, base, real, divisor, overflow, CHECK)
        else:
            for rank in range(workers):
                row, near = tl.cast(rank, tl.int64) * stride, tl.cast(rank, tl.int64) * place_stride
                start = tl.load(begins + rank * (tiles + 1) + tile)
                stop = tl.load(begins + rank * (tiles + 1) + tile + 1)
                for i in range(start, stop, LANES):
                    entry = i + lane
                    real = entry < stop
                    place = tl.load(places + near + entry, mask=real, other=0)
                    value = _value(rows, rows16, row, entry, place, real, starts, owners, spans, segments, values_at,
                                   plane, CODEC, STEPS)  # fmt: skip
                    spot = own + (place - base)
                    _add(spot, value, real)
                tl.debug_barrier()
            for rank in range(workers):
                near = tl.cast(rank, tl.int64) * place_stride
                start = tl.load(begins + rank * (tiles + 1) + tile)
                stop = tl.load(begins + rank * (tiles + 1) + tile + 1)
                for i in range(start, stop, LANES):
                    real = i + lane < stop
                    place = tl.load(places + near + i + lane, mask=real, other=0)
                    _take(own, out, place, base, real, divisor, overflow, CHECK)
        tl.debug_barrier()


@triton.jit
def check_finite(out, numel, overflow, programs, BLOCK: tl.constexpr):
    """Whether anything in ``out`` is not finite."""
    pid = tl.program_id(0)
    odd = 0
    for piece in range(pid, tl.cdiv(numel, BLOCK), programs):
        at = piece * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(out + at, mask=at < numel, other=0.0).to(tl.float32)
        odd += tl.sum(((value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= INFINITE).to(tl.int32))
    if odd > 0:
        tl.store(overflow, 1)


@triton.jit
def poison(out, numel, starts, spans, verdict, bad, programs, BLOCK: tl.constexpr, UNDONE: tl.constexpr):
    """Once an exchange has failed nothing is applied; where a gradient was not finite, the optimizer shall see it.
    ``UNDONE``: also where an exchange failed, as what other units of the step brought must not be applied either."""
    pid = tl.program_id(0)
    if tl.load(verdict) != 0:
        word = tl.where(tl.load(bad) + UNDONE != 0, 0x7FC00000, 0)
        fill = (tl.zeros([BLOCK], tl.int32) + word).to(tl.float32, bitcast=True).to(out.dtype.element_ty)
        for piece in range(pid, tl.cdiv(numel, BLOCK), programs):
            at = piece * BLOCK + tl.arange(0, BLOCK)
            tl.store(out + at, fill, mask=at < numel)
    elif tl.load(bad) != 0:
        for piece in range(pid, tl.cdiv(spans, BLOCK), programs):
            span = piece * BLOCK + tl.arange(0, BLOCK)
            at = tl.load(starts + span, mask=span < spans, other=0)
            nan = tl.full([BLOCK], 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
            tl.store(out + at, nan.to(out.dtype.element_ty), mask=span < spans)


@triton.jit
def _in_vain(bad, verdict, number):
    """Whether nothing of exchange ``number`` of this step is applied: where the step's gradient was not finite
    somewhere, or this exchange or one before it failed."""
    first_wrong = tl.load(verdict)
    return (tl.load(bad) != 0) | ((first_wrong != 0) & (first_wrong <= number))


@triton.jit(do_not_specialize=["number"])
def home_whole(residual, values, numel, bad, verdict, number, programs, BLOCK: tl.constexpr):
    """The same where everything was sent."""
    if _in_vain(bad, verdict, number):
        for piece in range(tl.program_id(0), tl.cdiv(numel, BLOCK), programs):
            at = piece * BLOCK + tl.arange(0, BLOCK)
            inside = at < numel
            value = tl.load(values + at, mask=inside, other=0.0)
            tl.store(residual + at, tl.load(residual + at, mask=inside, other=0.0) + value, mask=inside)


@triton.jit(do_not_specialize=["number"])
def home(residual, places, values, count, bad, verdict, number, BLOCK: tl.constexpr):
    """What was sent in exchange ``number`` goes back if that was in vain."""
    if _in_vain(bad, verdict, number):
        entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        real = entry < tl.load(count)
        place = tl.load(places + entry, mask=real, other=0)
        value = tl.load(values + entry, mask=real, other=0.0)
        tl.store(residual + place, tl.load(residual + place, mask=real, other=0.0) + value, mask=real)


@triton.jit
def whole(
    grad, before, after, speed_before, speed_after, out, first, beta, scale, numel, programs,
    BLOCK: tl.constexpr, KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """All that came and all that was kept is sent: ``out = before + gradient`` (or its velocity), and nothing stays.
    ``first`` becomes the lowest index that is not finite; there, everything stays as it was."""
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
                old = tl.load(speed_before + at, mask=inside, other=0.0)
                u = old * beta + u
            speed = u
            u = kept + u
        odd = (u.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= INFINITE
        if KEEPS:
            # In this order: on the way to ``out`` threads meet, so all have read ``before``, which ``after`` may be.
            # (Of a half-precision gradient, one thread may read what another clears.)
            tl.store(out + at, tl.where(odd, kept, u), mask=inside)
            tl.store(after + at, tl.zeros_like(u), mask=inside)
            if MOMENTUM:
                tl.store(speed_after + at, tl.where(odd, old, speed), mask=inside)
        lowest = tl.min(tl.where(odd & inside, at, 0x7FFFFFFF))
        if lowest < 0x7FFFFFFF:
            tl.atomic_min(first, lowest, sem="relaxed")


@triton.jit
def flag(first, starts, spans, words, BLOCK: tl.constexpr):
    """Flags, and the number of the parameter, of a gradient whose lowest index that is not finite is ``first``, which
    starts again. One program."""
    where = tl.load(first)
    odd = where < 0x7FFFFFFF
    parameter = tl.zeros([], tl.int32) - 1
    if odd:
        for i in range(0, spans, BLOCK):
            span = i + tl.arange(0, BLOCK)
            start = tl.load(starts + span, mask=span < spans, other=0x7FFFFFFFFFFFFFFF)
            parameter += tl.sum((start <= where).to(tl.int32))
    tl.store(words, odd.to(tl.int32))
    tl.store(words + 1, parameter)
    tl.store(first, 0x7FFFFFFF)
