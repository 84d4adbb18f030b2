"""Hierarchical exchange: a dense sum inside each node, a sparse exchange between the nodes' leaders, the result to all.

A node's leader, its first rank, goes on with the sum of its node's gradients as a worker does with its own: it has the
one residual of the node, and compresses. The leaders exchange by any collective, on a channel of their own, and divide
by the number of all ranks; what a leader writes is broadcast in its node, so that all ranks have the same bits.

Where ranks are workers of their own there is ``Flat``; ``Nodes`` is the stage for nodes. ``choose_stage`` makes one of
them when the handle starts.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.collectives import Channel, Reduced
from sparsync.collectives.base import FiniteFlag, Mean
from sparsync.collectives.comm.sub_channel import split
from sparsync.config.nodes import Groups
from sparsync.engine.bucketing import BucketPlan, PendingBucket, Unit
from sparsync.errors import SparsyncError
from sparsync.feedback import accumulation_dtype
from sparsync.layout import Layout
from sparsync.sparse import FAILED, SparseGrad
from sparsync.wire import seal


class Flat:
    """Every rank exchanges its own gradients.

    Attributes:
        groups: the ranks of each node; empty where there are none.
        sums_first: gradients are summed before entries are chosen, which is then done on the communication thread.
        senders: how many gradients, or sums of them, are exchanged.
        ranks: whose gradients this rank exchanges: 0, if another does it.
    """

    groups: Groups = ()
    sums_first = False

    def __init__(self, channel: Channel) -> None:
        self.channel, self.senders, self.ranks = channel, channel.size, 1

    @property
    def between(self) -> Channel | None:
        """The channel on which what was compressed is exchanged, if this rank does that."""
        return self.channel

    def sum_slices(self, pending: PendingBucket) -> None:
        """Sum what units gather from a bucket as it comes, so that the sums run beside backward."""

    def sum(self, unit: Unit, layout: Layout, failed: bool) -> Tensor:
        """Return the gradient that is exchanged; of a node, the sum over its ranks, where this rank leads it.

        Args:
            failed: this rank has no gradient to add.
        """
        return unit.grad

    def reduce(self, unit: Unit, sent: SparseGrad, layout: Layout) -> Reduced:
        """Exchange what is ``sent``; returns what every rank is given."""
        return unit.collective.reduce(sent, layout, self.channel, unit.workspace)

    def take_count(self) -> int:
        """Return bytes of the tensors handed to ``torch.distributed`` since the last call."""
        return self.channel.take_count()

    def close(self) -> None:
        """Give process groups back that are not the channel's."""


class NodeSum:
    """A node's sum of a unit, in the residual's dtype.

    Attributes:
        summed: parameters whose sum came with their buckets in this step.
    """

    def __init__(self, unit: Unit) -> None:
        self.total = torch.empty_like(unit.grad, dtype=accumulation_dtype(unit.grad.dtype))
        self.summed: set[str] = set()


class SliceSums:
    """Room for what units gather from a bucket, one after another."""

    def __init__(self, plan: BucketPlan, buffer: Tensor) -> None:
        self.names = zlib.crc32(repr([span.name for span in plan.spans]).encode()) & 0x7FFFFFFF
        sizes = [span.numel for part in plan.slices for span in part.here.spans]
        self.flat = buffer.new_empty(sum(sizes), dtype=accumulation_dtype(buffer.dtype))
        self.parts = list(torch.split(self.flat, sizes))


@dataclass
class NodeMean(Mean):
    """The result of an exchange between leaders: a leader writes it, its node is given it.

    Args:
        mean: what the leader writes; ``None`` elsewhere.
    """

    nodes: Nodes
    mean: Mean | None

    def write(self, out: Tensor, flag: FiniteFlag | None = None) -> None:
        with self.nodes.telling():
            if self.mean is not None:
                self.mean.write(out, flag)
            self.nodes.inside.broadcast(out.view(torch.uint8))
        if self.mean is None and flag is not None:
            flag.check_finite(out)


class Nodes(Flat):
    """Ranks in nodes: the first rank of each exchanges the sum of its node's gradients.

    Args:
        channel: of all ranks.
        groups: the ranks of each node, all ranks in ascending order of the nodes' first ones.
    """

    sums_first = True

    def __init__(self, channel: Channel, groups: Groups) -> None:
        super().__init__(channel)
        leaders = tuple(group[0] for group in groups)
        self.groups, self.inside, self.senders = groups, split(channel, groups), len(groups)
        self._across = split(channel, [leaders, tuple(rank for rank in channel.ranks if rank not in leaders)])
        self.leaders = self._across if channel.rank in leaders else None
        self.ranks = self.inside.size if self.leaders is not None else 0
        self._sums: dict[str, NodeSum] = {}  # by the unit's key

    @property
    def between(self) -> Channel | None:
        return self.leaders

    def sum_slices(self, pending: PendingBucket) -> None:
        plan, buffer = pending.plan, pending.bucket.buffer
        if not plan.slices:
            return
        room = plan.workspace.get(SliceSums, buffer.device, lambda: SliceSums(plan, buffer))
        here = [view for part in plan.slices for view in part.here.of(buffer)]
        self._verify(nothing(plan.slices[0].unit), pending.bucket.index, room.names)
        torch._foreach_copy_(room.parts, here)
        with self.telling():
            self.inside.sum_at_first(room.flat)
        parts = iter(room.parts)
        for part in plan.slices:
            own = self._sum_of(part.unit)
            own.summed |= part.names
            there = [own.total[span.start : span.stop] for span in part.there.spans]
            torch._foreach_copy_(there, [next(parts) for _ in there])

    def sum(self, unit: Unit, layout: Layout, failed: bool) -> Tensor:
        own, unit_sum = nothing(unit, FAILED if failed else 0), self._sum_of(unit)
        total, summed, unit_sum.summed = unit_sum.total, unit_sum.summed, set()
        self._verify(own, layout.id, layout.digest)
        if not summed:
            with self.telling():
                self.inside.sum_at_first(total.copy_(unit.grad))
        for span in layout.spans if summed else ():
            if span.name not in summed:  # no bucket brought it
                total[span.start : span.stop].zero_()
        if unit.unused and self.ranks:  # here: others may have used it
            places = ((span.name, total[span.start : span.stop]) for span in layout.spans if span.name in unit.unused)
            unit.unused = {name for name, own in places if not own.any()}
        return total

    def _verify(self, own: SparseGrad, number: int, digest: int) -> None:
        """Raise, on all ranks, if one of the node has failed or is at another exchange: before anything is summed."""
        self.channel.sequence += 1
        with self.telling():
            header = seal(self.inside.wire.header(own, self.inside.sequence, number, digest))
            self.inside.verify(self.inside.all_gather(header))

    def _sum_of(self, unit: Unit) -> NodeSum:
        known, grad = self._sums.get(unit.key), unit.grad
        like = grad.numel(), grad.device, accumulation_dtype(grad.dtype)
        if known is None or (known.total.numel(), known.total.device, known.total.dtype) != like:
            known = self._sums[unit.key] = NodeSum(unit)
        return known

    def reduce(self, unit: Unit, sent: SparseGrad, layout: Layout) -> Reduced:
        reduced, found = None, torch.full((self.senders,), -1, dtype=torch.int32, device=unit.grad.device)
        with self.telling():
            if self.leaders is not None:
                reduced = unit.collective.reduce(sent, layout, self.leaders, unit.workspace)
                for node, where in reduced.bad_ranks:
                    found[node] = where
            self.inside.broadcast(found)
            bad = [(group[0], where) for group, where in zip(self.groups, found.tolist(), strict=True) if where >= 0]
            if bad:
                bad = self._find_bad(unit, layout) or bad  # a sum may overflow where no rank's gradient does
        mean = NodeMean(self, None if reduced is None else reduced.mean)
        return Reduced(mean, None if reduced is None else reduced.rejected, bad)

    def _find_bad(self, unit: Unit, layout: Layout) -> list[tuple[int, int]]:
        """Return ``(rank, number of the parameter)`` of each rank whose own gradient is not finite. Headers tell the
        node alone; this is asked of all ranks in a step that is lost anyway."""
        finite = [bool(unit.grad[span.start : span.stop].isfinite().all()) for span in layout.spans]
        own = torch.tensor([finite.index(False) if False in finite else -1], dtype=torch.int32, device="cpu")
        rows: list[int] = self.channel.all_gather(own.to(unit.grad.device)).view(-1).tolist()
        return [(rank, where) for rank, where in enumerate(rows) if where >= 0]

    def take_count(self) -> int:
        return sum(part.take_count() for part in (self.channel, self.inside, self._across))

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell all ranks what goes wrong: in other exchanges all see the same headers, here other nodes do not, nor do
        ranks that wait for their leader."""
        try:
            yield
        except SparsyncError as error:
            raise self.channel.monitor.broadcast_error(error) from None

    def close(self) -> None:
        self.inside.close()
        self._across.close()


def choose_stage(channel: Channel, groups: Groups) -> Flat:
    """Return ``Nodes`` where there are nodes, otherwise ``Flat``."""
    return Nodes(channel, groups) if groups else Flat(channel)


def nothing(unit: Unit, flags: int = 0) -> SparseGrad:
    """Return what a rank sends that has no entries to send: those whom another leads."""
    word = torch.tensor([flags, -1], dtype=torch.int32, device=unit.grad.device)
    indices = torch.zeros(0, dtype=torch.int64, device=unit.grad.device)
    values = unit.grad.new_zeros(0, dtype=accumulation_dtype(unit.grad.dtype))
    return SparseGrad(indices, values, indices.new_zeros(()), unit.grad.numel(), word[0], word[1])
