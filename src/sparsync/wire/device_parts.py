"""Messages to and from the owners of a gradient's parts, made and read on the device, in buffers that stay.

Equal bit for bit to what ``Wire`` makes of entries in ascending order; the kernels are in ``kernels.balanced``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsync.kernels.balanced.launch import SegmentTable
from sparsync.kernels.device import on_device_of
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad
from sparsync.wire.device import BLOCK, MOST, PIECE, PIECES, WORDS, DeviceMessage, carries
from sparsync.wire.message import MAGIC, VERSION, Wire
from sparsync.wire.shape import Shape

PAIR = 1024  # entries of a message that one program writes into the result


def carries_parts(wire: Wire, sent: SparseGrad, workers: int) -> bool:
    """Return whether messages about ``sent``, cut in a part for each of the workers, can be made here."""
    return carries(wire, sent) and sent.numel + workers * PIECE < MOST


class PartMessage(DeviceMessage):
    """Makes and reads messages about parts of a gradient: to all owners at once, or from one of them.

    Args:
        wire, layout, shape: of a part's message.
        workers: parts, each owned by one.
        made: messages that are made at once: one for each owner, or one.
        divisor: of what owners send; their number.
    """

    def __init__(
        self,
        wire: Wire,
        layout: Layout,
        shape: Shape,
        workers: int,
        made: int,
        device: torch.device,
        failed_exchange: Tensor,
        divisor: int | None = None,
    ) -> None:
        super().__init__(wire, layout, shape, workers, device, failed_exchange, divisor, made)
        self.parts, self.made, self.stride = workers, made, self.pieces * PIECE
        self.messages16 = self.messages.view(torch.int16)
        self.totals = torch.zeros(2 * made, dtype=torch.int64, device=device)
        self.places = SegmentTable(self.starts, self.owners, self.spans, self.steps)

    def _make(
        self,
        indices: Tensor,
        values: Tensor,
        count: Tensor,
        sent: SparseGrad,
        number: Tensor,
        rank: int,
        stays: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Return messages about entries that are not 0. Those without room in them go to ``stays``; without that they
        are sums of owner ``rank``, and ``indices`` their rows."""
        from sparsync.kernels.balanced import triton as kernels
        from sparsync.kernels.message.bitmap_triton import count_marks

        size = values.numel()
        grid, sums = (-(-size // BLOCK),), stays is None
        stay_indices, stay_values = stays or (indices, values)
        with on_device_of(values):
            self.bitmap.zero_()
            self.messages.zero_()
            self.launch(
                kernels.mark, grid,
                indices, values, count, self.bitmap, self.stride, BLOCK=BLOCK, PARTS=self.parts, SUMS=sums,
            )  # fmt: skip
            self.launch(
                count_marks, (self.made * self.pieces,), self.bitmap, self.lines, self.sums, num_warps=8
            )  # fmt: skip
            self.launch(
                kernels.write_headers, (self.made,),
                self.sums, self.pieces, sent.count, sent.flags, sent.where, self.failed_exchange, self.messages,
                self.words, self.shape.capacity, MAGIC << 16 | VERSION, number, self.layout.id, self.layout.digest,
                BLOCK=1024,
            )  # fmt: skip
            self.launch(
                kernels.write, grid,
                indices, values, count, self.bitmap, self.lines, self.sums, self.messages, self.messages16,
                stay_indices, stay_values, self.starts, self.owners, self.spans, self.words, self.stride, rank,
                self.high_at, self.values_at, len(self.layout.segments), self.plane, self.shape.capacity, size,
                self.layout.numel,
                BLOCK=BLOCK, WIDTH=self.width, CODEC=self.codec, STEPS=self.steps, PARTS=self.parts, SUMS=sums,
            )  # fmt: skip
            programs = min(PIECES, -(-self.words // WORDS))
            self.launch(
                kernels.seal, (programs, self.made), self.messages, self.words, programs, self.totals, BLOCK=WORDS
            )  # fmt: skip
        return self.messages


class ScatterMessages(PartMessage):
    """The messages to all owners, and those that this owner gets."""

    def pack_parts(self, sent: SparseGrad, number: Tensor, stays: tuple[Tensor, Tensor]) -> Tensor:
        """Return a message to every owner, a row each; valid until the next call. What they have no room for, ``stays``
        gets: indices and values, as many as ``sent`` has."""
        assert sent.indices is not None
        return self._make(sent.indices, sent.values, sent.count, sent, number, 0, stays)

    def add_up(
        self, rows: Tensor, rank: int, failed_exchange: Tensor, number: Tensor, out: Tensor, listed: Tensor
    ) -> None:
        """List the sums of all that owner ``rank`` was sent, in the order of its messages ``rows``: of every entry, its
        row, and the sum or, where others share that, 0. Exchange ``number`` fails where an entry does not exist."""
        with on_device_of(out):
            out.zero_()
            self._sum(rows, failed_exchange, number, out, listed, None, rank)


class GatherMessage(PartMessage):
    """The message of this owner, and those of all."""

    def __init__(
        self,
        wire: Wire,
        layout: Layout,
        shape: Shape,
        workers: int,
        device: torch.device,
        failed_exchange: Tensor,
        divisor: int | None = None,
    ) -> None:
        super().__init__(wire, layout, shape, workers, 1, device, failed_exchange, divisor)
        self.tiles, self.begins = 0, self.message.new_zeros(workers)  # nothing is summed: where entries end is enough

    def pack_sums(
        self, rows: Tensor, values: Tensor, count: Tensor, sent: SparseGrad, rank: int, number: Tensor
    ) -> Tensor:
        """Return owner ``rank``'s message about sums that are not 0; ``sent``: what the rank sent itself."""
        self._make(rows, values, count, sent, number, rank, None)
        return self.message

    def write_mean(
        self, rows: Tensor, failed_exchange: Tensor, out: Tensor, overflow: Tensor | None, number: Tensor
    ) -> None:
        """Overwrite ``out`` with the result, from all owners' messages, as ``DeviceMessage.write_mean`` does."""
        from sparsync.kernels.balanced import triton as kernels

        out.zero_()
        with on_device_of(out):
            rows, rows16, indices, index_stride = self._indices(rows, failed_exchange, number)
            self.launch(
                kernels.write_mean, (-(-self.shape.capacity // PAIR), self.workers),
                rows, rows16, self.words, indices, index_stride, self.begins, out,
                failed_exchange if overflow is None else overflow, failed_exchange, number, self.starts, self.owners,
                self.spans, len(self.layout.segments), self.shape.capacity, self.shape.numel, self.layout.numel,
                self.divisor, self.values_at, self.plane,
                BLOCK=PAIR, CODEC=self.codec, STEPS=self.steps, PARTS=self.parts, CHECK=overflow is not None,
            )  # fmt: skip
