"""Dense sums in parts: every rank sums its part in fp32, in rank order, and sends the sum to all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsync.collectives.base import MeanOf, Reduced, Traffic, bad_ranks, bad_ranks_of
from sparsync.collectives.comm.channel import Channel
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad
from sparsync.wire import HEADER, WORD, Wire
from sparsync.workspace import Workspace


@dataclass(frozen=True)
class ReduceByParts:
    """The mean of whole vectors in the bytes of a ring all-reduce, with sums that no backend makes.

    A backend sums bf16 in bf16, in an order of its own. Here each rank is sent all ranks' values for its 1/P of the
    entries, adds them in fp32 in rank order, and what it sends to all is rounded once: the same bits on every rank,
    and the same as in one process. Headers have a checksum, values have none.

    Args:
        half: values and sums travel as bf16; else as fp32.
    """

    half: bool = False
    shared = False
    blocks = False
    deferrable = True
    graph_safe = True

    def check(self, wire: Wire, dense: bool, random: bool) -> None:
        if not dense:
            raise ValueError("sums in parts carry whole vectors, and this compressor chooses entries")

    def reduce(self, sent: SparseGrad, layout: Layout, channel: Channel, workspace: Workspace) -> Reduced:
        whole = sent.values if sent.indices is None else sent.densify()
        header = channel.checks.header(channel.wire, sent, channel.sequence, layout, workspace)
        part = self._part(layout.numel, channel.size)
        words = self._words(pad(whole, (0, part * channel.size - layout.numel)).view(channel.size, part))
        rows = channel.all_to_all(torch.cat([header.to(words.device).expand(channel.size, HEADER), words], 1))
        headers = channel.verify(rows[:, :HEADER])
        own = self._words(self._sum(self._values(rows[:, HEADER:]).unbind()).unsqueeze(0))
        total = self._values(channel.all_gather(own[0])).view(-1)[: layout.numel]
        return Reduced(MeanOf([self._dense(total, sent)], channel.size), bad_ranks=bad_ranks(headers))

    def reduce_local(self, sents: Sequence[SparseGrad], layout: Layout, wire: Wire) -> list[Reduced]:
        total = self._rounded(self._sum([self._rounded(sent.densify()) for sent in sents]))
        mean, bad = MeanOf([self._dense(total, sents[0])], len(sents)), bad_ranks_of(sents)
        return [Reduced(mean, bad_ranks=bad) for _ in sents]

    def traffic(self, layout: Layout, wire: Wire, workers: int, dtype: torch.dtype = torch.float32) -> Traffic:
        part = self._part(layout.numel, workers) * (2 if self.half else 4)
        bytes_sent = (workers - 1) * (HEADER * WORD + 2 * part)
        return Traffic(bytes_sent, bytes_sent, 2 * (workers - 1))

    def encoded_bytes(self, sents: Sequence[SparseGrad], layout: Layout, wire: Wire) -> list[float] | None:
        return None

    @staticmethod
    def _part(numel: int, workers: int) -> int:
        """Return how many entries a rank sums; even, as two of bf16 make a word."""
        return -(-numel // (2 * workers)) * 2

    def _words(self, rows: Tensor) -> Tensor:
        return rows.to(torch.bfloat16 if self.half else torch.float32).view(torch.int32)

    def _values(self, words: Tensor) -> Tensor:
        return words.contiguous().view(torch.bfloat16 if self.half else torch.float32).float()

    def _rounded(self, values: Tensor) -> Tensor:
        return values.to(torch.bfloat16).float() if self.half else values.float()

    @staticmethod
    def _sum(rows: Sequence[Tensor]) -> Tensor:
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        return total

    @staticmethod
    def _dense(total: Tensor, sent: SparseGrad) -> SparseGrad:
        return SparseGrad(None, total, sent.count, sent.numel, sent.flags, sent.where)
