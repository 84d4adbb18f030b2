"""Read messages by loops that numba compiles; ``wire/host.py`` calls them.

Whatever a message holds, nothing outside the arrays is touched: a loop that meets what it does not expect gives up, and
the specification, ``wire/message.py``, decides what becomes of it.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import numpy as np
from numba import njit

from sparsync.kernels import codecs
from sparsync.kernels.cpu import compiled
from sparsync.kernels.message import header
from sparsync.value_range import HALF

TILE = 1 << 15  # entries of the gradient that are summed at a time: they stay in a core's cache
WHOLE = 1 << 17  # the same where they are summed in their place
FEW = TILE // 8  # entries of a tile up to which only these are divided
WORDS, ENTRIES = 10, 4  # of a header: its length, and where the number of entries stands
FP32, FP16, BF16, SIGN, LEVELS = range(5)
ONE, FIRST, FIVE, WITHIN = np.uint64(1), np.uint64(WORDS), np.uint64(5), np.uint64(31)  # places in words of 32 bits
TOP = np.float32(65504)  # fp16's largest number
LARGEST = np.float32(3.4028234663852886e38)
# Which bit of a word is set, if it is one alone, by the highest five bits of its product with 0x077CB531.
BIT = np.array([0, 1, 28, 2, 29, 14, 24, 3, 30, 22, 20, 15, 25, 17, 4, 8, 31, 27, 13, 23, 21, 19, 16, 7, 26, 12, 18, 6,
                11, 5, 10, 9])  # fmt: skip
assert (WORDS, ENTRIES) == (header.HEADER, header.ENTRIES)
assert codecs.CODEC_NUMBERS == {"fp32": FP32, "fp16": FP16, "bf16": BF16, "sign": SIGN, "levels": LEVELS}
assert TOP == HALF


@njit(error_model="numpy")
def _lowest(word):
    """Return the number of the lowest bit that is set."""
    return BIT[np.uint32((word & (~word + np.uint32(1))) * np.uint32(0x077CB531)) >> np.uint32(27)]


@njit(error_model="numpy")
def _low_bits(row, entry, width):
    """Return the low bits of an Elias-Fano coded index."""
    at = entry * width
    word = WORDS + (at >> 5)
    pair = np.uint64(row[word]) | np.uint64(row[word + 1]) << np.uint64(32)
    return np.int64(pair >> np.uint64(at & 31) & ((np.uint64(1) << np.uint64(width)) - np.uint64(1)))


@njit(error_model="numpy")
def _from_half(half):
    """Return an fp16 number, given as its bits."""
    size = np.uint32(half & np.uint32(0x7FFF)) << np.uint32(13)
    if size >= np.uint32(0x0F800000):  # infinite, or NaN
        return np.uint32(size | np.uint32(0x7F800000) | (half & np.uint32(0x8000)) << np.uint32(16)).view(np.float32)
    if size < np.uint32(0x00800000):  # denormal: without such numbers in fp32, which a processor may take for 0
        value = np.float32(half & np.uint32(0x3FF)) * np.float32(2.0**-24)
    else:
        value = np.uint32(size + np.uint32(0x38000000)).view(np.float32)
    return -value if half & np.uint32(0x8000) else value


@njit(error_model="numpy")
def _to_half(value):
    """Return the bits of the nearest fp16 number, ties to even; what is finite stays so."""
    if abs(value) <= LARGEST:
        value = min(max(value, -TOP), TOP)
    word = np.float32(value).view(np.uint32)
    sign, size = (word >> np.uint32(16)) & np.uint32(0x8000), word & np.uint32(0x7FFFFFFF)
    if size >= np.uint32(0x7F800000):
        half = np.uint32(0x7C00) if size == np.uint32(0x7F800000) else np.uint32(0x7E00)
    elif size < np.uint32(0x38800000):  # denormal: in a sum with 0.5 the last bit is 2**-24
        half = np.float32(abs(value) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000)
    else:
        half = size + np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1))
        half = (half >> np.uint32(13)) - np.uint32(0x1C000)
    return np.uint16(sign | half)


@njit(error_model="numpy")
def _to_bf16(value):
    """Return the bits of the nearest bf16 number, ties to even."""
    word = np.float32(value).view(np.uint32)
    if word & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):
        return np.uint16(0x7FC0)
    return np.uint16(word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1)) >> np.uint32(16))


@njit(error_model="numpy")
def _signed(row, entry, scale, signs_at, plane, codec):
    """Return the value of an entry with a scale, of which the bits are given."""
    at, lane = signs_at + (entry >> 5), np.uint32(entry & 31)
    word = scale
    if codec == LEVELS:
        low, high = row[at + plane] >> lane & np.uint32(1), row[at + 2 * plane] >> lane & np.uint32(1)
        code = np.int32(low) + np.int32(2) * np.int32(high)
        word = np.int32(word - ((((word >> np.int32(23)) - code) & np.int32(3)) << np.int32(23)))
    return np.uint32(np.uint32(word) | (row[at] >> lane & np.uint32(1)) << np.uint32(31)).view(np.float32)


@njit(error_model="numpy")
def _span_of(index, starts, span):
    """Return the number of the last span that starts at ``index`` or before it, -1 if none does; ``span``: a guess."""
    last = starts.shape[0] - 1
    if starts[span] <= index and (span == last or index < starts[span + 1]):
        return span
    return np.searchsorted(starts, index, side="right") - 1


@compiled("boolean(uint32[:, ::1], int64, int64, int64, int64[:, ::1])")
def unpack_indices(rows, width, high_at, high_words, indices):
    """Fill ``indices`` from Elias-Fano coded ones, 0 where nothing is real; whether there are as many as are said."""
    for r in range(rows.shape[0]):
        row, own = rows[r], indices[r]
        count, entry, low_bits = np.int64(row[ENTRIES]), np.uint64(0), np.uint64(width)
        if count > own.shape[0]:
            return False
        end, mask = np.uint64(count), (ONE << low_bits) - ONE
        for word in range(high_words):
            left, first = row[high_at + word], np.uint64(32 * word)
            while left and entry < end:
                own[entry] = (first + np.uint64(_lowest(left)) - entry) << low_bits
                left &= left - np.uint32(1)
                entry += ONE
        if entry < end:
            return False
        for i in range(count if width > 0 else 0):
            at = np.uint64(i) * low_bits
            low = FIRST + (at >> FIVE)
            pair = np.uint64(row[low]) | np.uint64(row[low + ONE]) << np.uint64(32)
            own[i] |= np.int64(pair >> (at & WITHIN) & mask)
        own[count:] = 0
    return True


@compiled("void(uint32[:, ::1], int64[:, ::1], int64, int64, int64, int64, float32[:, ::1])")
def unpack_signs(rows, segments, values_at, codec, parts, plane, values):
    """Fill ``values``, 0 where nothing is real; ``segments``: of every entry, if there are several ``parts``."""
    for r in range(rows.shape[0]):
        row, own = rows[r], values[r]
        count = min(np.int64(row[ENTRIES]), own.shape[0])
        alike = parts == 1 and codec == SIGN
        for word in range((count + 31) // 32 if alike else 0):
            bits = row[values_at + 1 + word]
            for lane in range(min(32, count - 32 * word)):
                sign = bits >> np.uint32(lane) << np.uint32(31)
                own[32 * word + lane] = np.uint32(row[values_at] | sign).view(np.float32)
        for i in range(0 if alike else count):
            scale = np.int32(row[values_at + (segments[r, i] if parts > 1 else 0)])
            own[i] = _signed(row, i, scale, values_at + parts, plane, codec)
        own[count:] = 0


@njit(error_model="numpy")
def _write_tile(sums, divisor, touched, everywhere, out):
    """Write the mean of a tile and clear its sums; return how many are not finite. ``touched``: where there are sums,
    unless they are ``everywhere``."""
    wrong = 0
    if everywhere:
        for i in range(out.shape[0]):
            mean = sums[i] / divisor
            out[i] = mean
            sums[i] = 0
            wrong += int(not abs(mean) <= LARGEST)
        return wrong
    out[:] = 0
    for place in touched:
        if sums[place] != 0:  # otherwise it is 0, or was written when the place came before
            mean = sums[place] / divisor
            out[place] = mean
            sums[place] = 0
            wrong += int(not abs(mean) <= LARGEST)
    return wrong


@njit(error_model="numpy")
def _write_halves(sums, divisor, touched, everywhere, out, kind):
    """Do the same in half precision, of which the bits are written."""
    wrong = 0
    infinite = np.uint16(0x7C00) if kind == FP16 else np.uint16(0x7F80)
    out[:] = 0
    for i in range(out.shape[0] if everywhere else touched.shape[0]):
        place = i if everywhere else touched[i]
        if sums[place] != 0:
            mean = sums[place] / divisor
            bits = _to_half(mean) if kind == FP16 else _to_bf16(mean)
            out[place] = bits
            sums[place] = 0
            wrong += int(bits & infinite == infinite)
    return wrong


@njit(error_model="numpy")
def _add_signs(row, reader, base, sums, touched, number, scale, width, high_at, high_words, values_at):
    """Add the entries of one message that lie in a tile, if they are signs of one segment with Elias-Fano coded
    indices: what ``_add_entries`` does, with nothing to be asked at every entry. Returns how many the tile has now, or
    -1; ``scale``: the bits of all magnitudes; where ``touched`` has no room, places are not noted."""
    # Unsigned numbers throughout: of others every access would ask whether they are negative.
    begun, base, width, high_at = np.uint64(reader[0]), np.uint64(base), np.uint64(width), np.uint64(high_at)
    count, entry, word, left = np.uint64(row[ENTRIES]), begun, np.uint64(reader[1]), np.uint32(reader[2])
    last, signs_at, size = np.uint64(high_words - 1), np.uint64(values_at + 1), np.uint64(sums.shape[0])
    mask, place, noted = (ONE << width) - ONE, np.uint64(0), touched.shape[0] > 0
    at = entry * width
    while entry < count:
        while left == 0:
            if word == last:
                return -1
            word += ONE  # of the word before the first, 0
            left = row[high_at + word]
        low = FIRST + (at >> FIVE)
        pair = np.uint64(row[low]) | np.uint64(row[low + ONE]) << np.uint64(32)
        high = (word << FIVE) + np.uint64(_lowest(left)) - entry
        place = (high << width) + (pair >> (at & WITHIN) & mask) - base
        if place >= size:  # or before the tile: then it is huge
            break
        sign = row[signs_at + (entry >> FIVE)] >> np.uint32(entry & WITHIN) << np.uint32(31)
        sums[place] += np.uint32(scale | sign).view(np.float32)
        if noted:
            touched[min(number + np.int64(entry - begun), FEW)] = place
        left &= left - np.uint32(1)
        entry += ONE
        at += width
    if entry < count and place >> np.uint64(63):
        return -1
    reader[0], reader[1], reader[2] = entry, word, left
    return number + np.int64(entry - begun)


@njit(error_model="numpy")
def _divides_exactly(rows, values_at, divisor):
    """Return whether signs may be divided before they are added, to the same bits: by a power of 2, and so that neither
    they nor their sums ever leave the range of normal numbers. A scale is 0, or from 2**-60 to below 2**61."""
    exact = divisor & (divisor - 1) == 0 and divisor <= 1 << 20
    for r in range(rows.shape[0]):
        size = rows[r, values_at] & np.uint32(0x7FFFFFFF)
        exact = exact and (size == 0 or 67 <= size >> np.uint32(23) <= 187)
    return exact


@njit(error_model="numpy")
def _add_entries(
    row, single, reader, base, sums, touched, number, width, high_at, high_words, values_at, codec, segments, plane,
    starts, owners,
):  # fmt: skip
    """Add the entries of one message that lie in a tile, which starts at ``base``, to its ``sums``, and note where.

    Args:
        reader: where the message is read next: its entry; the word of the high parts and what is left of it; the
            entry's span.
        number: of entries that the tile has had from other messages.

    Returns:
        how many it has now, or -1: the message is not as expected.
    """
    count, entry, word, left, span = np.int64(row[ENTRIES]), reader[0], reader[1], np.uint32(reader[2]), reader[3]
    signs_at, size = values_at + segments, sums.shape[0]
    while entry < count:
        if width < 0:
            place = np.int64(np.int32(row[WORDS + entry])) - base
        else:
            while left == 0:
                word += 1
                if word >= high_words:
                    return -1
                left = row[high_at + word]
            place = ((32 * word + _lowest(left) - entry) << width) - base
            if width > 0:
                place += _low_bits(row, entry, width)
        if place >= size:
            break
        if place < 0:
            return -1
        if codec == FP32:
            value = single[values_at + entry]
        elif codec < SIGN:
            half = row[values_at + (entry >> 1)] >> np.uint32(16 * (entry & 1)) & np.uint32(0xFFFF)
            value = _from_half(half) if codec == FP16 else np.uint32(half << np.uint32(16)).view(np.float32)
        else:
            if segments > 1:
                span = _span_of(base + place, starts, max(span, 0))
            scale = np.int32(row[values_at + (owners[span] if segments > 1 else 0)])
            value = _signed(row, entry, scale, signs_at, plane, codec)
        sums[place] += value
        touched[min(number, FEW)] = place
        number += 1
        left &= left - np.uint32(1)
        entry += 1
    reader[0], reader[1], reader[2], reader[3] = entry, word, left, span
    return number


@compiled(
    "int64(uint32[:, ::1], int64[:, ::1], int64, int64, int64, int64, int64, int64, int64, int64, int64, int64[::1],"
    " int64[::1], float32[::1], uint16[::1], int64)"
)
def write_mean(
    rows, readers, begin, divisor, width, high_at, high_words, values_at, codec, segments, plane, starts, owners, out,
    halves, kind,
):  # fmt: skip
    """Write the mean of messages from place ``begin`` on, tile by tile of the gradient, in each one message after
    another.

    Their indices must ascend: then a tile's entries are neighbours in every message, and each is read once.

    Args:
        rows: messages.
        readers: where each is read next, as ``_add_entries`` has it.
        divisor: of their sum.
        width: of an index's low bits; -1 for plain integers.
        starts, owners: of all spans in ascending order, where they start and which segment they belong to.
        out, halves, kind: where the mean goes: ``out`` for ``FP32``; bits of ``FP16`` or ``BF16`` to ``halves``.

    Returns:
        0, or 1 if the mean is not finite somewhere, or -1: messages are not as expected, and ``out`` is undefined.
    """
    divided_by, numel, wrong = np.float32(divisor), max(out.shape[0], halves.shape[0]), 0
    sums, touched = np.zeros(min(TILE, numel), np.float32), np.empty(FEW + 1, np.int64)
    simple = codec == SIGN and segments == 1 and width > 0
    direct = simple and kind == FP32 and _divides_exactly(rows, values_at, divisor)
    touched = touched[:0] if direct else touched
    single = rows.view(np.float32)
    step = WHOLE if direct else TILE
    for at in range(0, numel, step):
        size = min(step, numel - at)
        number, base, tile = 0, begin + at, out[at : at + size] if direct else sums[:size]
        if direct:
            tile[:] = 0
        for r in range(rows.shape[0]):
            if simple:
                scale = rows[r, values_at]
                if direct:
                    scale = np.float32(single[r, values_at] / divided_by).view(np.uint32)
                number = _add_signs(rows[r], readers[r], base, tile, touched, number, scale, width, high_at, high_words,
                                    values_at)  # fmt: skip
            else:
                number = _add_entries(rows[r], single[r], readers[r], base, tile, touched, number, width, high_at,
                                      high_words, values_at, codec, segments, plane, starts, owners)  # fmt: skip
            if number < 0:
                return -1
        some = touched[:number] if number <= FEW else touched[:0]
        if direct:
            continue
        if kind == FP32:
            wrong += _write_tile(sums, divided_by, some, number > FEW, out[at : at + size])
        else:
            wrong += _write_halves(sums, divided_by, some, number > FEW, halves[at : at + size], kind)
    return min(wrong, 1)
