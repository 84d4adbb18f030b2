"""All-gather: every rank gets every rank's entries and sums them itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.collectives.base import Reduced, State, Traffic, bad_ranks, local_bad_ranks, shape_of
from sparsync.collectives.comm.channel import Channel
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad
from sparsync.wire import Wire
from sparsync.wire.device import DeviceMessage, carries


@dataclass
class Gathered(Reduced):
    """The messages of all ranks, read and summed by kernels."""

    post: DeviceMessage = None  # type: ignore[assignment]
    rows: Tensor = None  # type: ignore[assignment]
    verdict: Tensor = None  # type: ignore[assignment]

    def write_mean(self, out: Tensor, overflow: Tensor | None = None) -> None:
        self.post.write_mean(self.rows, self.verdict, out, overflow)


@dataclass(frozen=True)
class AllGather:
    """One message of fixed size from every rank to every rank; no sizes are exchanged, nothing is rejected."""

    shared = False
    blocks = True
    deferrable = True

    def check(self, wire: Wire, dense: bool, random: bool) -> None:
        if dense:
            raise ValueError("a compressor that sends every entry goes with collective='dense', not 'allgather'")

    def init(self, layout: Layout, workers: int) -> State:
        return {}

    def reduce(self, sent: SparseGrad, layout: Layout, channel: Channel, state: State) -> Reduced:
        if carries(channel.wire, sent):
            return self._by_kernels(sent, layout, channel, state)
        shape = shape_of(layout, sent.values.dtype)
        header = channel.wire.header(sent, channel.sequence, layout.id, layout.digest)
        rows = channel.all_gather(channel.wire.encode(sent, layout.segment_of, shape, header))
        headers = channel.verify(rows)
        total = [channel.wire.decode(row, layout.segment_of, shape) for row in rows]
        return Reduced(total, divisor=len(rows), bad=bad_ranks(headers))

    def _by_kernels(self, sent: SparseGrad, layout: Layout, channel: Channel, state: State) -> Reduced:
        device = sent.values.device
        post: DeviceMessage | None = state.get("post")
        if post is None or post.layout is not layout or post.message.device != device:
            shape = shape_of(layout, sent.values.dtype)
            post = state["post"] = DeviceMessage(channel.wire, layout, shape, channel.size, device)
            state["rows"] = channel.room_for(post.message)
        rows = channel.all_gather(post.pack(sent, channel.sequence), state["rows"])
        bad = bad_ranks(channel.verify(rows))
        return Gathered((), post.workers, None, bad, post, rows, channel.device_status(device).verdict)

    def reduce_local(self, sents: Sequence[SparseGrad], layout: Layout, state: State, wire: Wire) -> list[Reduced]:
        bad = local_bad_ranks(sents)
        return [Reduced(list(sents), divisor=len(sents), bad=bad) for _ in sents]

    def traffic(self, layout: Layout, wire: Wire, workers: int, dtype: torch.dtype = torch.float32) -> Traffic:
        bytes_sent = (workers - 1) * wire.bytes(shape_of(layout, dtype))
        return Traffic(bytes_sent, bytes_sent, workers - 1)
