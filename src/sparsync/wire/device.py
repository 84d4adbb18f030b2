"""Messages made and read on the device, in buffers that stay: no host synchronisation, no allocation.

Equal bit for bit to ``Wire.encode`` of sorted entries and to ``write_mean`` of decoded messages; the kernels are in
``kernels.message``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsync.kernels.codecs import CODEC_NUMBERS
from sparsync.kernels.device import on_device_of, usable_on
from sparsync.kernels.launcher import Launcher
from sparsync.kernels.message.header import HEADER, SUM
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad
from sparsync.wire.bits import words_for
from sparsync.wire.indices import ef_width, ef_words
from sparsync.wire.message import MAGIC, VERSION, Wire
from sparsync.wire.shape import Shape

BLOCK = 128  # entries
PIECE = 4096 * 32  # entries of the gradient whose marks one program counts
WORDS = 1024  # of a message that are summed at a time
HIGH = 256  # words of an Elias-Fano coded message that one program reads
TILE = 8192  # entries of the gradient that are summed at a time
PIECES = 256  # programs that share the sum over a message, at most
PROGRAMS = 2112  # that stay: sixteen for each multiprocessor of the largest GPUs
RANKS = 16  # at most, whose entries are read at once
MOST = 2**31 - PIECE


def carries(wire: Wire, sent: SparseGrad) -> bool:
    """Return whether messages about ``sent`` can be made here."""
    simple = wire.values in CODEC_NUMBERS and wire.indices in ("int", "ef") and sent.indices is not None
    return simple and sent.values.dtype == torch.float32 and 0 < sent.numel < MOST and usable_on(sent.values.device)


class DeviceMessage:
    """Makes and reads the messages about one layout.

    Args:
        workers: how many ranks' messages are read.
        failed_exchange: 0-d int32 tensor; messages say so where it is not 0.
        divisor: of their sum; their number.
        made: how many messages are made at once.
    """

    parts = 0  # of the gradient, of which messages are about one each; 0: about all of it

    def __init__(
        self,
        wire: Wire,
        layout: Layout,
        shape: Shape,
        workers: int,
        device: torch.device,
        failed_exchange: Tensor | None = None,
        divisor: int | None = None,
        made: int = 1,
    ) -> None:
        self.layout, self.shape, self.workers, self.launch = layout, shape, workers, Launcher()
        self.divisor = float(divisor or workers)
        self.codec = CODEC_NUMBERS[wire.values]
        self.words = wire.bytes(shape) // 4
        self.values_at = HEADER + wire.index_codec.words(shape)
        self.plane = words_for(shape.capacity)
        low, self.high_words = ef_words(shape.numel, shape.capacity)
        self.width = ef_width(shape.numel, shape.capacity) if wire.indices == "ef" else -1
        self.high_at = HEADER + low
        self.high_blocks = -(-self.high_words // HIGH)
        self.tiles = -(-shape.numel // TILE)
        spans = sorted((span.start, i) for i, segment in enumerate(layout.segments) for span in segment.spans)
        self.starts = torch.tensor([start for start, _ in spans], dtype=torch.int64, device=device)
        self.owners = torch.tensor([owner for _, owner in spans], dtype=torch.int64, device=device)
        self.spans = len(spans)
        self.steps = max(0, (self.spans - 1).bit_length()) if len(layout.segments) > 1 else 0
        self.pieces, self.entries = -(-shape.numel // PIECE), -(-shape.capacity // BLOCK)

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.failed_exchange = zeros() if failed_exchange is None else failed_exchange
        self.messages = zeros(made, self.words)
        self.message = self.messages[0]
        self.message16 = self.message.view(torch.int16)
        self.checksum = self.message[SUM : SUM + 2].view(torch.int64)
        self._read: tuple[Tensor, Tensor, Tensor] | None = None
        self.gathered: Tensor | None = None
        pieces = made * self.pieces
        self.bitmap, self.lines, self.sums = zeros(pieces * 4096), zeros(pieces * 128), zeros(pieces)
        self.begins = zeros(workers, self.tiles + 1)
        self.programs = min(PROGRAMS, self.tiles)
        self.scratch: Tensor | None = None
        usual = 2 * TILE * shape.capacity // shape.numel  # entries of a tile, and as many again
        self.lanes = min(128, max(16, 1 << usual.bit_length()))
        self.ranks = min(RANKS, max(2, 1 << (workers - 1).bit_length()))
        if self.width >= 0:
            self.ones, self.indices = zeros(workers, self.high_blocks), zeros(workers, shape.capacity)

    def pack(self, sent: SparseGrad, number: Tensor) -> Tensor:
        """Return the message, its entries in ascending order; valid until the next call. ``number``: of the exchange, a
        0-d int32 tensor here and below."""
        from sparsync.kernels.message.bitmap_triton import count_marks, mark, unmark
        from sparsync.kernels.message.encode_triton import write
        from sparsync.kernels.message.header_triton import write_header

        assert sent.indices is not None
        entries = self.entries
        with on_device_of(sent.values):
            self.launch(
                mark, (entries,),
                sent.indices, sent.count, self.bitmap, self.message, self.words, entries, BLOCK=BLOCK
            )  # fmt: skip
            self.launch(count_marks, (self.pieces,), self.bitmap, self.lines, self.sums, num_warps=8)
            self.launch(
                write_header, (1,),
                self.sums, self.pieces, sent.count, sent.flags, sent.where, self.failed_exchange, self.message,
                MAGIC << 16 | VERSION, number, self.layout.id, self.layout.digest, BLOCK=1024, SEALED=False,
            )  # fmt: skip
            self.launch(
                write, (entries,),
                sent.indices, sent.values, sent.count, self.bitmap, self.lines, self.sums, self.message,
                self.message16, self.starts, self.owners, self.spans, self.high_at, self.values_at,
                len(self.layout.segments), self.plane,
                BLOCK=BLOCK, WIDTH=self.width, CODEC=self.codec, STEPS=self.steps,
            )  # fmt: skip
            self.launch(
                unmark, (entries,),
                sent.indices, sent.count, self.bitmap, self.message, self.words, self.checksum, min(PIECES, entries),
                BLOCK=BLOCK, PIECE=WORDS,
            )  # fmt: skip
        return self.message

    def write_mean(
        self, rows: Tensor, failed_exchange: Tensor, out: Tensor, overflow: Tensor | None, number: Tensor
    ) -> None:
        """Overwrite ``out`` with the mean of the messages ``rows``, summed in their order; with 0 where
        ``failed_exchange`` is not 0. ``overflow`` becomes 1 where that is not finite; ``failed_exchange`` becomes
        ``number``, this exchange, where a message has entries that do not exist."""
        out.zero_()
        with on_device_of(out):
            self._sum(rows, failed_exchange, number, out, out, overflow, 0)

    def _sum(
        self,
        rows: Tensor,
        failed_exchange: Tensor,
        number: Tensor,
        out: Tensor,
        listed: Tensor,
        overflow: Tensor | None,
        part: int,
    ) -> None:
        """Add the messages ``rows`` up, tile by tile."""
        from sparsync.kernels.message.mean_triton import find_tiles, sum_tiles

        if self.scratch is None:
            self.scratch = self.message.new_zeros(self.programs * TILE)
        rows, rows16, indices, index_stride = self._indices(rows, failed_exchange, number)
        self.launch(
            find_tiles, (self.workers, -(-(self.tiles + 1) // BLOCK)),
            rows, self.words, indices, index_stride, failed_exchange, number, self.begins, self.tiles,
            self.shape.capacity, TILE=TILE, STEPS=self.shape.capacity.bit_length(), BLOCK=BLOCK,
        )  # fmt: skip
        self.launch(
            sum_tiles, (self.programs,),
            rows, rows16, self.words, indices, index_stride, self.begins, self.scratch, out,
            failed_exchange if overflow is None else overflow, failed_exchange, number, self.starts, self.owners,
            self.spans, len(self.layout.segments), self.tiles, self.programs, self.workers, self.divisor,
            self.values_at, self.plane, self.shape.numel, listed, self.shape.capacity, part,
            TILE=TILE, LANES=self.lanes, RANKS=self.ranks, CODEC=self.codec, STEPS=self.steps,
            CHECK=overflow is not None, PARTS=self.parts, num_warps=max(1, min(4, self.ranks * self.lanes // 128)),
        )  # fmt: skip

    def _indices(self, rows: Tensor, failed_exchange: Tensor, number: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return messages, the same in 16-bit words, their entries' indices, and how far those of two messages are
        apart."""
        from sparsync.kernels.message.decode_triton import count_ones, expand

        rows, rows16, indices = self._views(rows)
        if self.width < 0:
            return rows, rows16, indices, self.words
        blocks = self.high_blocks
        high = (rows, self.words, self.high_at, self.high_words, self.ones, blocks)
        self.launch(count_ones, (blocks, self.workers), *high, BLOCK=HIGH)
        self.launch(
            expand, (blocks, self.workers),
            *high, self.indices, self.shape.capacity, failed_exchange, number, BLOCK=HIGH,
            BLOCKS=max(2, 1 << (blocks - 1).bit_length()), WIDTH=self.width,
        )  # fmt: skip
        return rows, rows16, self.indices, self.shape.capacity

    def give_norm(self, rows: Tensor, out: Tensor, norms: Tensor, scale: float) -> Tensor:
        """Do as ``sparse.give_norm`` on the mean that was just written, where it has entries: the others are 0. The
        next call overwrites what is returned.

        The sum of squares of a mean is that of each rank's values times it, over the ranks.
        """
        from sparsync.kernels.message.norm_triton import find_factor, gather_mean, multiply_mean

        rows, rows16, indices = self._views(rows)
        index_stride = self.words
        if self.width >= 0:
            indices, index_stride = self.indices, self.shape.capacity
        grid = (self.entries, self.workers)
        if self.gathered is None:
            self.gathered = torch.zeros(self.workers, self.shape.capacity, dtype=torch.float32, device=out.device)
            self.products = torch.zeros(self.workers, self.entries, device=out.device, dtype=torch.float64)
            self.peaks = torch.zeros(self.workers, self.entries, dtype=torch.float32, device=out.device)
            self.factor = torch.ones((), dtype=torch.float32, device=out.device)
        with on_device_of(out):
            self.launch(
                gather_mean, grid,
                rows, rows16, self.words, indices, index_stride, self.begins, out, self.gathered, self.products,
                self.starts, self.owners, self.spans, len(self.layout.segments), self.tiles, self.shape.capacity,
                self.entries, self.values_at, self.plane, self.layout.numel, self.peaks, BLOCK=BLOCK, CODEC=self.codec,
                STEPS=self.steps, PARTS=self.parts,
            )  # fmt: skip
            self.launch(
                find_factor, (1,),
                self.products, self.products.numel(), self.divisor, norms, norms.numel(), scale, self.factor,
                self.peaks, BLOCK=1024, HALF=out.dtype == torch.float16, num_warps=8,
            )  # fmt: skip
            self.launch(
                multiply_mean, grid,
                indices, index_stride, self.begins, self.gathered, self.factor, out, self.tiles, self.shape.capacity,
                self.layout.numel, BLOCK=BLOCK, PARTS=self.parts,
            )  # fmt: skip
        return self.factor

    def _views(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return messages, the same in 16-bit words, and their entries' indices."""
        if self._read is None or self._read[0] is not rows:
            self._read = rows, rows.view(torch.int16), rows.view(-1)[HEADER:]
        return self._read
