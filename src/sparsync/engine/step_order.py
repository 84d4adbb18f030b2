"""In which order a step's units are compressed and exchanged. Chosen once, when the reducer starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from sparsync.collectives import Reduced
from sparsync.config import ExchangePlan
from sparsync.engine.bucketing import BucketSlice, PendingBucket, Unit
from sparsync.engine.unit_step import keep_result, sketch_unit
from sparsync.engine.worker import WorkerState
from sparsync.feedback import AdamRule, Preconditioner, RoundingFeedback

Job = Callable[[], None]


class UnitPath(Protocol):
    """What an order asks of ``UnitExchange``: the path of one unit, and the communication thread.

    Attributes:
        rates: gives the learning rate by parameter name, if residuals follow it.
        rules: gives the optimizer's hyperparameters by parameter name, to a preconditioner.
        rounding: of sketches as they are made; ``None`` where their sum is rounded.
    """

    plan: ExchangePlan
    worker: WorkerState
    rates: Callable[[], Mapping[str, float]] | None
    rules: Callable[[], Mapping[str, AdamRule]]
    rounding: RoundingFeedback | None

    def compress(self, unit: Unit, step: int, fill: Job | None = None) -> list[Job]: ...

    def add_part(self, part: BucketSlice, buffer: Tensor, unused: frozenset[str]) -> None: ...

    def write_back(self, unit: Unit) -> list[PendingBucket]: ...

    def submit(self, jobs: Sequence[Job]) -> None: ...

    def run(self, device: torch.device, job: Job) -> None: ...


class StepOrder:
    """Every unit is compressed as soon as its gradients are there, and written back as soon as it is exchanged. Where
    they can be added in parts, the communication thread does both while backward goes on.

    ``adds_parts``: whether units that are gathered may begin before all of their gradients are there.
    """

    adds_parts = True

    def __init__(self, path: UnitPath) -> None:
        self.path = path

    def begin_step(self, step: int, loss_scale: float | None) -> Mapping[str, float] | None:
        """Begin a step; returns the learning rates that residuals follow, if they do."""
        return self.path.rates() if self.path.rates is not None else None

    def add(self, pending: PendingBucket, complete: Sequence[Unit], step: int) -> None:
        """Start what a bucket allows; ``complete``: the units whose gradients are there with it."""
        for part in pending.plan.slices:
            if part.unit.added is not None:
                unused = part.names & part.unit.unused
                self.path.submit([partial(self.path.add_part, part, pending.bucket.buffer, unused)])
        for unit in complete:
            if unit.added is None:
                self.path.submit(self.path.compress(unit, step))
            else:
                self.path.submit([partial(self.path.run, unit.grad.device, partial(self._exchange, unit, step))])

    def finish(self, unit: Unit, reduced: Reduced) -> list[PendingBucket]:
        """Take a unit that was exchanged; returns the buckets that it was written into."""
        return self.path.write_back(unit)

    def _exchange(self, unit: Unit, step: int) -> None:
        """Compress and exchange a unit on the communication thread."""
        for job in self.path.compress(unit, step):
            job()


class SketchesFirst(StepOrder):
    """Sketches leave with every bucket; entries are chosen when the sum of all of them is known, which is on the
    communication thread."""

    adds_parts = False

    def __init__(self, path: UnitPath, preconditioner: Preconditioner) -> None:
        super().__init__(path)
        self.preconditioner = preconditioner
        self._waiting: list[Unit] = []  # complete, and not compressed yet
        self._buckets: list[PendingBucket] = []  # of this step

    def begin_step(self, step: int, loss_scale: float | None) -> Mapping[str, float] | None:
        rules = self.path.rules()
        self.preconditioner.begin_step(rules, self.path.plan.density_at(step), loss_scale, self.path.worker.rates)
        self._waiting, self._buckets = [], []
        return {name: rule.rate for name, rule in rules.items()}

    def add(self, pending: PendingBucket, complete: Sequence[Unit], step: int) -> None:
        path = self.path
        sketch, spans, buffer = pending.plan.sketch, pending.plan.spans, pending.bucket.buffer
        if sketch is not None:
            made_by = self.preconditioner, path.rounding
            fill = partial(sketch_unit, sketch, spans, buffer, sketch.grad, *made_by)
            path.submit(path.compress(sketch, step, fill))
        self._waiting += complete
        self._buckets.append(pending)
        if pending.bucket.last:
            device = self.preconditioner.device
            path.submit([partial(path.run, device, self._precondition)])
            path.submit([partial(path.run, device, partial(self._exchange, unit, step)) for unit in self._waiting])
            # Last, as a bucket that is a unit is overwritten as a whole.
            path.submit([partial(path.run, device, partial(self._give_dense, self._buckets))])
            self._waiting = []

    def finish(self, unit: Unit, reduced: Reduced) -> list[PendingBucket]:
        keep_result(unit, unit.grad, self.preconditioner, reduced)
        return [] if unit.feeds_preconditioner else self.path.write_back(unit)

    def _precondition(self) -> None:
        self.preconditioner.update()
        self.path.worker.rounding.keep(self.preconditioner.good)

    def _give_dense(self, buckets: Sequence[PendingBucket]) -> None:
        """Write the updates of the tensors that travel dense into their buckets, which are then complete."""
        places = dict[str, Tensor]()
        for bucket in buckets:
            if bucket.plan.dense is not None:
                places.update(zip(bucket.plan.dense.names, bucket.plan.dense.of(bucket.bucket.buffer), strict=True))
        self.preconditioner.write_dense(places)
        for bucket in buckets:
            if bucket.plan.sketch is not None:
                bucket.waits_for.discard(bucket.plan.sketch.key)
                bucket.complete()


def choose_order(path: UnitPath) -> StepOrder:
    """Return ``SketchesFirst`` with a preconditioner, otherwise a plain ``StepOrder``."""
    preconditioner = path.worker.preconditioner
    return StepOrder(path) if preconditioner is None else SketchesFirst(path, preconditioner)
