"""Dense sums in parts: every rank sums its part in fp32, in rank order, and sends the sum to all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsync.collectives.base import (
    PAIRS,
    RING,
    FiniteFlag,
    Mean,
    MeanOf,
    Reduced,
    Traffic,
    Transfer,
    bad_ranks,
    bad_ranks_of,
)
from sparsync.collectives.comm.channel import Channel
from sparsync.kernels.by_parts.launch import PartBuffers, part_of
from sparsync.kernels.device import usable_on
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad
from sparsync.wire import HEADER, WORD, Wire
from sparsync.workspace import Workspace


class Piece(NamedTuple):
    """Entries next to each other: how many, how many of them a rank sums, and what sums travel as."""

    numel: int
    part: int
    sums: torch.dtype


@dataclass
class MeanOfParts(Mean):
    """The mean of whole vectors, from the sums of all parts."""

    buffers: PartBuffers
    sums: Tensor

    def write(self, out: Tensor, flag: FiniteFlag | None = None) -> None:
        self.buffers.write_mean(self.sums, out, None if flag is None else flag.bad)


@dataclass(frozen=True)
class ReduceByParts:
    """The mean of whole vectors in the bytes of a ring all-reduce, with sums that no backend makes.

    A backend sums bf16 in bf16, in an order of its own. Here each rank is sent all ranks' values for its 1/P of the
    entries, adds them in fp32 in rank order, and what it sends to all is rounded once: the same bits on every rank,
    and the same as in one process. Headers have a checksum, values have none.

    Args:
        half: values and sums travel as bf16; else as fp32.
        full_sums: of the first so many entries sums travel as fp32 all the same, so that nothing of them is lost but
            what each rank knows of: the rounding of its own values.
    """

    half: bool = False
    full_sums: int = 0
    shared = False
    blocks = False
    deferrable = True
    graph_safe = True
    node_sums = True

    def check(self, wire: Wire, dense: bool, random: bool) -> None:
        if not dense:
            raise ValueError("sums in parts carry whole vectors, and this compressor chooses entries")

    def reduce(self, sent: SparseGrad, layout: Layout, channel: Channel, workspace: Workspace) -> Reduced:
        whole, workers = sent.values if sent.indices is None else sent.densify(), channel.size
        header = channel.checks.header(channel.wire, sent, channel.sequence, layout, workspace)
        if whole.dtype != torch.float64 and usable_on(whole.device):
            return self._by_kernels(whole, header.to(whole.device), channel, workspace)
        pieces = self._pieces(layout.numel, workers)
        cut = [
            pad(values, (0, workers * piece.part - piece.numel)).view(workers, piece.part)
            for values, piece in zip(torch.split(whole, [piece.numel for piece in pieces]), pieces, strict=True)
        ]
        words = _words(_cat(cut, 1), self._dtype)
        rows = channel.all_to_all(torch.cat([header.to(words.device).expand(workers, HEADER), words], 1))
        headers = channel.verify(rows[:, :HEADER])
        sums = torch.split(_sum(_values(rows[:, HEADER:], self._dtype).unbind()), [piece.part for piece in pieces])
        own = [_words(values, piece.sums) for values, piece in zip(sums, pieces, strict=True)]
        gathered = torch.split(channel.all_gather(_cat(own)), [values.numel() for values in own], 1)
        totals = zip(gathered, pieces, strict=True)
        total = _cat([_values(part, piece.sums).view(-1)[: piece.numel] for part, piece in totals])
        return Reduced(MeanOf([_dense(total, sent)], channel.divisor), bad_ranks=bad_ranks(headers))

    def _by_kernels(self, whole: Tensor, header: Tensor, channel: Channel, workspace: Workspace) -> Reduced:
        made_for = (whole.numel(), channel.size, whole.device)
        full = min(whole.numel(), self.full_sums)
        sizes = whole.numel(), full, channel.size
        make = lambda: PartBuffers(*sizes, self.half, whole.device, channel.divisor)  # noqa: E731
        buffers = workspace.get(PartBuffers, made_for, make)
        rows = channel.all_to_all(buffers.pack(whole, header), buffers.received)
        headers, own = channel.verify(buffers.headers_of(rows)), buffers.add(rows)
        if buffers.gathered is None:
            buffers.gathered = channel.room_for(own)
        sums = channel.all_gather(own, buffers.gathered)
        return Reduced(MeanOfParts(buffers, sums), bad_ranks=bad_ranks(headers))

    def reduce_local(
        self, sents: Sequence[SparseGrad], layout: Layout, wire: Wire, divisor: int | None = None
    ) -> list[Reduced]:
        total = _sum([sent.densify().to(self._dtype).float() for sent in sents])
        total[self.full_sums :] = total[self.full_sums :].to(self._dtype).float()
        mean, bad = MeanOf([_dense(total, sents[0])], divisor or len(sents)), bad_ranks_of(sents)
        return [Reduced(mean, bad_ranks=bad) for _ in sents]

    def traffic(self, layout: Layout, wire: Wire, workers: int, dtype: torch.dtype = torch.float32) -> Traffic:
        pieces = self._pieces(layout.numel, workers)
        there = HEADER * WORD + sum(piece.part * self._dtype.itemsize for piece in pieces)
        back = sum(piece.part * piece.sums.itemsize for piece in pieces)
        others = workers - 1
        return Traffic.of(Transfer(PAIRS, others, others * there), Transfer(RING, others, others * back))

    def encoded_bytes(self, sents: Sequence[SparseGrad], layout: Layout, wire: Wire) -> list[float] | None:
        return None

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.half else torch.float32

    def _pieces(self, numel: int, workers: int) -> list[Piece]:
        """Return the entries whose sums travel in full, and the others, as far as there are any."""
        first, others = min(numel, self.full_sums), max(0, numel - self.full_sums)
        found = ((first, torch.float32), (others, self._dtype))
        return [Piece(count, part_of(count, workers), dtype) for count, dtype in found if count]


def _cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _words(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).view(torch.int32)


def _values(words: Tensor, dtype: torch.dtype) -> Tensor:
    return words.contiguous().view(dtype).float()


def _sum(rows: Sequence[Tensor]) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def _dense(total: Tensor, sent: SparseGrad) -> SparseGrad:
    return SparseGrad(None, total, sent.count, sent.numel, sent.flags, sent.where)
