"""Balanced sparse all-reduce: every rank sums a share of the index space, and sends the largest of its sums to all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

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
        parts, (stays,) = cut.split([sent])
        messages = []
        for owner, (indices, values, count) in enumerate(zip(*(part[0] for part in parts), strict=True)):
            part = SparseGrad(indices, values, count, cut.rows, sent.flags, sent.where)
            header = wire.header(part, channel.sequence, layout.id, layout.digest)
            messages.append(wire.encode(part, partial(cut.segment, owner), there, header))
        rows = channel.all_to_all(torch.stack(messages))
        headers = channel.verify(rows)

        mine = partial(cut.segment, channel.rank)
        sums = sent.values.new_zeros(cut.rows)
        for row in rows:
            wire.decode(row, mine, there).add_to(sums)
        (indices, values), left = cut.largest(
            sums.unsqueeze(0), sums.new_full((1, 1), channel.rank, dtype=torch.int64), wire
        )
        result = SparseGrad(indices[0], values[0], (values != 0).sum(), cut.rows, sent.flags, sent.where)
        header = wire.header(result, channel.sequence, layout.id, layout.digest)
        rows = channel.all_gather(wire.encode(result, mine, back, header))
        channel.verify(rows)
        total = [
            cut.placed(wire.decode(row, partial(cut.segment, owner), back), owner) for owner, row in enumerate(rows)
        ]
        return Reduced(total, channel.size, cut.home(stays, left[0][0], left[1][0]), bad_ranks(headers))

    def reduce_local(self, sents: Sequence[SparseGrad], layout: Layout, state: State, wire: Wire) -> list[Reduced]:
        workers, cut = len(sents), Cut(layout, len(sents), self.share)
        sums = sents[0].values.new_zeros(workers, cut.rows)
        first = cut.rows * torch.arange(workers, device=sums.device).unsqueeze(1)  # of every owner's sums
        (rows, values, _), stays = cut.split(sents)
        for places, own in zip(first + rows, values, strict=True):  # worker by worker: in this order they are added
            sums.view(-1).index_add_(0, places.view(-1), own.reshape(-1))
        owners = torch.arange(workers, device=sums.device).unsqueeze(1)
        step, total, homes = 1 if cut.on_host(sums) else workers, [], []
        for own, group in zip(torch.split(sums, step), torch.split(owners, step), strict=True):
            (rows, values), left = cut.largest(own, group, wire)
            about = (values != 0).sum(), cut.rows, sents[0].flags, sents[0].where
            total.append(cut.placed(SparseGrad(rows, values, *about), group))
            homes += list(zip(*left, strict=True))
        bad = local_bad_ranks(sents)
        return [Reduced(total, workers, cut.home(own, *home), bad) for own, home in zip(stays, homes, strict=True)]

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

    def place(self, rows: Tensor, owner: int | Tensor) -> Tensor:
        """Where in the flat gradient an owner's entries lie."""
        return rows * self.workers + (owner - self._turn(rows)) % self.workers

    def segment(self, owner: int | Tensor, rows: Tensor) -> Tensor:
        """The number of the segment in which each of an owner's entries lies."""
        return self.layout.segment_of(self.place(rows, owner).clamp(max=self.layout.numel - 1))

    def placed(self, part: SparseGrad, owner: int | Tensor) -> SparseGrad:
        """An owner's entries with their places in the flat gradient; of several, with a row for each, all."""
        assert part.indices is not None
        indices = torch.where(part.values != 0, self.place(part.indices, owner), 0)
        return replace(part, indices=indices.view(-1), values=part.values.view(-1), numel=self.layout.numel)

    def split(self, sents: Sequence[SparseGrad]) -> tuple[tuple[Tensor, Tensor, Tensor], list[SparseGrad]]:
        """What goes from every sender to every owner, and what each has no room for: the last ones stay.

        The first are rows, values and their number, by sender and owner.
        """
        indices = torch.stack([sent.indices for sent in sents if sent.indices is not None])
        values = torch.stack([sent.values for sent in sents])
        (senders, capacity), device = values.shape, values.device
        owner = torch.where(values != 0, self.owner(indices), self.workers)  # of nothing, nobody
        if self.on_host(values):  # a pass for every byte of a key
            key = owner.to(torch.uint8 if self.workers < 256 else torch.int16 if self.workers < 2**15 else torch.int64)
        else:  # entries come in any order there, which must not decide who stays
            key = owner * self.layout.numel + indices
        order = torch.sort(key, stable=True).indices
        owner, indices, values = (t.gather(1, order) for t in (owner, indices, values))
        number = torch.zeros(senders, self.workers + 1, dtype=torch.int64, device=device)
        number.scatter_add_(1, owner, torch.ones_like(owner))
        place = torch.arange(capacity, device=device) - (number.cumsum(1) - number).gather(1, owner)
        goes = (place < self.room) & (owner < self.workers)
        size = self.workers * self.room
        slot = torch.where(goes, owner * self.room + place, size)  # the last is thrown away
        shape = senders, self.workers, self.room
        rows = slot.new_zeros(senders, size + 1).scatter_(1, slot, indices // self.workers)[:, :-1].reshape(shape)
        travel = values.new_zeros(senders, size + 1).scatter_(1, slot, values)[:, :-1].reshape(shape)
        count, left = torch.tensor(capacity), torch.where(goes, 0, values)
        stays = [
            SparseGrad(places, own, count, self.layout.numel, sent.flags, sent.where)
            for places, own, sent in zip(indices, left, sents, strict=True)
        ]
        return (rows, travel, number[:, :-1].clamp(max=self.room)), stays

    def largest(self, sums: Tensor, owners: Tensor, wire: Wire) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Owners' largest sums as they travel, and their rows; and what is left of all sums, in the flat gradient.

        Of both places come first, then values, with a row for each owner.

        Args:
            sums: of every row, ``(owners, rows)``.
            owners: their numbers, ``(owners, 1)``.
        """
        rows = torch.arange(self.rows, device=sums.device)
        if self.on_host(sums):  # where there is anything at all; a GPU would have to tell the host
            rows = rows[sums.any(0)]
            sums = sums[:, rows]
        chosen = torch.topk(sums.abs(), min(self.kept, rows.numel()), sorted=False).indices
        values, parts = sums.gather(1, chosen), len(self.layout.segments) + 1
        # Zeros stand apart: a mean of signs shall not count them.
        segment = torch.where(values != 0, self.segment(owners, rows[chosen]), parts - 1)
        number = torch.arange(len(owners), device=sums.device).unsqueeze(1)
        sent = as_sent(values.view(-1), (segment + parts * number).view(-1), parts * len(owners), wire)
        left = left_of(sums.reshape(-1), (chosen + rows.numel() * number).view(-1), sent).view(sums.shape)
        values = sent.view(values.shape)
        order = torch.sort((values == 0).to(torch.int8), stable=True).indices  # what is real goes first
        missing = 0, self.kept - order.shape[1]
        travel = nn.functional.pad(values.gather(1, order), missing)
        indices = nn.functional.pad(rows[chosen.gather(1, order)], missing)
        home = self.place(rows, owners).clamp(max=self.layout.numel - 1)  # the last row may be longer than the gradient
        return (torch.where(travel != 0, indices, 0), travel), (home, left)

    def home(self, stays: SparseGrad, places: Tensor, left: Tensor) -> SparseGrad:
        """All that comes home to a rank: what it had no room for, then what is left of its sums.

        It may have had no room for an entry that it owns. On a GPU the additions of one call come in any order, so that
        each of both is a row of its own there.
        """
        assert stays.indices is not None
        indices, values = [stays.indices, places], [stays.values, left]
        if self.on_host(left):
            both = torch.cat(indices), torch.cat(values)
        else:
            size = max(own.numel() for own in values)
            spread = torch.arange(size, device=left.device)  # zeros are added all over: in one place they would queue
            more = [size - own.numel() for own in values]
            both = (
                torch.stack([torch.cat([own, spread[size - n :]]) for own, n in zip(indices, more, strict=True)]),
                torch.stack([nn.functional.pad(own, (0, n)) for own, n in zip(values, more, strict=True)]),
            )
        return replace(stays, indices=both[0], values=both[1], count=torch.tensor(both[0].numel()))

    def on_host(self, tensor: Tensor) -> bool:
        return not tensor.is_cuda

    def _turn(self, rows: Tensor) -> Tensor:
        return (rows * MIXER & 0xFFFFFFFF) >> 15


def _room(mean: float) -> int:
    """Entries for which a message has room, of which ``mean`` are expected."""
    return math.ceil(mean + ROOM * math.sqrt(mean))
