"""Dense all-reduce: the backend's own sum over every entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.collectives.base import RING, MeanOf, Reduced, Traffic, Transfer, bad_ranks, bad_ranks_of
from sparsync.collectives.comm.channel import Channel
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad
from sparsync.wire import HEADER, WORD, Wire
from sparsync.workspace import Workspace


@dataclass(frozen=True)
class DenseAllReduce:
    """The mean of the whole gradient, computed as DDP computes it: every rank scales by 1/P, then they sum.

    Values travel as they are or, with ``values="bf16"``, as bf16: they are then summed in bf16 and divided after. A
    header of 40 bytes is gathered first, so that a rank that failed, or is at another bucket, is noticed before
    anything is summed. What the backend sums has no checksum: a bit that is flipped there is not noticed.

    Args:
        exact: values travel as they are, whatever the wire's codec.
    """

    exact: bool = False
    shared = False
    blocks = False
    deferrable = True
    graph_safe = True
    node_sums = True

    def check(self, wire: Wire, dense: bool, random: bool) -> None:
        if not self.exact and wire.values not in ("fp32", "bf16"):
            raise ValueError(f"collective='dense' carries fp32 or bf16 values, not {wire.values!r}")

    def reduce(self, sent: SparseGrad, layout: Layout, channel: Channel, workspace: Workspace) -> Reduced:
        headers = channel.verify(channel.gather_headers(sent, layout, workspace))
        whole = sent.values if sent.indices is None else sent.densify()
        dtype = self._dtype(channel.wire)
        if dtype is None:
            total = channel.all_reduce(whole.mul_(1 / channel.divisor) if channel.divisor > 1 else whole)
            mean = MeanOf([self._dense(total, sent)], 1)
        else:
            total = channel.all_reduce(whole.to(dtype)).to(whole.dtype)
            mean = MeanOf([self._dense(total, sent)], channel.divisor)
        return Reduced(mean, bad_ranks=bad_ranks(headers))

    def reduce_local(
        self, sents: Sequence[SparseGrad], layout: Layout, wire: Wire, divisor: int | None = None
    ) -> list[Reduced]:
        own, dtype, workers = sents[0].values.dtype, self._dtype(wire), divisor or len(sents)
        part, divisor = (1 / workers, 1) if dtype is None else (1.0, workers)
        total = torch.zeros_like(sents[0].densify(), dtype=dtype or own)
        for sent in sents:
            total = total + (sent.densify() * part).to(total.dtype)
        bad = bad_ranks_of(sents)
        return [Reduced(MeanOf([self._dense(total.to(own), sent)], divisor), bad_ranks=bad) for sent in sents]

    def traffic(self, layout: Layout, wire: Wire, workers: int, dtype: torch.dtype = torch.float32) -> Traffic:
        itemsize = (self._dtype(wire) or dtype).itemsize
        others, values = workers - 1, layout.numel * itemsize
        header = Transfer(RING, others, others * HEADER * WORD)
        return Traffic.of(header, Transfer(RING, 2 * others, 2 * others / workers * values))

    def encoded_bytes(self, sents: Sequence[SparseGrad], layout: Layout, wire: Wire) -> list[float] | None:
        return None

    def _dtype(self, wire: Wire) -> torch.dtype | None:
        """Return what the values are cast to on the wire, if anything."""
        return None if self.exact else wire.codec.dtype

    @staticmethod
    def _dense(total: Tensor, sent: SparseGrad) -> SparseGrad:
        return SparseGrad(None, total, sent.count, sent.numel, sent.flags, sent.where)
