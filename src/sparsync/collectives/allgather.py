"""All-gather: every rank gets every rank's entries and sums them itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.collectives.base import (
    RING,
    FiniteFlag,
    Mean,
    MeanOf,
    MeanOfMessages,
    Reduced,
    Traffic,
    Transfer,
    bad_ranks,
    bad_ranks_of,
    message_bytes,
    shape_of,
)
from sparsync.collectives.comm.channel import Channel
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad
from sparsync.wire import Shape, Wire, host
from sparsync.wire.device import DeviceMessage, carries
from sparsync.workspace import Workspace


class GatherBuffers:
    """The message of this rank, made by kernels, and room for those of all ranks."""

    def __init__(self, layout: Layout, dtype: torch.dtype, channel: Channel, device: torch.device) -> None:
        shape = shape_of(layout, dtype)
        failed_exchange = channel.checks.failed_exchange(device)
        self.message = DeviceMessage(
            channel.wire, layout, shape, channel.size, device, failed_exchange, channel.divisor
        )
        self.rows = channel.room_for(self.message.message)


@dataclass
class MeanOfRows(Mean):
    """The mean of the messages of all ranks, read and summed as it is written: on a host in one pass, if it can be."""

    rows: Tensor
    wire: Wire
    layout: Layout
    shape: Shape
    divisor: int

    def write(self, out: Tensor, flag: FiniteFlag | None = None) -> None:
        if not self.write_parts([(0, out)], flag):
            terms = [self.wire.decode(row, self.layout.segment_of, self.shape) for row in self.rows]
            MeanOf(terms, self.divisor).write(out, flag)

    def write_parts(self, parts: Sequence[tuple[int, Tensor]], flag: FiniteFlag | None = None) -> bool:
        finite = host.write_mean(self.wire, self.rows, self.layout, self.shape, self.divisor, parts)
        if flag is not None and finite is False:
            flag.bad.fill_(1)
        return finite is not None


@dataclass(frozen=True)
class AllGather:
    """One message of fixed size from every rank to every rank; no sizes are exchanged, nothing is rejected."""

    shared = False
    blocks = True
    deferrable = True
    graph_safe = True
    node_sums = True

    def check(self, wire: Wire, dense: bool, random: bool) -> None:
        if dense:
            raise ValueError("a compressor that sends every entry goes with collective='dense', not 'allgather'")

    def reduce(self, sent: SparseGrad, layout: Layout, channel: Channel, workspace: Workspace) -> Reduced:
        if carries(channel.wire, sent):
            return self._by_kernels(sent, layout, channel, workspace)
        shape = shape_of(layout, sent.values.dtype)
        header = channel.wire.header(sent, channel.sequence, layout.id, layout.digest)
        rows = channel.all_gather(channel.wire.encode(sent, layout.segment_of, shape, header))
        headers = channel.verify(rows)
        return Reduced(MeanOfRows(rows, channel.wire, layout, shape, channel.divisor), bad_ranks=bad_ranks(headers))

    def _by_kernels(self, sent: SparseGrad, layout: Layout, channel: Channel, workspace: Workspace) -> Reduced:
        device, dtype = sent.values.device, sent.values.dtype
        make = lambda: GatherBuffers(layout, dtype, channel, device)  # noqa: E731
        buffers = workspace.get(GatherBuffers, (layout.digest, device), make)
        rows = channel.all_gather(buffers.message.pack(sent, channel.number(device)), buffers.rows)
        headers = channel.verify(rows)
        failed = channel.checks.failed_exchange(device)
        mean = MeanOfMessages(buffers.message, rows, failed, channel.number(device))
        return Reduced(mean, bad_ranks=bad_ranks(headers))

    def reduce_local(
        self, sents: Sequence[SparseGrad], layout: Layout, wire: Wire, divisor: int | None = None
    ) -> list[Reduced]:
        bad = bad_ranks_of(sents)
        return [Reduced(MeanOf(list(sents), divisor or len(sents)), bad_ranks=bad) for _ in sents]

    def traffic(self, layout: Layout, wire: Wire, workers: int, dtype: torch.dtype = torch.float32) -> Traffic:
        return Traffic.of(Transfer(RING, workers - 1, (workers - 1) * wire.bytes(shape_of(layout, dtype))))

    def encoded_bytes(self, sents: Sequence[SparseGrad], layout: Layout, wire: Wire) -> list[float] | None:
        return [(len(sents) - 1.0) * message_bytes(sents[0], layout, wire)] * len(sents)
