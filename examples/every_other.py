"""A collective of one's own: an all-gather of every other entry; the rest goes back to the sender's residual."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sparsync import Collective, Layout, Reduced, SparseGrad, Traffic
from sparsync.plugins import Channel, MeanOf, Wire, Workspace, bad_ranks, bad_ranks_of, shape_of


@dataclass(frozen=True)
class EveryOther(Collective):
    """Every rank sends one half of its entries to all; the other half is rejected."""

    def reduce(self, sent: SparseGrad, layout: Layout, channel: Channel, workspace: Workspace) -> Reduced:
        goes, stays = self.split(sent)
        wire, shape = channel.wire, shape_of(layout, sent.values.dtype)
        header = wire.header(goes, channel.sequence, layout.id, layout.digest)
        rows = channel.all_gather(wire.encode(goes, layout.segment_of, shape, header))
        headers = channel.verify(rows)  # raises on every rank alike, if a rank failed or is at another exchange
        mean = MeanOf([wire.decode(row, layout.segment_of, shape) for row in rows], channel.size)
        return Reduced(mean, stays, bad_ranks(headers))

    def reduce_local(self, sents: Sequence[SparseGrad], layout: Layout, wire: Wire) -> list[Reduced]:
        halves = [self.split(sent) for sent in sents]
        mean = MeanOf([goes for goes, _ in halves], len(sents))
        return [Reduced(mean, stays, bad_ranks_of(sents)) for _, stays in halves]

    def traffic(self, layout: Layout, wire: Wire, workers: int, dtype: torch.dtype = torch.float32) -> Traffic:
        sent = (workers - 1) * wire.bytes(shape_of(layout, dtype))
        return Traffic(sent, sent, workers - 1)

    def split(self, sent: SparseGrad) -> tuple[SparseGrad, SparseGrad]:
        even = torch.arange(sent.values.numel(), device=sent.values.device) % 2 == 0
        return replace(sent, values=sent.values * even), replace(sent, values=sent.values * ~even)
