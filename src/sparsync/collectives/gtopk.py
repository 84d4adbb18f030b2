"""gTop-k: partial sums climb a tree and only the k largest go on; what is dropped stays with whoever drops it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsync.collectives.base import (
    TREE,
    MeanOf,
    Reduced,
    Traffic,
    Transfer,
    bad_ranks_of,
    message_bytes,
    round_sums,
    shape_of,
)
from sparsync.collectives.comm.channel import Channel
from sparsync.errors import Damaged, PeerFailed
from sparsync.kernels.message.header import EXTRA
from sparsync.layout import Layout
from sparsync.sparse import FAILED, NONFINITE, SparseGrad
from sparsync.wire import Wire
from sparsync.workspace import Workspace


@dataclass(frozen=True)
class GTopK:
    """About the k largest entries of the sum over all ranks, in O(k log P) rounds of one message.

    (Shi et al., 2019.) In round r, rank i + 2^r sends its partial sum to rank i, which adds it to its own and keeps the
    k largest of every segment; any number of ranks will do. The published form loses what is dropped on the way while
    its index survives elsewhere; here it goes into the residual of the rank that dropped it, with what the value codec
    cuts off: of a sum of signs the k largest become signs again, with a scale of their own.
    """

    shared = False
    blocks = False
    deferrable = False
    graph_safe = True
    node_sums = True

    def check(self, wire: Wire, dense: bool, random: bool) -> None:
        if dense:
            raise ValueError("a compressor that sends every entry goes with collective='dense', not 'gtopk'")

    def reduce(self, sent: SparseGrad, layout: Layout, channel: Channel, workspace: Workspace) -> Reduced:
        shape, partial, dropped = shape_of(layout, sent.values.dtype), sent, []
        culprit = channel.rank if int(sent.flags) else -1

        def message(grad: SparseGrad) -> Tensor:
            header = channel.wire.header(grad, channel.sequence, layout.id, layout.digest)
            header[EXTRA] = culprit
            return channel.wire.encode(grad, layout.segment_of, shape, header)

        def receive(source: int, like: Tensor) -> tuple[SparseGrad, int]:
            got = channel.receive(torch.empty_like(like), source)
            header = channel.verify_pair(like, got, source)
            if not (0 if header.flags else -1) <= header.extra < channel.size:
                raise Damaged(f"a message was not read: it says that rank {header.extra} failed, of {channel.size}")
            return channel.wire.decode(got, layout.segment_of, shape), header.extra

        mine, reach = message(partial), 1
        while reach < channel.size and channel.rank % (2 * reach) == 0:
            source = channel.rank + reach
            if source < channel.size:
                other, who = receive(source, mine)
                ((partial, lost),) = merge([(partial, other)], layout, channel.wire)
                culprit = culprit if culprit >= 0 else who
                dropped.append(lost)
                mine = message(partial)
            reach *= 2
        channel.left_out = rejected = stack_rounds(dropped)
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
            raise PeerFailed(channel.monitor.cause(channel.ranks[culprit]))
        bad = [(culprit, int(partial.where))] if int(partial.flags) & NONFINITE else []
        return Reduced(MeanOf([partial], channel.divisor), rejected, bad)

    def reduce_local(
        self, sents: Sequence[SparseGrad], layout: Layout, wire: Wire, divisor: int | None = None
    ) -> list[Reduced]:
        partial, dropped = list(sents), [[] for _ in sents]  # type: ignore[var-annotated]
        reach = 1
        while reach < len(sents):
            ranks = range(0, len(sents) - reach, 2 * reach)
            merged = merge([(partial[rank], partial[rank + reach]) for rank in ranks], layout, wire)
            for rank, (total, lost) in zip(ranks, merged, strict=True):
                partial[rank] = total
                dropped[rank].append(lost)
            reach *= 2
        bad = bad_ranks_of(sents)[:1]
        return [Reduced(MeanOf([partial[0]], divisor or len(sents)), stack_rounds(lost), bad) for lost in dropped]

    def traffic(self, layout: Layout, wire: Wire, workers: int, dtype: torch.dtype = torch.float32) -> Traffic:
        message = wire.bytes(shape_of(layout, dtype))
        rounds = (workers - 1).bit_length()
        path = Transfer(TREE, 2 * rounds, 2.0 * rounds * message)  # the root receives, then sends
        return Traffic(2 * (workers - 1) * message / workers, rounds * message, 2 * rounds, (path,))

    def encoded_bytes(self, sents: Sequence[SparseGrad], layout: Layout, wire: Wire) -> list[float] | None:
        workers, size = len(sents), message_bytes(sents[0], layout, wire)
        parents = [rank - (rank & -rank) for rank in range(1, workers)]  # each sends up once, and is sent to once
        return [float(size * ((rank > 0) + parents.count(rank))) for rank in range(workers)]


def merge(
    pairs: Sequence[tuple[SparseGrad, SparseGrad]], layout: Layout, wire: Wire
) -> list[tuple[SparseGrad, SparseGrad]]:
    """Return, of each pair, the k largest entries of every segment of its sum, as they travel, and what is left.

    Nothing waits for the host, and shapes do not depend on the entries.

    Args:
        pairs: ours and theirs, messages of ``layout.capacity`` entries.
    """
    values = torch.cat([grad.values for pair in pairs for grad in pair]).view(len(pairs), -1)
    indices = torch.cat([grad.indices for pair in pairs for grad in pair if grad.indices is not None]).view_as(values)
    # Padding goes last; of one index, ours stands before theirs.
    indices, order = torch.sort(torch.where(values != 0, indices, layout.numel), dim=1, stable=True)
    values = values.gather(1, order)
    first = torch.ones_like(indices, dtype=torch.bool)
    first[:, 1:] = indices[:, 1:] != indices[:, :-1]
    sums = torch.where(first, values + torch.where(first, 0, values).roll(-1, 1), 0)
    real = indices < layout.numel
    fresh, segment = first & real, layout.segment_of(indices.clamp(max=layout.numel - 1))

    kept = _largest(torch.where(fresh, sums.abs(), -1), segment, layout) & fresh & (sums != 0)  # a 0 lowers scales
    sent = torch.where(kept, _rounded(sums, torch.where(kept, segment, len(layout.segments)), layout, wire), 0)
    kept = sent != 0  # of signs, what is small beside the others waits
    left = torch.where(sums.isfinite(), sums - sent, 0)  # of one that overflowed nothing: its senders keep their parts
    place = torch.arange(values.shape[1], dtype=torch.int64, device=values.device)
    home = torch.where(real, indices, place // 2)  # zeros are added here and there: in one place they would queue

    count = kept.sum(1)
    slot = kept.view(-1).cumsum(0).view_as(indices) - 1 - (count.cumsum(0) - count).unsqueeze(1)
    slot = torch.where(kept, slot, layout.capacity)  # the last is thrown away
    room = len(pairs), layout.capacity + 1
    travel = values.new_zeros(room).scatter_(1, slot, sent)[:, :-1]
    goes = indices.new_zeros(room).scatter_(1, slot, indices)[:, :-1]
    number, merged = torch.tensor(left.shape[1], dtype=torch.int64, device="cpu"), []
    for row, (ours, theirs) in enumerate(pairs):
        flags, where = ours.flags | theirs.flags, torch.where(ours.where >= 0, ours.where, theirs.where)
        total = SparseGrad(goes[row], travel[row], count[row], layout.numel, flags, where)
        merged.append((total, SparseGrad(home[row], left[row], number, layout.numel, flags, where)))
    return merged


def _rounded(sums: Tensor, segments: Tensor, layout: Layout, wire: Wire) -> Tensor:
    """Return sums as they travel: a row each, and with signs a scale for every row and segment.

    Args:
        segments: of every sum, its number; one more for those that do not travel.
    """
    parts = len(layout.segments) + 1
    rows = torch.arange(len(sums), dtype=torch.int64, device=sums.device).unsqueeze(1)
    return round_sums(sums.view(-1), (segments + parts * rows).view(-1), parts * len(sums), wire).view_as(sums)


def _largest(size: Tensor, segment: Tensor, layout: Layout) -> Tensor:
    """Return whether each entry is among the k largest of its row and segment, of equals the first."""
    order = torch.sort(size, dim=1, descending=True, stable=True).indices
    place = torch.arange(size.shape[1], dtype=torch.int64, device=size.device).expand_as(size)
    if len(layout.segments) == 1:
        chosen = place < layout.k
    else:
        own, by_segment = torch.sort(segment.gather(1, order), dim=1, stable=True)
        order = order.gather(1, by_segment)
        numbers = torch.arange(len(layout.segments), dtype=torch.int64, device=size.device).repeat(len(size), 1)
        chosen = place - torch.searchsorted(own, numbers).gather(1, own) < layout.budgets(size.device)[own]
    return torch.zeros_like(size, dtype=torch.bool).scatter_(1, order, chosen)


def stack_rounds(lost: Sequence[SparseGrad]) -> SparseGrad | None:
    """Return all that a rank dropped, a row for every round."""
    if not lost:
        return None
    indices = torch.stack([grad.indices for grad in lost if grad.indices is not None])
    return replace(lost[0], indices=indices, values=torch.stack([grad.values for grad in lost]))
