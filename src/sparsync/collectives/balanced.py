"""Balanced sparse all-reduce: every rank sums a share of the index space, and sends the largest of its sums to all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sparsync.collectives.base import Reduced, State, Traffic, as_sent, bad_ranks, left_of, local_bad_ranks, shape_of
from sparsync.collectives.channel import Channel
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad
from sparsync.wire import Shape, Wire

ROOM = 2.0  # standard deviations of a message's entries for which there is room beyond the mean
MIXER = 0x9E3779B1  # odd, with bits all over: neighbouring rows get owners that have nothing to do with each other


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
    deferrable = False

    def __post_init__(self) -> None:
        if not self.share > 0:
            raise ValueError(f"share must be above 0, got {self.share!r}")

    def check(self, wire: Wire, dense: bool, random: bool) -> None:
        if dense:
            raise ValueError("a compressor that sends every entry goes with collective='dense', not 'balanced'")

    def init(self, layout: Layout, workers: int) -> State:
        return {}

    def reduce(self, sent: SparseGrad, layout: Layout, channel: Channel, state: State) -> Reduced:
        wire, cut = channel.wire, Cut(layout, channel.size, self.share)
        there, back = (replace(shape, dtype=sent.values.dtype) for shape in cut.shapes)
        parts, rejected = cut.split(sent)
        messages = []
        for owner, (indices, values, count) in enumerate(zip(*parts, strict=True)):
            part = SparseGrad(indices, values, count, cut.rows, sent.flags, sent.where)
            header = wire.header(part, channel.sequence, layout.id, layout.digest)
            messages.append(wire.encode(part, partial(cut.segment, owner), there, header))
        rows = channel.all_to_all(torch.stack(messages))
        headers = channel.verify(rows)

        mine = partial(cut.segment, channel.rank)
        sums = sent.values.new_zeros(cut.rows)
        for row in rows:
            wire.decode(row, mine, there).add_to(sums)
        result, left = cut.largest(sums, channel.rank, wire, sent)
        header = wire.header(result, channel.sequence, layout.id, layout.digest)
        rows = channel.all_gather(wire.encode(result, mine, back, header))
        channel.verify(rows)
        total = [
            cut.placed(wire.decode(row, partial(cut.segment, owner), back), owner) for owner, row in enumerate(rows)
        ]
        return Reduced(total, channel.size, _both(rejected, left), bad_ranks(headers))

    def reduce_local(self, sents: Sequence[SparseGrad], layout: Layout, state: State, wire: Wire) -> list[Reduced]:
        workers, cut = len(sents), Cut(layout, len(sents), self.share)
        sums, kept = sents[0].values.new_zeros(workers, cut.rows), []
        first = cut.rows * torch.arange(workers, device=sums.device).unsqueeze(1)  # of every owner's sums
        for sent in sents:
            (rows, values, _), rejected = cut.split(sent)
            sums.view(-1).index_add_(0, (first + rows).view(-1), values.reshape(-1))
            kept.append(rejected)
        bad, total, homes = local_bad_ranks(sents), [], []
        for owner, rejected in enumerate(kept):
            result, left = cut.largest(sums[owner], owner, wire, sents[0])
            total.append(cut.placed(result, owner))
            homes.append(_both(rejected, left))
        return [Reduced(total, workers, home, bad) for home in homes]

    def traffic(self, layout: Layout, wire: Wire, workers: int, dtype: torch.dtype = torch.float32) -> Traffic:
        there, back = (replace(shape, dtype=dtype) for shape in Cut(layout, workers, self.share).shapes)
        bytes_sent = (workers - 1) * (wire.bytes(there) + wire.bytes(back))
        return Traffic(bytes_sent, bytes_sent, 2 * (workers - 1))


class Cut:
    """Who owns which entries, and how many of them travel.

    The flat gradient is a table of rows of P entries, and every rank owns one entry of each row, another one in each:
    so an owner's entries are like all others, whatever the order of the tensors is. An owner knows them by their row.

    Args:
        layout: of the gradient.
        workers: P.
        share: as ``Balanced`` takes it.
    """

    def __init__(self, layout: Layout, workers: int, share: float) -> None:
        self.layout, self.workers = layout, workers
        self.rows = max(1, -(-layout.numel // workers))
        self.room = min(self.rows, layout.capacity, _room(layout.capacity / workers))
        self.kept = min(self.rows, max(1, math.ceil(share * layout.k / workers)))

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        """Of the messages to owners, and of those from them."""
        whole = shape_of(self.layout, torch.float32)
        there, back = (replace(whole, numel=self.rows, capacity=own, slots=()) for own in (self.room, self.kept))
        return there, back

    def owner(self, indices: Tensor) -> Tensor:
        return (indices + self._turn(indices // self.workers)) % self.workers

    def place(self, rows: Tensor, owner: int) -> Tensor:
        """Where in the flat gradient an owner's entries lie."""
        return rows * self.workers + (owner - self._turn(rows)) % self.workers

    def segment(self, owner: int, rows: Tensor) -> Tensor:
        """The number of the segment in which each of an owner's entries lies."""
        return self.layout.segment_of(self.place(rows, owner).clamp(max=self.layout.numel - 1))

    def placed(self, part: SparseGrad, owner: int) -> SparseGrad:
        """An owner's entries with their places in the flat gradient."""
        assert part.indices is not None
        indices = torch.where(part.values != 0, self.place(part.indices, owner), 0)
        return replace(part, indices=indices, numel=self.layout.numel)

    def split(self, sent: SparseGrad) -> tuple[tuple[Tensor, Tensor, Tensor], SparseGrad]:
        """What goes to every owner, and what there is no room for: the smallest stay.

        The first are rows, values and their number, each with a row for every owner.
        """
        assert sent.indices is not None
        capacity, device = sent.values.numel(), sent.values.device
        owner = torch.where(sent.values != 0, self.owner(sent.indices), self.workers)  # of nothing, nobody
        order = torch.sort(sent.values.abs(), descending=True, stable=True).indices
        order = order[torch.sort(owner[order], stable=True).indices]  # by owner, the largest first
        owner, indices, values = owner[order], sent.indices[order], sent.values[order]
        number = torch.zeros(self.workers + 1, dtype=torch.int64, device=device)
        number.index_add_(0, owner, torch.ones_like(owner))
        place = torch.arange(capacity, device=device) - (number.cumsum(0) - number)[owner]
        goes = (place < self.room) & (owner < self.workers)
        size = self.workers * self.room
        slot = torch.where(goes, owner * self.room + place, size)  # the last is thrown away
        rows, travel = slot.new_zeros(size + 1), values.new_zeros(size + 1)
        rows[slot], travel[slot] = indices // self.workers, values
        parts = rows[:-1].view(self.workers, -1), travel[:-1].view(self.workers, -1), number[:-1].clamp(max=self.room)
        left = torch.where(goes, 0, values)
        return parts, SparseGrad(indices, left, torch.tensor(capacity), self.layout.numel, sent.flags, sent.where)

    def largest(self, sums: Tensor, owner: int, wire: Wire, like: SparseGrad) -> tuple[SparseGrad, SparseGrad]:
        """An owner's largest sums as they travel, by row; and all that is left of its sums, in the flat gradient."""
        rows = self.present(sums)
        sums = sums[rows]
        chosen = torch.topk(sums.abs(), min(self.kept, rows.numel())).indices
        values, segments = sums[chosen], len(self.layout.segments)
        # Zeros stand apart: a mean of signs shall not count them.
        where = torch.where(values != 0, self.segment(owner, rows[chosen]), segments)
        values = as_sent(values, where, segments + 1, wire)
        left = left_of(sums, chosen, values)
        order = torch.sort((values == 0).to(torch.int8), stable=True).indices  # what is real goes first
        indices = values.new_zeros(self.kept, dtype=torch.int64)
        travel = values.new_zeros(self.kept)
        travel[: order.numel()] = values[order]
        indices[: order.numel()] = rows[chosen[order]]
        indices = torch.where(travel != 0, indices, 0)
        home = torch.where(left != 0, self.place(rows, owner), 0)
        return (
            SparseGrad(indices, travel, (travel != 0).sum(), self.rows, like.flags, like.where),
            SparseGrad(home, left, torch.tensor(rows.numel()), self.layout.numel, like.flags, like.where),
        )

    def present(self, sums: Tensor) -> Tensor:
        """Rows that may hold something: on a GPU all of them, as to look would wait for the host."""
        return sums.nonzero().view(-1) if sums.device.type == "cpu" else torch.arange(self.rows, device=sums.device)

    def _turn(self, rows: Tensor) -> Tensor:
        return (rows * MIXER & 0xFFFFFFFF) >> 15


def _room(mean: float) -> int:
    """Entries for which a message has room, of which ``mean`` are expected."""
    return math.ceil(mean + ROOM * math.sqrt(mean))


def _both(a: SparseGrad, b: SparseGrad) -> SparseGrad:
    """The entries of both, an index perhaps twice."""
    assert a.indices is not None
    assert b.indices is not None
    indices, values = torch.cat([a.indices, b.indices]), torch.cat([a.values, b.values])
    return SparseGrad(indices, values, torch.tensor(indices.numel()), a.numel, a.flags, a.where)
