"""gTop-k: partial sums climb a tree and only the k largest go on; what is dropped stays with whoever drops it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.collectives.base import Reduced, State, Traffic, as_sent, left_of, local_bad_ranks, shape_of
from sparsync.collectives.channel import Channel
from sparsync.errors import PeerFailed
from sparsync.layout import Layout
from sparsync.sparse import FAILED, NONFINITE, SparseGrad
from sparsync.wire import Wire


@dataclass(frozen=True)
class GTopK:
    """About the k largest entries of the sum over all ranks, in O(k log P) rounds of one message.

    (Shi et al., 2019.) In round r, rank i + 2^r sends its partial sum to rank i, which adds it to its own and keeps the
    k largest of every segment; any number of ranks will do. The published form loses what is dropped on the way while
    its index survives elsewhere; here it goes into the residual of the rank that dropped it.
    """

    shared = False
    blocks = False
    deferrable = False

    def check(self, wire: Wire, dense: bool, random: bool) -> None:
        if dense:
            raise ValueError("a compressor that sends every entry goes with collective='dense', not 'gtopk'")
        if wire.codec.signs:
            raise ValueError("collective='gtopk' sends partial sums, which have no common scale: not values='sign'")

    def init(self, layout: Layout, workers: int) -> State:
        return {}

    def reduce(self, sent: SparseGrad, layout: Layout, channel: Channel, state: State) -> Reduced:
        shape, partial, dropped = shape_of(layout, sent.values.dtype), sent, []
        culprit = channel.rank if int(sent.flags) else -1

        def message(grad: SparseGrad) -> Tensor:
            header = channel.wire.header(grad, channel.sequence, layout.id, layout.digest)
            header[7] = culprit
            return channel.wire.encode(grad, layout.segment_of, shape, header)

        def receive(source: int, like: Tensor) -> tuple[SparseGrad, int]:
            got = channel.receive(torch.empty_like(like), source)
            header = channel.verify_pair(like, got, source)
            return channel.wire.decode(got, layout.segment_of, shape), header.extra

        mine, reach = message(partial), 1
        while reach < channel.size and channel.rank % (2 * reach) == 0:
            source = channel.rank + reach
            if source < channel.size:
                other, who = receive(source, mine)
                partial, lost = merge(partial, other, layout, channel.wire)
                culprit = culprit if culprit >= 0 else who
                dropped.append(lost)
                mine = message(partial)
            reach *= 2
        if channel.rank:
            channel.send(mine, channel.rank - reach)
            partial, culprit = receive(channel.rank - reach, mine)
            mine = message(partial)
        while reach > 1:
            reach //= 2
            if channel.rank + reach < channel.size:
                channel.send(mine, channel.rank + reach)
        channel.sequence += 1
        if int(partial.flags) & FAILED:
            raise PeerFailed(channel.board.cause(culprit))
        bad = [(culprit, int(partial.where))] if int(partial.flags) & NONFINITE else []
        return Reduced([partial], channel.size, _together(dropped), bad)

    def reduce_local(self, sents: Sequence[SparseGrad], layout: Layout, state: State, wire: Wire) -> list[Reduced]:
        partial, dropped = list(sents), [[] for _ in sents]  # type: ignore[var-annotated]
        reach = 1
        while reach < len(sents):
            for rank in range(0, len(sents) - reach, 2 * reach):
                partial[rank], lost = merge(partial[rank], partial[rank + reach], layout, wire)
                dropped[rank].append(lost)
            reach *= 2
        bad = local_bad_ranks(sents)[:1]
        return [Reduced([partial[0]], len(sents), _together(lost), bad) for lost in dropped]

    def traffic(self, layout: Layout, wire: Wire, workers: int, dtype: torch.dtype = torch.float32) -> Traffic:
        message = wire.bytes(shape_of(layout, dtype))
        rounds = (workers - 1).bit_length()
        return Traffic(
            2 * (workers - 1) / workers * message, max(rounds, 1 if workers > 1 else 0) * message, 2 * rounds
        )


def merge(ours: SparseGrad, theirs: SparseGrad, layout: Layout, wire: Wire) -> tuple[SparseGrad, SparseGrad]:
    """The k largest entries of every segment of ``ours + theirs`` as they travel, and all that is left of the sum."""
    assert ours.indices is not None
    assert theirs.indices is not None
    real = [grad.values != 0 for grad in (ours, theirs)]
    indices = torch.cat([ours.indices[real[0]], theirs.indices[real[1]]])
    unique, place = torch.unique(indices, return_inverse=True)
    sums = ours.values.new_zeros(unique.numel())
    split = int(real[0].sum())
    sums.index_add_(0, place[:split], ours.values[real[0]])
    sums.index_add_(0, place[split:], theirs.values[real[1]])

    segment = layout.segment_of(unique)
    order = torch.sort(sums.abs(), descending=True, stable=True).indices  # of equals, the lower index goes first
    order = order[torch.sort(segment[order], stable=True).indices]
    number = torch.bincount(segment, minlength=len(layout.segments))
    rank = torch.arange(unique.numel(), device=unique.device) - (number.cumsum(0) - number)[segment[order]]
    budget = torch.tensor([s.k for s in layout.segments], device=unique.device)
    kept = order[rank < budget[segment[order]]].sort().values

    sent = as_sent(sums[kept], segment[kept], len(layout.segments), wire)
    left = left_of(sums, kept, sent)
    flags, first = ours.flags | theirs.flags, ours.where if int(ours.where) >= 0 else theirs.where
    count = torch.tensor(kept.numel(), device=unique.device)
    padding = layout.capacity - kept.numel()
    total = SparseGrad(
        torch.cat([unique[kept], unique.new_zeros(padding)]),
        torch.cat([sent, sent.new_zeros(padding)]),
        count,
        layout.numel,
        flags,
        first,
    )
    return total, SparseGrad(unique, left, torch.tensor(unique.numel()), layout.numel, flags, first)


def _together(lost: Sequence[SparseGrad]) -> SparseGrad | None:
    """All that a rank dropped, an index perhaps several times."""
    if not lost:
        return None
    indices = torch.cat([grad.indices for grad in lost if grad.indices is not None])
    values = torch.cat([grad.values for grad in lost])
    return SparseGrad(indices, values, torch.tensor(indices.numel()), lost[0].numel, lost[0].flags, lost[0].where)
