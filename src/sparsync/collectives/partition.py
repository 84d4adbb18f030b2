"""Who owns which entries of a gradient that is summed in parts: the work of ``Balanced`` between its messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsync.collectives.base import Mean, MeanOf, remainder_of, round_sums, shape_of
from sparsync.kernels import cpu
from sparsync.kernels.partition import MIXER, SHIFT
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad
from sparsync.wire import Shape, Wire, within

Numbers = np.ndarray[Any, np.dtype[Any]]

ROOM = 2.0  # standard deviations of a message's entries for which there is room beyond the mean


class IndexPartition:
    """Who owns which entries, and how many of them travel.

    The flat gradient is a table of rows of P entries, and every rank owns one entry of each row, another one in each:
    so an owner's entries are like all others, whatever the order of the tensors is. An owner knows them by their row.

    Nothing here waits for the host, and entries may come in any order; ``HostPartition`` does the same on the host.

    Args:
        layout: of the gradient.
        workers: P.
        share: as ``Balanced`` takes it.
    """

    one_by_one = False  # whether ``largest`` takes one owner at a time

    def __init__(self, layout: Layout, workers: int, share: float) -> None:
        self.layout, self.workers = layout, workers
        self.rows = max(1, -(-layout.numel // workers))
        self.room = min(self.rows, layout.capacity, _room(layout.capacity / workers))
        self.kept = min(self.rows, max(1, math.ceil(share * layout.k / workers)))

    def shapes(self, dtype: torch.dtype) -> tuple[Shape, Shape]:
        """Return the shapes of messages to owners, and from them; ``dtype`` is the residual's."""
        whole = shape_of(self.layout, dtype)
        there, back = (replace(whole, numel=self.rows, capacity=own, slots=()) for own in (self.room, self.kept))
        return there, back

    def owner(self, indices: Tensor) -> Tensor:
        return (indices + self._turn(indices // self.workers)) % self.workers

    def place(self, rows: Tensor, owner: int | Tensor) -> Tensor:
        """Return where in the flat gradient an owner's entries lie."""
        return rows * self.workers + (owner - self._turn(rows)) % self.workers

    def segment(self, owner: int | Tensor, rows: Tensor) -> Tensor:
        """Return the number of the segment in which each of an owner's entries lies."""
        if len(self.layout.segments) == 1:
            return rows.new_zeros(()).expand_as(rows)
        return self.layout.segment_of(self.place(rows, owner).clamp(max=self.layout.numel - 1))

    def mean(self, parts: SparseGrad, owners: Tensor, divisor: int) -> Mean:
        """Return all owners' parts, over ``divisor``."""
        return MeanOf([self.placed(parts, owners)], divisor)

    def placed(self, part: SparseGrad, owner: Tensor) -> SparseGrad:
        """Return all of several owners' entries, of which each has a row, with their places in the flat gradient."""
        assert part.indices is not None
        values = part.values.view(-1)
        every = torch.arange(values.numel(), dtype=torch.int64, device=values.device)
        spread = every % self.layout.numel  # as in ``rejected``
        indices = torch.where(values != 0, self.place(part.indices, owner).view(-1), spread)
        return self._whole(part, indices, values)

    def _whole(self, part: SparseGrad, indices: Tensor, values: Tensor) -> SparseGrad:
        if self.rows * self.workers > self.layout.numel:  # not all of the last row lies within the gradient
            indices, outside = within(indices, self.layout.numel, "index")
            values = values if outside is None else values.masked_fill(outside, torch.nan)
        count, flags, where = part.count.sum(), part.flags.max(), part.where.max()
        return SparseGrad(indices, values, count, self.layout.numel, flags, where)

    def within(self, part: SparseGrad, owners: Tensor) -> Tensor:
        """Return where in a table of all owners' rows the entries of a sender's ``part`` lie, 1-D."""
        assert part.indices is not None
        places = (self.rows * owners + part.indices).view(-1)
        own = torch.arange(places.numel(), dtype=torch.int64, device=places.device)
        return torch.where(part.values.view(-1) != 0, places, own)

    def split(self, sents: Sequence[SparseGrad]) -> tuple[list[SparseGrad], list[SparseGrad]]:
        """Of every sender what goes to the owners, with their rows for indices and a row for each owner; and what it
        has no room for: the last ones stay."""
        indices = torch.stack([sent.indices for sent in sents if sent.indices is not None])
        values = torch.stack([sent.values for sent in sents])
        (senders, capacity), device = values.shape, values.device
        owner = torch.where(values != 0, self.owner(indices), self.workers)  # of nothing, nobody
        order = torch.sort(owner * self.layout.numel + indices, stable=True).indices  # theirs must not decide who stays
        owner, indices, values = (t.gather(1, order) for t in (owner, indices, values))
        bounds = torch.arange(self.workers + 2, dtype=torch.int64, device=device).expand(senders, -1).contiguous()
        first = torch.searchsorted(owner, bounds)  # of every owner's, and of nobody's
        number = first.diff(dim=1)
        place = torch.arange(capacity, dtype=torch.int64, device=device) - first.gather(1, owner)
        goes = (place < self.room) & (owner < self.workers)
        size = self.workers * self.room
        slot = torch.where(goes, owner * self.room + place, size)  # the last is thrown away
        shape = senders, self.workers, self.room
        rows = slot.new_zeros(senders, size + 1).scatter_(1, slot, indices // self.workers)[:, :-1].reshape(shape)
        travel = values.new_zeros(senders, size + 1).scatter_(1, slot, values)[:, :-1].reshape(shape)
        number, left = number[:, :-1].clamp(max=self.room), torch.where(goes, 0, values)
        every = torch.tensor(capacity, dtype=torch.int64, device="cpu")
        parts, stays = [], []
        for i, sent in enumerate(sents):
            parts.append(replace(sent, indices=rows[i], values=travel[i], count=number[i], numel=self.rows))
            stays.append(replace(sent, indices=indices[i], values=left[i], count=every))
        return parts, stays

    def largest(self, sums: Tensor, owners: Tensor, wire: Wire) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Owners' largest sums as they travel, and their rows; and what is left of all sums, in the flat gradient. Of
        equal magnitudes the lower row goes first.

        Of both places come first, then values, with a row for each owner.

        Args:
            sums: of every row, ``(owners, rows)``.
            owners: their numbers, ``(owners, 1)``.
        """
        rows = torch.arange(self.rows, dtype=torch.int64, device=sums.device)
        chosen = torch.topk(_keys(sums, rows), self.kept, sorted=False).indices
        values, parts = sums.gather(1, chosen), len(self.layout.segments) + 1
        # Zeros stand apart: a mean of signs shall not count them.
        segment = torch.where(values != 0, self.segment(owners, chosen), parts - 1)
        number = torch.arange(len(owners), dtype=torch.int64, device=sums.device).unsqueeze(1)
        sent = self._rounded(values.view(-1), (segment + parts * number).view(-1), parts * len(owners), wire)
        left = remainder_of(sums.reshape(-1), (chosen + self.rows * number).view(-1), sent).view(sums.shape)
        values = sent.view(values.shape)
        order = torch.sort((values == 0).to(torch.int8), stable=True).indices  # what is real goes first
        travel, indices = values.gather(1, order), chosen.gather(1, order)
        home = self.place(rows, owners).clamp(max=self.layout.numel - 1)  # the last row may be longer than the gradient
        return (torch.where(travel != 0, indices, 0), travel), (home, left)

    def rejected(self, stays: SparseGrad, places: Tensor, left: Tensor) -> SparseGrad:
        """Return all that a rank rejects: what it had no room for, then what is left of its sums.

        It may have had no room for an entry that it owns. On a GPU the additions of one call come in any order: so each
        of both is a row of its own.
        """
        assert stays.indices is not None
        size = max(stays.values.numel(), left.numel())
        # Zeros are added all over: in one place they would queue.
        spread = torch.arange(size, dtype=torch.int64, device=left.device)
        indices = torch.stack([torch.cat([own, spread[own.numel() :]]) for own in (stays.indices, places)])
        values = torch.stack([nn.functional.pad(own, (0, size - own.numel())) for own in (stays.values, left)])
        count = torch.tensor(indices.numel(), dtype=torch.int64, device="cpu")
        return replace(stays, indices=indices, values=values, count=count)

    def _turn(self, rows: Tensor) -> Tensor:
        return (rows * MIXER & 0xFFFFFFFF) >> SHIFT

    def _rounded(self, sums: Tensor, segments: Tensor, parts: int, wire: Wire) -> Tensor:
        """Return sums as they travel. A single worker's are what it sent, which needs no other scale than its own."""
        return sums if self.workers == 1 else round_sums(sums, segments, parts, wire)


def _keys(sums: Tensor, rows: Tensor) -> Tensor:
    """Return what tells sums apart: the bits of their magnitudes, and below them their rows, counted down."""
    if sums.dtype == torch.float64:  # has no kernels that would have to find the same
        return sums.abs()
    return (sums.abs().view(torch.int32).long() << 32) - (rows & 0xFFFFFFFF)


def _room(mean: float) -> int:
    """Return entries for which a message has room, of which ``mean`` are expected."""
    return math.ceil(mean + ROOM * math.sqrt(mean))


class HostPartition(IndexPartition):
    """The same on the host, which knows how many entries there are, and adds in their order: it goes over those alone.

    Of what has no room the last entries stay, in the order in which they are given.
    """

    one_by_one = True

    def place(self, rows: Tensor, owner: int | Tensor) -> Tensor:
        number = np.uint32(owner) if isinstance(owner, int) else owner.numpy().astype(np.uint32)
        column = self._below(number + np.uint32(self.workers) - self._turns(rows.numpy()))
        return torch.from_numpy(column.astype(np.int64)).add_(rows, alpha=self.workers)

    def placed(self, part: SparseGrad, owner: Tensor) -> SparseGrad:
        assert part.indices is not None
        own = list(zip(owner.tolist(), part.indices, part.values, part.count.tolist(), strict=True))
        indices = torch.cat([self.place(rows[:n], number) for (number,), rows, _, n in own])
        return self._whole(part, indices, torch.cat([values[:n] for _, _, values, n in own]))

    def split(self, sents: Sequence[SparseGrad]) -> tuple[list[SparseGrad], list[SparseGrad]]:
        parts, stays = zip(*map(self._deal, sents), strict=True)
        return list(parts), list(stays)

    def _deal(self, sent: SparseGrad) -> tuple[SparseGrad, SparseGrad]:
        assert sent.indices is not None
        indices, values = sent.indices.numpy(), sent.values.numpy()
        if not (values != 0).all():
            real = np.flatnonzero(values)
            indices, values = indices[real], values[real]
        flat: Numbers = indices.astype(np.uint32 if self.layout.numel < 2**32 else np.uint64)
        row = flat // flat.dtype.type(self.workers)
        owner = self._below((flat - row * flat.dtype.type(self.workers)).astype(np.uint32) + self._turns(row))
        key = torch.from_numpy(owner.astype(np.uint8 if self.workers <= 256 else np.int64))  # a pass for every byte
        owners, sorting = torch.sort(key, stable=True)
        every = torch.arange(self.workers, dtype=key.dtype, device="cpu")
        ends = torch.searchsorted(owners, every, right=True).tolist()
        order = sorting.numpy()
        row, values_ = row[order], values[order]
        rows, travel = np.zeros((self.workers, self.room), np.int64), np.zeros((self.workers, self.room), values.dtype)
        count, left = [], []
        for number, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            size = min(end - begin, self.room)
            rows[number, :size], travel[number, :size] = row[begin : begin + size], values_[begin : begin + size]
            count.append(size)
            left.append(order[begin + size : end])
        stay = np.concatenate(left)
        parts = torch.from_numpy(rows), torch.from_numpy(travel), torch.tensor(count, dtype=torch.int64, device="cpu")
        many = torch.tensor(len(stay), dtype=torch.int64, device="cpu")
        stays = torch.from_numpy(indices[stay]), torch.from_numpy(values[stay]), many
        about = sent.flags, sent.where
        return SparseGrad(*parts, self.rows, *about), SparseGrad(*stays, self.layout.numel, *about)

    def largest(self, sums: Tensor, owners: Tensor, wire: Wire) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        (whole,), owner = sums, int(owners)
        rows, found = self._nonzero(whole)
        home, _ = within(self.place(rows, owner), self.layout.numel, "index")  # which the last row may not have
        if self.kept < rows.numel():
            chosen = self._reach(found, rows)
            goes, going = rows.index_select(0, chosen), found.index_select(0, chosen)
        else:
            chosen, goes, going = torch.arange(rows.numel(), dtype=torch.int64, device="cpu"), rows, found
        sent = self._rounded(going, self.segment(owner, goes), len(self.layout.segments), wire)
        left = self._left(found, chosen, sent)
        real = sent.numpy() != 0
        if not real.all():
            sent, goes = (own.index_select(0, torch.from_numpy(np.flatnonzero(real))) for own in (sent, goes))
        missing = 0, self.kept - sent.numel()
        travel, indices = (nn.functional.pad(own, missing) if missing[1] else own for own in (sent, goes))
        return (indices[None], travel[None]), (home[None], left[None])

    def rejected(self, stays: SparseGrad, places: Tensor, left: Tensor) -> SparseGrad:
        assert stays.indices is not None
        indices, values = torch.cat([stays.indices, places]), torch.cat([stays.values, left])
        count = torch.tensor(indices.numel(), dtype=torch.int64, device="cpu")
        return replace(stays, indices=indices, values=values, count=count)

    def _nonzero(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of sums that are not 0, and these sums."""
        rows = torch.from_numpy(np.flatnonzero(sums.numpy() != 0))
        return rows, sums.index_select(0, rows)

    def _reach(self, sums: Tensor, rows: Tensor) -> Tensor:
        """Return the numbers of the largest sums, in ascending order."""
        return torch.topk(_keys(sums, rows), self.kept, sorted=False).indices.sort().values

    def _left(self, sums: Tensor, chosen: Tensor, sent: Tensor) -> Tensor:
        """Return what is left of sums."""
        return remainder_of(sums, chosen, sent)

    def _turns(self, rows: Numbers) -> Numbers:
        """What ``_turn`` says, modulo the workers. A division by one number is fast in numpy, a remainder is not."""
        turn = rows.astype(np.uint32)
        turn *= np.uint32(MIXER)
        turn >>= np.uint32(SHIFT)
        turn -= turn // np.uint32(self.workers) * np.uint32(self.workers)
        return turn

    def _below(self, numbers: Numbers) -> Numbers:
        """Numbers below twice the workers, modulo the workers: of those below them, the difference is huge."""
        least: Numbers = np.minimum(numbers, numbers - np.uint32(self.workers))
        return least


def partition_for(tensor: Tensor, layout: Layout, workers: int, share: float) -> IndexPartition:
    """Return a cut that works where ``tensor`` is."""
    if tensor.device.type != "cpu":
        return IndexPartition(layout, workers, share)
    if tensor.dtype == torch.float32 and cpu.LEAST <= layout.numel < 2**31 - workers and cpu.available():
        from sparsync.collectives.compiled_partition import CompiledPartition

        return CompiledPartition(layout, workers, share)
    return HostPartition(layout, workers, share)
