"""Messages made and read on the host by compiled loops: equal bit for bit to what ``Wire`` alone makes of them.

The loops are in ``kernels/message/encode_cpu.py`` and ``decode_cpu.py``. Where one gives up, ``Wire`` does without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsync.kernels import cpu
from sparsync.kernels.codecs import CODEC_NUMBERS
from sparsync.kernels.cpu import Array
from sparsync.kernels.message.header import ENTRIES, HEADER
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad
from sparsync.wire.bits import on_host, words_for
from sparsync.wire.indices import ef_width, ef_words
from sparsync.wire.shape import WORD, Shape

if TYPE_CHECKING:
    from sparsync.wire.message import Wire

KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # what a mean may be written in, as the loops know it
NONE = np.zeros((1, 0), np.int64)


def carries(wire: Wire, shape: Shape, *tensors: Tensor) -> bool:
    """Return whether loops can make and read these messages: ``tensors`` are all on the host."""
    simple = wire.values in CODEC_NUMBERS and wire.indices in ("int", "ef") and shape.dtype == torch.float32
    if not (simple and shape.capacity and shape.numel < 2**31 and all(on_host(tensor) for tensor in tensors)):
        return False
    return (shape.numel >= cpu.LEAST or cpu.loaded()) and cpu.available()


class Places(NamedTuple):
    """Where the parts of a message stand, in words, as the loops ask for it."""

    width: int  # of an index's low bits; -1 for plain integers
    high_at: int
    high_words: int
    values_at: int
    codec: int
    segments: int
    plane: int  # words of one bit of every value

    @classmethod
    def of(cls, wire: Wire, shape: Shape) -> Places:
        low, high = ef_words(shape.numel, shape.capacity)
        width = ef_width(shape.numel, shape.capacity) if wire.indices == "ef" else -1
        values_at, plane = HEADER + wire.index_codec.words(shape), words_for(shape.capacity)
        return cls(width, HEADER + low, high, values_at, CODEC_NUMBERS[wire.values], shape.segments, plane)


def encode(
    wire: Wire, sent: SparseGrad, segment_of: Callable[[Tensor], Tensor], shape: Shape, header: Tensor
) -> Tensor | None:
    """Do as ``Wire.encode``; ``None`` where entries are not in the order in which they travel."""
    from sparsync.kernels.message import encode_cpu as loops

    assert sent.indices is not None
    places, coded = Places.of(wire, shape), wire.codec.signs
    words = sent.values if coded else wire.codec.pack(sent, segment_of, shape)
    message = torch.empty(*header.shape[:-1], wire.bytes(shape) // 4, dtype=torch.int32, device="cpu")
    message[..., :HEADER] = header
    done = loops.encode(
        _rows(message), _table(sent.indices), sent.count.reshape(-1).numpy(), _rows(words),
        _segments(sent.indices, segment_of, shape) if coded else NONE, shape.numel, places.width, places.high_at,
        places.values_at, places.codec, places.segments, places.plane,
    )  # fmt: skip
    return message if done else None


def unpack_indices(wire: Wire, message: Tensor, shape: Shape) -> Tensor | None:
    """Return Elias-Fano coded indices; ``None`` if there are fewer than the message says."""
    from sparsync.kernels.message import decode_cpu as loops

    indices = torch.empty(*message.shape[:-1], shape.capacity, dtype=torch.int64, device="cpu")
    places = Places.of(wire, shape)
    whole = loops.unpack_indices(_rows(message), places.width, places.high_at, places.high_words, _table(indices))
    return indices if whole else None


def unpack_signs(
    wire: Wire, message: Tensor, indices: Tensor, segment_of: Callable[[Tensor], Tensor], shape: Shape
) -> Tensor:
    """Return values that travel as signs or levels; ``indices`` are theirs."""
    from sparsync.kernels.message import decode_cpu as loops

    values, places = torch.empty(indices.shape, dtype=torch.float32, device="cpu"), Places.of(wire, shape)
    segments = _segments(indices, segment_of, shape)
    loops.unpack_signs(_rows(message), segments, *places[3:], _table(values))
    return values


def write_mean(
    wire: Wire, rows: Tensor, layout: Layout, shape: Shape, divisor: int, parts: Sequence[tuple[int, Tensor]]
) -> bool | None:
    """Overwrite ``parts`` of a flat tensor with messages, summed in their order, over ``divisor``; whether that is
    finite everywhere.

    In one pass over all messages and one over the parts. ``None``, and nothing is known of these, where there are no
    loops for it, or the messages' entries are not in ascending order or do not exist.

    Args:
        parts: all of the flat tensor in ascending order: where each starts, and the part.
    """
    outs = [out for _, out in parts]
    if rows.shape[-1] != wire.bytes(shape) // WORD:  # no loop may read beyond
        return None
    if not (carries(wire, shape, rows, *outs) and all(out.dtype in KINDS and out.is_contiguous() for out in outs)):
        return None
    from sparsync.kernels.message import decode_cpu as loops

    starts, owners = (NONE[0], NONE[0]) if shape.segments == 1 else map(Tensor.numpy, layout.span_table(rows.device))
    places, words = Places.of(wire, shape), _rows(rows)
    readers = np.zeros((len(words), 4), np.int64)
    readers[:, 1] = -1  # the word before the first
    counts, outcomes = words[:, ENTRIES], [0]
    if (counts > shape.capacity).any():
        return None
    for begin, out in parts:
        kind = KINDS[out.dtype]
        single = out.numpy() if not kind else np.zeros(0, np.float32)
        halves = out.view(torch.uint16).numpy() if kind else np.zeros(0, np.uint16)
        outcomes.append(loops.write_mean(words, readers, begin, divisor, *places, starts, owners, single, halves, kind))
    return None if min(outcomes) < 0 or (readers[:, 0] < counts).any() else max(outcomes) == 0


def _segments(indices: Tensor, segment_of: Callable[[Tensor], Tensor], shape: Shape) -> Array:
    """Return the segment of every entry, if there are several."""
    if shape.segments > 1:
        return _table(segment_of(indices))
    return np.broadcast_to(NONE, (max(1, indices.numel() // shape.capacity), 0)).copy()


def _table(tensor: Tensor) -> Array:
    """Return the same numbers, a row for each message."""
    rows: Array = tensor.detach().contiguous().view(-1, tensor.shape[-1]).numpy()
    return rows


def _rows(words: Tensor) -> Array:
    """Return 32-bit words as unsigned ones, a row for each message."""
    return _table(words).view(np.uint32)
