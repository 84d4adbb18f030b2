"""A sparse gradient as one flat message of 32-bit words, and back.

    header (10 words) | indices | values

The header ends with a checksum of the whole message; ``kernels/checksum/reference.py`` says what it finds out.

Everything is viewed as integers, never converted: no arithmetic touches a bit pattern on its way. The size of a message
follows from the layout alone, so no sizes are exchanged. Several gradients of one shape, a row each, become as many
messages, a row each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsync.errors import Damaged
from sparsync.kernels.checksum import checksum, checksum_on_host
from sparsync.kernels.message.header import ENTRIES, FLAGS, HEADER, SUM, WHERE, Header
from sparsync.sparse import SparseGrad
from sparsync.wire import bits, host
from sparsync.wire.indices import INDEX_CODECS, IndexCodec
from sparsync.wire.shape import WORD, Shape
from sparsync.wire.values import CODECS, ValueCodec

VERSION = 2
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

    @property
    def _coded(self) -> bool:
        """Whether bits are packed: otherwise copying is all there is to do."""
        return self.indices == "ef" or self.codec.signs

    def bytes(self, shape: Shape) -> int:
        """Return the size of one message."""
        indices = self.index_codec.words(shape)
        return WORD * (HEADER + indices + self.codec.words(shape.capacity, shape.segments, shape.dtype))

    def header(self, sent: SparseGrad, sequence: int, unit: int, digest: int) -> Tensor:
        """Return the header; count and flags are copied on the device they are on. If it travels alone, ``seal`` it."""
        sequence &= 0x7FFFFFFF  # a long training wraps round
        header = Header(MAGIC << 16 | VERSION, sequence, unit, digest, 0, 0, 0)
        words = torch.tensor(header, dtype=torch.int32, device="cpu")
        words = words.to(sent.values.device).expand(*sent.count.shape, HEADER).clone()
        words[..., ENTRIES], words[..., FLAGS], words[..., WHERE] = sent.count, sent.flags, sent.where
        return words

    def encode(self, sent: SparseGrad, segment_of: Callable[[Tensor], Tensor], shape: Shape, header: Tensor) -> Tensor:
        """Return the message, sealed: an int32 tensor of ``bytes(shape)`` bytes."""
        if self._coded and sent.values.dtype == torch.float32 and host.carries(self, shape, sent.values):
            message = host.encode(self, sent, segment_of, shape, header)
            if message is None:  # not in order
                message = host.encode(self, self.index_codec.arrange(sent), segment_of, shape, header)
            if message is not None:
                return message
        return self.encode_plain(sent, segment_of, shape, header)

    def encode_plain(
        self, sent: SparseGrad, segment_of: Callable[[Tensor], Tensor], shape: Shape, header: Tensor
    ) -> Tensor:
        """Do as ``encode``, in plain PyTorch: the specification."""
        sent = self.index_codec.arrange(sent)
        parts = [header, self.index_codec.pack(sent, shape), self.codec.pack(sent, segment_of, shape)]
        return seal(torch.cat(parts, -1))

    def decode(self, message: Tensor, segment_of: Callable[[Tensor], Tensor], shape: Shape) -> SparseGrad:
        """Return the gradient a message was made from, bit for bit; in ascending order if ``"ef"`` coded.

        Whether the message came as it was sent, ``read_headers`` says. But whatever it holds, no entry of the result
        lies outside the shape: on the host that is an error, on a device, which nobody waits for, such an entry is NaN.
        """
        return self._decode(message, segment_of, shape, self._coded and host.carries(self, shape, message))

    def decode_plain(self, message: Tensor, segment_of: Callable[[Tensor], Tensor], shape: Shape) -> SparseGrad:
        """Do as ``decode``, in plain PyTorch: the specification."""
        return self._decode(message, segment_of, shape, False)

    def _decode(
        self, message: Tensor, segment_of: Callable[[Tensor], Tensor], shape: Shape, compiled: bool
    ) -> SparseGrad:
        check_length(message, self.bytes(shape) // WORD)
        split = HEADER + self.index_codec.words(shape)
        count, flags, where = message[..., ENTRIES].long(), message[..., FLAGS], message[..., WHERE]
        count, misfit = within(count, shape.capacity + 1, "entries")
        found = host.unpack_indices(self, message, shape) if compiled and self.indices == "ef" else None
        if found is None:
            found = self.index_codec.unpack(message[..., HEADER:split], count, shape)
        indices, outside = within(found, shape.numel, "index")
        if compiled and self.codec.signs:
            values = host.unpack_signs(self, message, indices, segment_of, shape)
        else:
            values = self.codec.unpack(message[..., split:], indices, count, segment_of, shape)
        if misfit is not None and outside is not None:
            values = values.masked_fill(outside | misfit.unsqueeze(-1), torch.nan)
        return SparseGrad(indices, values, count, shape.numel, flags, where)


def seal(messages: Tensor) -> Tensor:
    """Write the checksums of messages, or of headers alone, into them."""
    if bits.on_host(messages):
        words = messages.numpy()
        words[..., SUM : SUM + 2] = checksum_on_host(words).view(np.int32).reshape(*words.shape[:-1], 2)
    else:
        messages[..., SUM : SUM + 2] = checksum(messages).unsqueeze(-1).view(torch.int32)
    return messages


def read_headers(messages: Tensor) -> list[Header]:
    """Return the headers of messages that were received, a row each; of each, whether it was damaged."""
    check_length(messages[..., :HEADER], HEADER)
    if bits.on_host(messages):
        headers, sums = messages.numpy()[:, :HEADER].copy(), checksum_on_host(messages.numpy())
    else:
        headers, sums = messages[:, :HEADER].cpu().numpy(), checksum(messages).cpu().numpy()
    headers[:, SUM : SUM + 2] ^= sums.view(np.int32).reshape(-1, 2)
    return [Header(*words) for words in headers.tolist()]


def check_length(messages: Tensor, words: int) -> None:
    """Refuse messages, or a header alone, of another length than the layout fixes: what readers rely on."""
    if messages.shape[-1] != words:
        raise Damaged(f"a message was not read: it has {messages.shape[-1]} words, not {words}")


def within(numbers: Tensor, limit: int, what: str) -> tuple[Tensor, Tensor | None]:
    """Return numbers that must be from 0 to below ``limit``: others are an error on the host. On a device, which nobody
    waits for, they become 0, and the second result says which."""
    if not bits.on_host(numbers):
        outside = (numbers < 0) | (numbers >= limit)
        return numbers.masked_fill(outside, 0), outside
    if numbers.numel() and int(numbers.numpy().view(np.uint64).max()) >= limit:  # below 0 they are huge
        raise Damaged(f"a message was not read: it has an {what} outside 0 to {limit - 1}")
    return numbers, None
