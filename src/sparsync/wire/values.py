"""How values travel: value codecs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.sparse import SparseGrad
from sparsync.wire.shape import WORD, Shape, unpack_bits, words_for


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
            return segments + words_for(capacity)
        return -(-capacity * (self.dtype or dtype).itemsize // WORD)

    def pack(self, sent: SparseGrad, segment_of: Callable[[Tensor], Tensor], shape: Shape) -> Tensor:
        """The values of ``sent`` as words."""
        if self.signs:
            return _pack_signs(sent, segment_of, shape)
        return _as_words(sent.values.to(self.dtype or shape.dtype))

    def unpack(
        self, words: Tensor, indices: Tensor, count: Tensor, segment_of: Callable[[Tensor], Tensor], shape: Shape
    ) -> Tensor:
        """The values from their words; ``indices`` are theirs."""
        if self.signs:
            return _unpack_signs(words, indices, count, segment_of, shape)
        # Cloned: a view needs alignment.
        return words.clone().view(self.dtype or shape.dtype)[: shape.capacity].to(shape.dtype)


def _cast(dtype: torch.dtype) -> Callable[[Tensor, Tensor, int], Tensor]:
    top = torch.finfo(dtype).max
    cap = 2.0 ** (int(top).bit_length() - 1)  # a power of 2 is subtracted exactly from most of what lies above

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
    # Shares of the peak, in 2**-24ths, are integers: their sum cannot overflow, and is the same in any order.
    share = (size / peak.clamp(min=torch.finfo(size.dtype).tiny)[segments] * 2**24).to(torch.int64)
    total = share.new_zeros(parts).index_add_(0, segments, share).double()
    number = share.new_zeros(parts).index_add_(0, segments, torch.ones_like(share)).double()
    mean = peak.double() * (total / (number.clamp(min=1) * 2**24))
    scale = torch.maximum(mean, peak.double() * 2**-14).clamp(max=torch.finfo(torch.float32).max).float()
    scale = (scale.view(torch.int32) & -0x10000).view(torch.float32).to(values.dtype)[segments]
    return torch.where(size >= scale / 2, torch.copysign(scale, values), 0)


def _pack_signs(sent: SparseGrad, segment_of: Callable[[Tensor], Tensor], shape: Shape) -> Tensor:
    assert sent.indices is not None
    scales = torch.zeros(shape.segments, dtype=torch.float32, device=sent.values.device)
    scales.scatter_reduce_(0, segment_of(sent.indices), sent.values.abs().float(), "amax")
    bits = torch.zeros(32 * words_for(shape.capacity), dtype=torch.int32, device=sent.values.device)
    bits[: shape.capacity] = sent.values < 0
    lane = torch.arange(32, dtype=torch.int32, device=bits.device)
    packed = (bits.view(-1, 32) << lane).sum(1, dtype=torch.int32)
    return torch.cat([scales.view(torch.int32), packed])


def _unpack_signs(
    words: Tensor, indices: Tensor, count: Tensor, segment_of: Callable[[Tensor], Tensor], shape: Shape
) -> Tensor:
    scales = words[: shape.segments].clone().view(torch.float32).to(shape.dtype)
    negative = unpack_bits(words[shape.segments :])[: shape.capacity]
    size = scales[segment_of(indices)]
    real = torch.arange(shape.capacity, device=words.device) < count
    return torch.where(real, torch.where(negative, -size, size), 0)


def _as_words(values: Tensor) -> Tensor:
    """The bits of ``values`` as 32-bit words, padded with zero bits to a whole number of them."""
    odd = values.numel() % 2 if values.itemsize == 2 else 0
    return (torch.cat([values, values.new_zeros(1)]) if odd else values.contiguous()).view(torch.int32)


CODECS = {
    codec.name: codec
    for codec in (
        ValueCodec("fp32", None, None),
        ValueCodec("fp16", _cast(torch.float16), torch.float16),
        ValueCodec("bf16", _cast(torch.bfloat16), torch.bfloat16),
        ValueCodec("sign", _signs, None, signs=True),
    )
}
