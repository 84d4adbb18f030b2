"""How values travel: value codecs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.kernels import cpu
from sparsync.kernels.accumulate import Rounding
from sparsync.sparse import SparseGrad
from sparsync.value_range import limit, power_below
from sparsync.wire.bits import clear_from, on_host, pack_bits, unpack_bits, words_for
from sparsync.wire.shape import WORD, Shape

QUEUES = 64  # in which a GPU adds up entries that go to few places
LEAST = 2.0**-100  # scale with levels: below it everything waits


@dataclass(frozen=True)
class ValueCodec:
    """How values travel.

    Args:
        round: values -> the same values as they travel (``None``: unchanged), none of them larger than is asked for;
            applied inside ``compress``, so that the residual keeps what is cut off.
        dtype: what one value is on the wire (``None``: the residual's own dtype; fp64 gradients travel as fp64).
        signs: one sign bit a value and one scale a segment travel instead ...
        planes: ... and so many bits more a value, that say which power of 2 of the scale it is.
    """

    name: str
    round: Rounding | None
    dtype: torch.dtype | None
    signs: bool = False
    planes: int = 0

    def words(self, capacity: int, segments: int, dtype: torch.dtype) -> int:
        """Words that ``capacity`` values of ``segments`` segments take; ``dtype`` is the residual's."""
        if self.signs:
            return segments + (1 + self.planes) * words_for(capacity)
        return -(-capacity * (self.dtype or dtype).itemsize // WORD)

    def pack(self, sent: SparseGrad, segment_of: Callable[[Tensor], Tensor], shape: Shape) -> Tensor:
        """Return the values of ``sent`` as words."""
        if self.signs:
            return _pack_signs(sent, segment_of, shape, self.planes)
        return _as_words(sent.values.to(self.dtype or shape.dtype))

    def unpack(
        self, words: Tensor, indices: Tensor, count: Tensor, segment_of: Callable[[Tensor], Tensor], shape: Shape
    ) -> Tensor:
        """Return the values from their words, 0 from ``count`` on; ``indices`` are theirs."""
        if self.signs:
            return _unpack_signs(words, indices, count, segment_of, shape, self.planes)
        # Cloned: a view needs alignment.
        own = words.clone(memory_format=torch.contiguous_format).view(self.dtype or shape.dtype)
        return clear_from(count, own[..., : shape.capacity].to(shape.dtype).contiguous())


def _cast(dtype: torch.dtype) -> Rounding:
    top = torch.finfo(dtype).max

    def round(values: Tensor, segments: Tensor, parts: int, most: float = math.inf) -> Tensor:
        return limit(values.to(dtype).to(values.dtype), values, min(most, top))

    return round


def _signs(values: Tensor, segments: Tensor, parts: int, most: float = math.inf) -> Tensor:
    """Sign times one scale a segment. An entry under half the scale becomes 0, that is, it waits."""
    quick = _signs_by_loop(values, parts, most)
    if quick is not None:
        return quick
    size, scale = values.abs(), _scales(values, segments, parts).clamp(max=power_below(most))
    return torch.where(size >= scale / 2, torch.copysign(scale, values), 0)


def _signs_by_loop(values: Tensor, parts: int, most: float) -> Tensor | None:
    """Do the same by numba's loop, if that is loaded and can."""
    plain = parts == 1 and values.dim() == 1 and values.dtype == torch.float32 and values.numel() > 0
    if not (plain and on_host(values) and values.is_contiguous() and cpu.loaded()):
        return None
    from sparsync.kernels.signs.cpu import round_signs

    return round_signs(values, power_below(most))


def _levels(values: Tensor, segments: Tensor, parts: int, most: float = math.inf) -> Tensor:
    """Return the nearest of half, once, twice and four times the scale of the segment; under a quarter of it, 0."""
    size, scale = values.abs(), _scales(values, segments, parts).clamp(max=power_below(most) / 4)
    level = scale / 2
    for bound in (0.75, 1.5, 3.0):
        level = torch.where(size > bound * scale, 2 * level, level)
    # Exponents tell the levels apart on the wire, which those of denormal numbers do not.
    return torch.where((size >= scale / 4) & (scale >= LEAST), torch.copysign(level, values), 0)


def _scales(values: Tensor, segments: Tensor, parts: int) -> Tensor:
    """Return, of every entry the scale of its segment: the mean magnitude, but at least 2**-14 of the largest.

    It is cut to 8 significant bits: then magnitude - scale is exact in fp32 for every magnitude from scale/2 to 2**16
    scale.
    """
    size = values.abs()
    # Shares of the peak, in 2**-24ths, are integers: their sum cannot overflow, and is the same in any order.
    if parts == 1 and size.numel():
        peak = size.amax(0, keepdim=True)
        share = (size / peak.clamp(min=torch.finfo(size.dtype).tiny) * 2**24).to(torch.int64)
        total, number = share.sum(0, keepdim=True).double(), torch.full_like(peak, size.numel(), dtype=torch.float64)
    else:
        bins, shape = _bins(segments, parts, QUEUES if size.is_cuda else 1)
        peak = size.new_zeros(shape).view(-1).scatter_reduce_(0, bins, size, "amax").view(shape).amax(0)
        share = (size / peak.clamp(min=torch.finfo(size.dtype).tiny)[segments] * 2**24).to(torch.int64)
        total = share.new_zeros(shape).view(-1).index_add_(0, bins, share).view(shape).sum(0).double()
        ones = torch.ones_like(share)
        number = ones.new_zeros(shape).view(-1).index_add_(0, bins, ones).view(shape).sum(0).double()
    mean = peak.double() * (total / (number.clamp(min=1) * 2**24))
    scale = torch.maximum(mean, peak.double() * 2**-14).clamp(max=torch.finfo(torch.float32).max).float()
    scale = (scale.view(torch.int32) & -0x10000).view(torch.float32).to(values.dtype)
    return scale.expand_as(values) if parts == 1 else scale[segments]


def _bins(segments: Tensor, parts: int, queues: int) -> tuple[Tensor, tuple[int, int]]:
    """Where each entry is added, in a table of ``(queues, parts)``: neighbours in other rows, so that none waits for
    another."""
    if queues > 1:
        number = torch.arange(segments.numel(), dtype=torch.int64, device=segments.device)
        segments = segments + parts * (number % queues)
    return segments, (queues, parts)


def _pack_signs(sent: SparseGrad, segment_of: Callable[[Tensor], Tensor], shape: Shape, planes: int) -> Tensor:
    assert sent.indices is not None
    size = sent.values.abs().float()
    scales = size.new_zeros(*size.shape[:-1], shape.segments)
    if shape.segments == 1 and shape.capacity:
        scales = size.amax(-1, keepdim=True)
    else:
        scales.scatter_reduce_(-1, segment_of(sent.indices), size, "amax")
    # All are the scale times a power of 2: from the last bits of its exponent one can tell which.
    exponent = size.view(torch.int32) >> 23
    bits = [sent.values < 0, *((exponent >> plane & 1).to(torch.bool) for plane in range(planes))]
    return torch.cat([scales.view(torch.int32), *map(pack_bits, bits)], -1)


def _unpack_signs(
    words: Tensor, indices: Tensor, count: Tensor, segment_of: Callable[[Tensor], Tensor], shape: Shape, planes: int
) -> Tensor:
    scales = words[..., : shape.segments]
    if shape.segments > 1:
        scales = scales.gather(-1, segment_of(indices))
    bits = unpack_bits(words[..., shape.segments :])
    bits = bits.view(*bits.shape[:-1], 1 + planes, 32 * words_for(shape.capacity))[..., : shape.capacity]
    if planes:  # the largest of a segment is its scale: the others are as many halvings away as their bits say
        code = sum(bits[..., 1 + plane, :].to(torch.int32) << plane for plane in range(planes))
        scales = scales - ((((scales >> 23) - code) & (2**planes - 1)) << 23)
    signed = (bits[..., 0, :].to(torch.int32) << 31).bitwise_or_(scales)
    return clear_from(count, signed.view(torch.float32).to(shape.dtype))


def _as_words(values: Tensor) -> Tensor:
    """Return the bits of ``values`` as 32-bit words, padded with zero bits to a whole number of them."""
    odd = values.shape[-1] % 2 if values.itemsize == 2 else 0
    return (torch.nn.functional.pad(values, (0, 1)) if odd else values.contiguous()).view(torch.int32)


CODECS = {
    codec.name: codec
    for codec in (
        ValueCodec("fp32", None, None),
        ValueCodec("fp16", _cast(torch.float16), torch.float16),
        ValueCodec("bf16", _cast(torch.bfloat16), torch.bfloat16),
        ValueCodec("sign", _signs, None, signs=True),
        ValueCodec("levels", _levels, None, signs=True, planes=2),
    )
}
