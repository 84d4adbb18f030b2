"""A sparse gradient as one flat message of 32-bit words, and back.

    header (8 words) | indices | values

Everything is viewed as integers, never converted: no arithmetic touches a bit pattern on its way. The size of a message
follows from the layout alone, so no sizes are exchanged. Several gradients of one shape, a row each, become as many
messages, a row each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.kernels.message.header import ENTRIES, FLAGS, HEADER, WHERE, Header
from sparsync.sparse import SparseGrad
from sparsync.wire.indices import INDEX_CODECS, IndexCodec
from sparsync.wire.shape import WORD, Shape
from sparsync.wire.values import CODECS, ValueCodec

VERSION = 1
MAGIC = 0x5350  # "SP"


@dataclass(frozen=True)
class Wire:
    """The format of messages.

    Args:
        values: ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"sign"`` or ``"levels"``.
        indices: ``"int"``, or ``"ef"``: sorted and Elias-Fano coded, in about a third of the bits, or ``"block"``: only
            the start of each segment's block.
    """

    values: str = "fp32"
    indices: str = "int"

    def __post_init__(self) -> None:
        if self.values not in CODECS:
            raise ValueError(f"values must be one of {', '.join(CODECS)}, got {self.values!r}")
        if self.indices not in INDEX_CODECS:
            raise ValueError(f"indices must be one of {', '.join(INDEX_CODECS)}, got {self.indices!r}")
        if self.indices == "block" and self.codec.signs:
            raise ValueError(
                f"indices='block' sends every entry of a block, zeros too, which values={self.values!r} cannot tell"
            )

    @property
    def codec(self) -> ValueCodec:
        return CODECS[self.values]

    @property
    def index_codec(self) -> IndexCodec:
        return INDEX_CODECS[self.indices]

    def bytes(self, shape: Shape) -> int:
        """Return the size of one message."""
        indices = self.index_codec.words(shape)
        return WORD * (HEADER + indices + self.codec.words(shape.capacity, shape.segments, shape.dtype))

    def header(self, sent: SparseGrad, sequence: int, unit: int, digest: int) -> Tensor:
        """Return the header alone; count and flags are copied on the device they are on."""
        sequence &= 0x7FFFFFFF  # a long training wraps round
        words = torch.tensor(Header(MAGIC << 16 | VERSION, sequence, unit, digest, 0, 0, 0), dtype=torch.int32)
        words = words.to(sent.values.device).expand(*sent.count.shape, HEADER).clone()
        words[..., ENTRIES], words[..., FLAGS], words[..., WHERE] = sent.count, sent.flags, sent.where
        return words

    def encode(self, sent: SparseGrad, segment_of: Callable[[Tensor], Tensor], shape: Shape, header: Tensor) -> Tensor:
        """Return the message: an int32 tensor of ``bytes(shape)`` bytes."""
        sent = self.index_codec.arrange(sent)
        return torch.cat([header, self.index_codec.pack(sent, shape), self.codec.pack(sent, segment_of, shape)], -1)

    def decode(self, message: Tensor, segment_of: Callable[[Tensor], Tensor], shape: Shape) -> SparseGrad:
        """Return the gradient a message was made from, bit for bit; in ascending order if ``"ef"`` coded."""
        split = HEADER + self.index_codec.words(shape)
        count, flags, where = message[..., ENTRIES].long(), message[..., FLAGS], message[..., WHERE]
        indices = self.index_codec.unpack(message[..., HEADER:split], count, shape)
        values = self.codec.unpack(message[..., split:], indices, count, segment_of, shape)
        return SparseGrad(indices, values, count, shape.numel, flags, where)
