"""Shared-index all-reduce: every rank sends the same entries, so only their values travel."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sparsync.collectives.base import RING, MeanOf, Reduced, Traffic, Transfer, bad_ranks, bad_ranks_of
from sparsync.collectives.comm.channel import Channel
from sparsync.errors import Mismatch, name_ranks
from sparsync.kernels.message.header import EXTRA
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad
from sparsync.wire import HEADER, WORD, Wire, seal
from sparsync.workspace import Workspace


@dataclass(frozen=True)
class SharedIndexAllReduce:
    """The values of entries that all ranks draw alike are summed by the backend's own all-reduce.

    Goes with the random kinds. Traffic is 2(P-1)/P values a worker, however many workers there are. With
    ``values="bf16"`` they are summed in bf16, which rounds. A header is gathered first, with a checksum of the indices.
    What the backend sums has none: a bit that is flipped there is not noticed.
    """

    shared = True
    blocks = False
    deferrable = False
    graph_safe = True
    node_sums = True

    def check(self, wire: Wire, dense: bool, random: bool) -> None:
        if not random:
            raise ValueError(
                "collective='shared' needs the same entries on every rank: use it with 'random' or 'block', "
                "or use collective='allgather' with this compressor"
            )
        if wire.values not in ("fp32", "bf16"):
            raise ValueError(f"collective='shared' carries fp32 or bf16 values, not {wire.values!r}")

    def reduce(self, sent: SparseGrad, layout: Layout, channel: Channel, workspace: Workspace) -> Reduced:
        assert sent.indices is not None
        header = channel.wire.header(sent, channel.sequence, layout.id, layout.digest)
        header[EXTRA] = checksum = zlib.crc32(sent.indices.cpu().numpy().tobytes()) & 0x7FFFFFFF
        headers = channel.verify(channel.all_gather(seal(header)))
        odd = [rank for rank, other in enumerate(headers) if other.extra != headers[0].extra]
        if odd:
            ranks = name_ranks(channel.ranks[rank] for rank in odd)
            raise Mismatch(f"{ranks} drew other entries than rank {channel.ranks[0]} (checksum {checksum})")
        values = sent.values.to(channel.wire.codec.dtype or sent.values.dtype, copy=True)
        total = replace(sent, values=channel.all_reduce(values).to(sent.values.dtype))
        return Reduced(MeanOf([total], channel.divisor), bad_ranks=bad_ranks(headers))

    def reduce_local(
        self, sents: Sequence[SparseGrad], layout: Layout, wire: Wire, divisor: int | None = None
    ) -> list[Reduced]:
        dtype = wire.codec.dtype or sents[0].values.dtype
        values = torch.zeros_like(sents[0].values, dtype=dtype)
        for sent in sents:
            values = values + sent.values.to(dtype)
        values, bad = values.to(sents[0].values.dtype), bad_ranks_of(sents)
        return [Reduced(MeanOf([replace(sent, values=values)], divisor or len(sents)), bad_ranks=bad) for sent in sents]

    def traffic(self, layout: Layout, wire: Wire, workers: int, dtype: torch.dtype = torch.float32) -> Traffic:
        itemsize = (wire.codec.dtype or dtype).itemsize
        others, values = workers - 1, layout.capacity * itemsize
        header = Transfer(RING, others, others * HEADER * WORD)
        return Traffic.of(header, Transfer(RING, 2 * others, 2 * others / workers * values))

    def encoded_bytes(self, sents: Sequence[SparseGrad], layout: Layout, wire: Wire) -> list[float] | None:
        return None
