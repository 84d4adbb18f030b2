"""A sparse gradient as one flat message of 32-bit words, and back.

    header (8 words) | indices | values

Everything is viewed as integers, never converted: no arithmetic touches a bit pattern on its way. Indices take one
word each while the gradient has fewer than 2**31 entries and two above. The size of a message follows from the layout
alone, so no sizes are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparsync.sparse import SparseGrad

VERSION = 1
MAGIC = 0x5350  # "SP"
HEADER = 8  # words
WORD = 4  # bytes


class Header(NamedTuple):
    """The first words of a message."""

    version: int  # magic number and version of the format
    sequence: int  # number of the exchange
    unit: int  # bucket
    digest: int  # of the layout
    entries: int  # that are real
    flags: int
    where: int  # number of the first parameter with a non-finite gradient, or -1
    extra: int = 0  # of the collective


@dataclass(frozen=True)
class ValueCodec:
    """How values travel.

    Args:
        round: values -> the same values as they travel (``None``: unchanged); applied inside ``compress``, so that the
            residual keeps what is cut off.
        dtype: what one value is on the wire (``None``: the residual's own dtype; fp64 gradients travel as fp64).
        signs: one sign bit a value and one scale a segment travel instead.
    """

    name: str
    round: Callable[[Tensor, Tensor, int], Tensor] | None
    dtype: torch.dtype | None
    signs: bool = False

    def words(self, capacity: int, segments: int, dtype: torch.dtype) -> int:
        """Words that ``capacity`` values of ``segments`` segments take; ``dtype`` is the residual's."""
        if self.signs:
            return segments + -(-capacity // 32)
        return -(-capacity * (self.dtype or dtype).itemsize // WORD)


def _cast(dtype: torch.dtype) -> Callable[[Tensor, Tensor, int], Tensor]:
    top = torch.finfo(dtype).max
    cap = 2.0 ** (torch.finfo(dtype).max.as_integer_ratio()[0].bit_length() - 1)  # a power of 2: subtracts exactly

    def round(values: Tensor, segments: Tensor, parts: int) -> Tensor:
        size = values.abs()
        return torch.where(size > top, torch.copysign(size.clamp(max=cap), values), values.to(dtype).to(values.dtype))

    return round


def _signs(values: Tensor, segments: Tensor, parts: int) -> Tensor:
    """Sign times one scale a segment: the mean magnitude, but at least 2**-14 of the largest.

    The scale is cut to 8 significant bits: then magnitude - scale is exact in fp32 for every magnitude from scale/2 to
    2**16 scale. An entry under half the scale becomes 0, that is, it waits.
    """
    size = values.abs()
    peak = size.new_zeros(parts).scatter_reduce_(0, segments, size, "amax")
    share = size.new_zeros(parts).index_add_(0, segments, size / peak[segments])  # of the peak: cannot overflow
    number = size.new_zeros(parts).index_add_(0, segments, torch.ones_like(size))
    mean = peak * (share / number.clamp(min=1))
    scale = torch.maximum(mean, peak * 2**-14).clamp(max=torch.finfo(torch.float32).max).float()
    scale = (scale.view(torch.int32) & -0x10000).view(torch.float32).to(values.dtype)[segments]
    return torch.where(size >= scale / 2, torch.copysign(scale, values), 0)


CODECS = {
    codec.name: codec
    for codec in (
        ValueCodec("fp32", None, None),
        ValueCodec("fp16", _cast(torch.float16), torch.float16),
        ValueCodec("bf16", _cast(torch.bfloat16), torch.bfloat16),
        ValueCodec("sign", _signs, None, signs=True),
    )
}


@dataclass(frozen=True)
class Shape:
    """What fixes the size of a message: the gradient's length, room for entries, segments, and the residual's dtype."""

    numel: int
    capacity: int
    segments: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Wire:
    """The format of messages.

    Args:
        values: ``"fp32"``, ``"fp16"``, ``"bf16"`` or ``"sign"``.
    """

    values: str = "fp32"

    def __post_init__(self) -> None:
        if self.values not in CODECS:
            raise ValueError(f"values must be one of {', '.join(CODECS)}, got {self.values!r}")

    @property
    def codec(self) -> ValueCodec:
        return CODECS[self.values]

    def bytes(self, shape: Shape) -> int:
        """Size of one message."""
        indices = shape.capacity * _index_words(shape.numel)
        return WORD * (HEADER + indices + self.codec.words(shape.capacity, shape.segments, shape.dtype))

    def header(self, sent: SparseGrad, sequence: int, unit: int, digest: int) -> Tensor:
        """The header alone; count and flags are copied on the device they are on."""
        sequence &= 0x7FFFFFFF  # a long training wraps round
        words = torch.tensor([MAGIC << 16 | VERSION, sequence, unit, digest, 0, 0, 0, 0], dtype=torch.int32)
        words = words.to(sent.values.device)
        words[4], words[5], words[6] = sent.count, sent.flags, sent.where
        return words

    def encode(self, sent: SparseGrad, segment_of: Callable[[Tensor], Tensor], shape: Shape, header: Tensor) -> Tensor:
        """The message: a 1-D int32 tensor of ``bytes(shape)`` bytes."""
        assert sent.indices is not None
        wide = _index_words(shape.numel) == 2
        indices = sent.indices if wide else sent.indices.to(torch.int32)
        if self.codec.signs:
            values = self._pack_signs(sent, segment_of, shape)
        else:
            values = _as_words(sent.values.to(self.codec.dtype or shape.dtype))
        return torch.cat([header, indices.view(torch.int32), values])

    def decode(self, message: Tensor, segment_of: Callable[[Tensor], Tensor], shape: Shape) -> SparseGrad:
        """The gradient a message was made from, bit for bit."""
        split = HEADER + shape.capacity * _index_words(shape.numel)
        count, flags, where = message[4].long(), message[5], message[6]
        body = message[HEADER:split]
        wide = _index_words(shape.numel) == 2
        indices = body.clone().view(torch.int64) if wide else body.to(torch.int64)  # cloned: a view needs alignment
        if self.codec.signs:
            values = self._unpack_signs(message[split:], indices, count, segment_of, shape)
        else:
            words = message[split:].clone()
            values = words.view(self.codec.dtype or shape.dtype)[: shape.capacity].to(shape.dtype)
        return SparseGrad(indices, values, count, shape.numel, flags, where)

    def _pack_signs(self, sent: SparseGrad, segment_of: Callable[[Tensor], Tensor], shape: Shape) -> Tensor:
        assert sent.indices is not None
        scales = torch.zeros(shape.segments, dtype=torch.float32, device=sent.values.device)
        scales.scatter_reduce_(0, segment_of(sent.indices), sent.values.abs().float(), "amax")
        bits = torch.zeros(-(-shape.capacity // 32) * 32, dtype=torch.int32, device=sent.values.device)
        bits[: shape.capacity] = sent.values < 0
        lane = torch.arange(32, dtype=torch.int32, device=bits.device)
        packed = (bits.view(-1, 32) << lane).sum(1, dtype=torch.int32)
        return torch.cat([scales.view(torch.int32), packed])

    def _unpack_signs(
        self, words: Tensor, indices: Tensor, count: Tensor, segment_of: Callable[[Tensor], Tensor], shape: Shape
    ) -> Tensor:
        scales = words[: shape.segments].clone().view(torch.float32).to(shape.dtype)
        lane = torch.arange(32, dtype=torch.int32, device=words.device)
        negative = (words[shape.segments :].unsqueeze(1) >> lane & 1).view(-1)[: shape.capacity].bool()
        size = scales[segment_of(indices)]
        real = torch.arange(shape.capacity, device=words.device) < count
        return torch.where(real, torch.where(negative, -size, size), 0)


def _index_words(numel: int) -> int:
    return 1 if numel < 2**31 else 2


def _as_words(values: Tensor) -> Tensor:
    """The bits of ``values`` as 32-bit words, padded with zero bits to a whole number of them."""
    odd = values.numel() % 2 if values.itemsize == 2 else 0
    return (torch.cat([values, values.new_zeros(1)]) if odd else values.contiguous()).view(torch.int32)
