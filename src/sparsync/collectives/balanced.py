"""Balanced sparse all-reduce: every rank sums a share of the index space, and sends the largest of its sums to all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sparsync.collectives.base import (
    PAIRS,
    RING,
    Mean,
    MeanOf,
    MeanOfMessages,
    Reduced,
    Traffic,
    Transfer,
    bad_ranks,
    bad_ranks_of,
)
from sparsync.collectives.comm.channel import Channel
from sparsync.collectives.partition import IndexPartition, partition_for
from sparsync.kernels.balanced.launch import LargestSums
from sparsync.kernels.message.header import EXTRA
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad
from sparsync.wire import Shape, Wire, host
from sparsync.wire.device_parts import GatherMessage, ScatterMessages, carries_parts
from sparsync.workspace import Workspace


class BalancedBuffers:
    """Both rounds of an exchange by kernels: messages, sums, and what is rejected, in buffers that stay."""

    def __init__(self, partition: IndexPartition, channel: Channel, device: torch.device) -> None:
        layout, workers, wire = partition.layout, partition.workers, channel.wire
        there, back = partition.shapes(torch.float32)
        failed = channel.checks.failed_exchange(device)
        self.scatter = ScatterMessages(wire, layout, there, workers, workers, device, failed)
        self.gather = GatherMessage(wire, layout, back, workers, device, failed, channel.divisor)
        self.received = self.scatter.messages if channel.group is None else torch.zeros_like(self.scatter.messages)
        self.gathered = channel.room_for(self.gather.message)
        size = workers * partition.room
        self.sums = LargestSums(
            size, partition.kept, partition.rows, layout.numel, workers, wire.values, len(layout.segments),
            self.scatter.places, device,
        )  # fmt: skip
        # What has no room in a message, then what is left of sums: an entry may be in both.
        longest = max(size, layout.capacity)
        self.indices = torch.arange(longest, dtype=torch.int64, device=device).remainder(layout.numel).repeat(2, 1)
        self.values = torch.zeros(2, longest, dtype=torch.float32, device=device)
        self.count = torch.tensor(2 * longest, dtype=torch.int64, device=device)
        self.stays, self.left = zip(self.indices.unbind(), self.values.unbind(), strict=True)


@dataclass(frozen=True)
class Balanced:
    """A sparse reduce-scatter, then an all-gather: about (1 + share) k entries a worker, whatever the world size.

    (After Ok-Topk, Li and Hoefler, 2022.) Every rank owns 1/P of the indices, spread evenly over the gradient. It is
    sent all ranks' entries for these, adds them up, and sends the ``share * k / P`` largest sums to everybody. What it
    leaves out stays in its own residual, with what the value codec cuts off; entries beyond the room of a message stay
    with their sender. So nothing is lost. The largest are chosen over all segments, whatever the scope.

    Args:
        share: entries of the result, as a share of k.
    """

    share: float = 1.0
    shared = False
    blocks = False
    deferrable = True
    graph_safe = True
    node_sums = True

    def __post_init__(self) -> None:
        if not self.share > 0:
            raise ValueError(f"share must be above 0, got {self.share!r}")

    def check(self, wire: Wire, dense: bool, random: bool) -> None:
        if dense:
            raise ValueError("a compressor that sends every entry goes with collective='dense', not 'balanced'")

    def reduce(self, sent: SparseGrad, layout: Layout, channel: Channel, workspace: Workspace) -> Reduced:
        if carries_parts(channel.wire, sent, channel.size):
            return self._by_kernels(sent, layout, channel, workspace)
        messages = BalancedMessages(partition_for(sent.values, layout, channel.size, self.share), sent, channel.wire)
        (parts,), (stays,) = messages.partition.split([sent])
        rows = channel.all_to_all(messages.scatter_messages(parts, channel.sequence))
        headers = channel.verify(rows)
        largest, left = messages.gather_message(rows, channel.rank, channel.sequence)
        channel.left_out = rejected = messages.partition.rejected(stays, *left)
        rows = channel.all_gather(largest)
        channel.verify(rows, again=True)
        return Reduced(messages.mean(rows, channel.divisor), rejected, bad_ranks(headers))

    def _by_kernels(self, sent: SparseGrad, layout: Layout, channel: Channel, workspace: Workspace) -> Reduced:
        device, rank = sent.values.device, channel.rank
        make = lambda: BalancedBuffers(IndexPartition(layout, channel.size, self.share), channel, device)  # noqa: E731
        own = workspace.get(BalancedBuffers, (layout.digest, self.share, device), make)
        failed, sums = channel.checks.failed_exchange(device), own.sums
        rows = channel.all_to_all(own.scatter.pack_parts(sent, channel.number(device), own.stays), own.received)
        headers = channel.verify(rows)
        number = channel.number(device)
        own.scatter.add_up(rows, rank, failed, number, sums.values, sums.rows)
        sums.choose(rank, *own.left, failed, number)
        message = own.gather.pack_sums(sums.rows, sums.values, sums.count, sent, rank, number)
        channel.left_out = rejected = replace(sent, indices=own.indices, values=own.values, count=own.count)
        rows = channel.all_gather(message, own.gathered)
        channel.verify(rows, again=True)
        return Reduced(MeanOfMessages(own.gather, rows, failed, channel.number(device)), rejected, bad_ranks(headers))

    def reduce_local(
        self, sents: Sequence[SparseGrad], layout: Layout, wire: Wire, divisor: int | None = None
    ) -> list[Reduced]:
        workers, partition = len(sents), partition_for(sents[0].values, layout, len(sents), self.share)
        sums = sents[0].values.new_zeros(workers, partition.rows)
        owners = torch.arange(workers, dtype=torch.int64, device=sums.device).unsqueeze(1)
        parts, stays = partition.split(sents)
        for part in parts:  # in this order they are added
            sums.view(-1).index_add_(0, partition.within(part, owners), part.values.reshape(-1))
        chosen, lefts, step = [], [], 1 if partition.one_by_one else workers
        for own, group in zip(torch.split(sums, step), torch.split(owners, step), strict=True):
            goes, left = partition.largest(own, group, wire)
            chosen.append(goes)
            lefts += list(zip(*left, strict=True))
        rows, values = (torch.cat(own) for own in zip(*chosen, strict=True))
        total = partition.placed(replace(sents[0], indices=rows, values=values, count=(values != 0).sum(1)), owners)
        mean, bad = MeanOf([total], divisor or workers), bad_ranks_of(sents)
        return [Reduced(mean, partition.rejected(own, *left), bad) for own, left in zip(stays, lefts, strict=True)]

    def traffic(self, layout: Layout, wire: Wire, workers: int, dtype: torch.dtype = torch.float32) -> Traffic:
        there, back = IndexPartition(layout, workers, self.share).shapes(dtype)
        others = workers - 1
        return Traffic.of(
            Transfer(PAIRS, others, others * wire.bytes(there)), Transfer(RING, others, others * wire.bytes(back))
        )

    def encoded_bytes(self, sents: Sequence[SparseGrad], layout: Layout, wire: Wire) -> list[float] | None:
        workers, partition = len(sents), partition_for(sents[0].values, layout, len(sents), self.share)
        ranks, (parts, _) = [BalancedMessages(partition, sent, wire) for sent in sents], partition.split(sents)
        scattered = [messages.scatter_messages(own, 0) for messages, own in zip(ranks, parts, strict=True)]
        sizes = []
        for rank, messages in enumerate(ranks):
            largest, _ = messages.gather_message(torch.stack([own[rank] for own in scattered]), rank, 0)
            others = [message.nbytes for owner, message in enumerate(scattered[rank]) if owner != rank]
            sizes.append(float(sum(others) + (workers - 1) * largest.nbytes))  # in a ring all pass the others' on
        return sizes


class BalancedMessages:
    """The messages of one rank in an exchange of ``Balanced``.

    Args:
        sent: what the rank sends; its flags go with every message.
    """

    def __init__(self, partition: IndexPartition, sent: SparseGrad, wire: Wire) -> None:
        self.partition, self.sent, self.wire = partition, sent, wire
        self.there, self.back = partition.shapes(sent.values.dtype)
        self.owners = torch.arange(partition.workers, dtype=torch.int64, device=sent.values.device).unsqueeze(1)

    def scatter_messages(self, parts: SparseGrad, sequence: int) -> Tensor:
        """Return a message to every owner, a row each; ``parts``: as ``IndexPartition.split`` makes them."""
        return self._encode(parts, self.owners, self.there, sequence)

    def gather_message(self, received: Tensor, rank: int, sequence: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return owner ``rank``'s message to all about the sums of what it was sent, and what is left of the sums."""
        partition, sums = self.partition, self.sent.values.new_zeros(1, self.partition.rows)
        layout, wire, (own,) = partition.layout, self.wire, sums
        if self.there.segments > 1 or host.write_mean(wire, received, layout, self.there, 1, [(0, own)]) is None:
            wire.decode(received, partial(partition.segment, rank), self.there).add_to(own.zero_())
        (rows, values), (places, left) = partition.largest(sums, self.owners[rank : rank + 1], self.wire)
        result = replace(self.sent, indices=rows[0], values=values[0], count=(values != 0).sum(), numel=partition.rows)
        return self._encode(result, rank, self.back, sequence), (places[0], left[0])

    def mean(self, answers: Tensor, divisor: int) -> Mean:
        """Return the result, from all owners' messages: their sums over ``divisor``."""
        parts = self.wire.decode(answers, partial(self.partition.segment, self.owners), self.back)
        return self.partition.mean(parts, self.owners, divisor)

    def _encode(self, part: SparseGrad, owner: int | Tensor, shape: Shape, sequence: int) -> Tensor:
        header = self.wire.header(part, sequence, self.partition.layout.id, self.partition.layout.digest)
        header[..., EXTRA] = self.sent.count
        return self.wire.encode(part, partial(self.partition.segment, owner), shape, header)
