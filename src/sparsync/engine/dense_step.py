"""A step in which every entry is sent: the mean of each bucket in bf16 beside backward, as torch's own hook makes it.

For a training that changes between dense and sparse steps. So that both follow the same rule, what a sparse step does
to a gradient before its residual is done here to the mean: momentum is corrected, and an update is preconditioned. The
mean has the same bits on every rank, and so has all that is made of it; velocities, which are a rank's own in sparse
steps, become their mean when dense steps begin. What residuals hold is left alone until ``drain`` asks for it: then it
is sent, in full precision, in equal parts over a few steps. What bf16 cuts off is lost, as it is with torch's hook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from sparsync.collectives import Channel
from sparsync.collectives.base import RING, Traffic, Transfer
from sparsync.engine.bucketing import PendingBucket, Unit
from sparsync.engine.stats import ExchangeRecord
from sparsync.engine.step_order import StepOrder, UnitPath
from sparsync.engine.unit_step import sketch_places
from sparsync.feedback.residual import FlatBuffer
from sparsync.kernels.mean_velocity import move
from sparsync.kernels.precondition import precondition
from sparsync.layout import Span
from sparsync.sparse import give_norm

DRAIN = 8  # steps over which residuals are sent


class HalfBuffer:
    """A bucket as it travels; kept, as fresh memory takes longer to get than to fill."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.values = torch.empty(numel, dtype=torch.bfloat16, device=device)


class UpdateRoom:
    """The updates of a bucket's tensors, in full precision; zeros where a tensor always travels dense."""

    def __init__(self, velocity: Tensor) -> None:
        self.values = torch.zeros_like(velocity)


class DensePath(UnitPath, Protocol):
    """What dense steps ask of the reducer beside that."""

    channel: Channel

    def run_exchange(self, name: str, device: torch.device, job: Callable[[], None]) -> None: ...

    def record(self, record: ExchangeRecord, traffic: float, numel: int) -> None: ...


class DenseStep(StepOrder):
    """Sums buckets as soon as they are there, several at a time; results are written on the communication thread."""

    adds_parts = False

    def __init__(self, path: DensePath) -> None:
        super().__init__(path)
        self.exchange, self.feedback = path, path.worker.feedback
        self.preconditioner, self.correction = path.worker.preconditioner, path.plan.correction
        self.draining = 0  # steps from the next one on in which residuals are still to be sent
        self._unequal = (
            True  # velocities are not known to be the same on every rank: an optimizer may have brought some
        )
        self._parts, self._meets, self._serial = 0, False, False  # of this step: the same, and exchanges one by one
        self._buckets: list[PendingBucket] = []
        self._drained: dict[str, tuple[Tensor, Tensor, Tensor]] = {}  # residual, this rank's part, mean; by bucket

    def enter(self) -> None:
        """Begin with dense steps: sparse ones, or a checkpoint, came before."""
        self._unequal = True

    def drain(self) -> None:
        """Send what residuals hold, over the next steps."""
        self.draining = DRAIN

    def begin_step(self, step: int, loss_scale: float | None) -> Mapping[str, float] | None:
        # Fixed as the step begins: while this thread decides on the next step, the other may still end the last.
        self._parts, self.draining = self.draining, max(0, self.draining - 1)
        self._meets, self._unequal = self._unequal, False
        self._serial, self._buckets = bool(self._parts) or self._meets, []
        if self.preconditioner is None:
            return None
        rates = self.path.worker.rates  # residuals stay in these, and follow when they are sent from
        self.preconditioner.begin_step(self.path.rules(), 1.0, loss_scale, rates)
        return rates

    def add(self, pending: PendingBucket, complete: Sequence[Unit], step: int) -> None:
        buffer, record = pending.bucket.buffer, ExchangeRecord(f"bucket {pending.bucket.index}")
        device, half = buffer.device, buffer
        if (
            buffer.dtype == torch.float32 and self.exchange.channel.size > 1
        ):  # one alone sends nothing, and rounds nothing
            room = pending.plan.workspace.get(HalfBuffer, device, lambda: HalfBuffer(buffer.numel(), device))
            half = room.values.copy_(buffer)
        else:
            buffer.div_(self.exchange.channel.size)
        record.compressed = record.started = record.arrived
        if pending.plan.own is not None and not self._parts:
            pending.plan.own.unused = set()  # which only residuals ask for
        # Other exchanges of this step, on the communication thread, must not come in between.
        wait = None if self._serial else self.exchange.channel.begin_all_reduce(half)
        finish = partial(self._finish, pending, half, wait, record)
        path, self._buckets = self.exchange, [*self._buckets, pending]
        path.submit([partial(path.run_exchange, record.unit, device, finish)])
        if pending.bucket.last and self._waits_for_all:
            close = partial(self._close, self._buckets)
            path.submit([partial(path.run_exchange, "the end of the step", device, close)])

    def _finish(
        self, pending: PendingBucket, half: Tensor, wait: Callable[[], Tensor] | None, record: ExchangeRecord
    ) -> None:
        """Make a bucket the mean, with momentum; whoever waits for it may have it, unless all of them are needed."""
        buffer, channel = pending.bucket.buffer, self.exchange.channel
        channel.unit = record.unit
        total = channel.all_reduce(half) if wait is None else wait()
        scale = 1.0 if total is buffer else 1 / channel.size
        if self.correction is not None:
            self._correct(pending, total, scale, self.correction.beta)
        elif total is not buffer:
            buffer.copy_(total).mul_(scale)
        ring = 2 * (channel.size - 1)
        sent = Traffic.of(Transfer(RING, ring, ring / channel.size * total.nbytes))
        self.exchange.record(record, sent.mean_bytes, buffer.numel())
        if not self._waits_for_all:
            pending.waits_for.clear()
            pending.complete()

    def _correct(self, pending: PendingBucket, total: Tensor, scale: float, beta: float) -> None:
        """Make a bucket of its sum the mean with momentum in it. Where that is not finite, velocities stay as they were
        and the mean shows it."""
        velocity, buffer = self._velocity(pending, pending.plan.spans).working, pending.bucket.buffer
        finite = _finite(total)
        if buffer.device.type == "cpu":
            if finite:
                move(total, scale, velocity, beta, buffer)
            elif total is not buffer:
                buffer.copy_(total).mul_(scale)
            return
        buffer.copy_(total).mul_(scale)
        moved = torch.add(buffer, velocity, alpha=beta)
        velocity.copy_(torch.where(finite, moved, velocity))
        buffer.copy_(torch.where(finite, moved, buffer))

    def _velocity(self, pending: PendingBucket, spans: Sequence[Span]) -> FlatBuffer:
        """Return a bucket's velocities, which are the same on every rank."""
        buffer, channel = pending.bucket.buffer, self.exchange.channel
        kept = self.feedback.velocity_buffer(_key(pending), spans, buffer.numel(), buffer.device)
        if self._meets:
            channel.all_reduce(kept.working).div_(channel.size)
        return kept

    @property
    def _waits_for_all(self) -> bool:
        """Whether no bucket is given back before all of the step is known."""
        return self.preconditioner is not None or bool(self._parts)

    def _sum_parts(self, buckets: Sequence[PendingBucket]) -> None:
        """Sum a part of what the ranks keep of every bucket; the last part is all that is left. Nothing is taken out of
        residuals yet, and nothing will be if the mean is not finite. What a rank did not use it does not send from."""
        self._drained = {}
        finite = torch.stack([_finite(pending.bucket.buffer) for pending in buckets]).all()
        for pending in buckets:
            own, buffer, channel = pending.plan.own, pending.bucket.buffer, self.exchange.channel
            if own is None:
                continue
            residual = self.feedback.memory(_key(pending), own.spans, buffer.numel(), buffer.device).after
            part = torch.where(finite, residual * (1 / self._parts), 0)
            for span in own.spans:
                if span.name in own.unused:
                    part[span.start : span.stop] = 0
            own.unused = set()
            self._drained[_key(pending)] = residual, part, channel.all_reduce(part.clone()).div_(channel.size)

    def _drain(self, pending: PendingBucket, out: Tensor) -> None:
        """Add the mean of the parts that were summed, and take this rank's out of its residual."""
        if _key(pending) in self._drained:
            residual, part, mean = self._drained.pop(_key(pending))
            residual.sub_(part)
            out.add_(mean)

    def _close(self, buckets: Sequence[PendingBucket]) -> None:
        """End a step all of whose mean is needed: to make updates, or to know that residuals can be sent from."""
        if self._parts:
            self._sum_parts(buckets)
        if self.preconditioner is not None:
            self._precondition(buckets)
        for pending in buckets:
            if self.preconditioner is None:
                self._drain(pending, pending.bucket.buffer)
            pending.waits_for.clear()
            pending.complete()

    def _precondition(self, buckets: Sequence[PendingBucket]) -> None:
        """Make of the mean what the taken optimizer applies: sketches of it need no sum over the ranks."""
        preconditioner = self.preconditioner
        assert preconditioner is not None
        for pending in buckets:
            sketch, plan = pending.plan.sketch, pending.plan
            if sketch is not None:
                places = sketch_places(sketch, plan.spans, preconditioner)
                preconditioner.sketch(places, pending.bucket.buffer, sketch.grad, sketch.workspace)
                preconditioner.add_sketch(sketch.spans, sketch.grad)
        preconditioner.update()
        dense = dict[str, Tensor]()
        for pending in buckets:
            self._update(pending)
            if pending.plan.dense is not None:
                dense.update(zip(pending.plan.dense.names, pending.plan.dense.of(pending.bucket.buffer), strict=True))
        preconditioner.write_dense(dense)

    def _update(self, pending: PendingBucket) -> None:
        """Write the update that a bucket's mean asks for, all but that of tensors that always travel dense."""
        own, preconditioner, buffer = pending.plan.own, self.preconditioner, pending.bucket.buffer
        if own is None:
            return
        assert preconditioner is not None
        velocity, out = self._velocity(pending, own.spans), buffer
        if buffer.dtype != velocity.working.dtype:
            room = pending.plan.workspace.get(UpdateRoom, id(velocity), lambda: UpdateRoom(velocity.working))
            out = room.values
        update = preconditioner.update_of(own.spans, velocity, own.workspace)  # where no residual has a part
        precondition(buffer, update, out, own.workspace)
        if pending.plan.dense is not None:  # what always travels dense is written later, and counts in no norm here
            torch._foreach_zero_(pending.plan.dense.of(buffer))
        self._drain(pending, out)
        if out is not buffer:
            buffer.copy_(out)
        preconditioner.show(own.spans, buffer, give_norm)


def _finite(tensor: Tensor) -> Tensor:
    """Return whether all of a gradient is finite; half precision has no room for the sum."""
    return torch.isfinite(tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)))


def _key(pending: PendingBucket) -> str:
    return f"dense {pending.bucket.index}"
