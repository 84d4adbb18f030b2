"""The path of one unit: compress -> exchange -> sum -> write back into the buckets it came from.

``compress`` is called from backward, or by the communication thread, as the ``step_order`` has it; all else runs on the
communication thread. What goes wrong there ends the step for all ranks: a future that never completes would hang
backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsync.collectives.comm.comm_thread import CommThread
from sparsync.config import ExchangePlan
from sparsync.engine.bucketing import BucketSlice, PendingBucket, Unit, gather_beside, places_in, scatter_result
from sparsync.engine.checkpoint import Origin
from sparsync.engine.completion import Completion
from sparsync.engine.error_handling import ErrorHandler
from sparsync.engine.hierarchy import Flat, nothing
from sparsync.engine.ledger import Cause
from sparsync.engine.profiling import compressing, decoding, exchanging
from sparsync.engine.replay import Replay, Replays, replays_for
from sparsync.engine.stats import ExchangeRecord
from sparsync.engine.step_order import Job, StepOrder, choose_order
from sparsync.engine.streams import SideStreams
from sparsync.engine.unit_step import Moment, compress_unit, cut_unit, failed_unit, round_unit
from sparsync.feedback import AdamRule
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad


class UnitExchange:
    """Takes units from their gradients to the mean over all ranks.

    Args:
        stage: whose gradients a rank exchanges: its own, or those of its node.
        completion: when the host learns what came of an exchange.
        errors: who ends a step in which something goes wrong.
        streams: on a GPU, where all of it runs.
        origin: of a state that was loaded, which ranks compare before the first exchange.
        rates: gives the learning rate by parameter name, if residuals follow it.

    Attributes:
        rules: gives the optimizer's hyperparameters by parameter name, to a preconditioner.
        rounding: of sketches as they are made; ``None`` where their sum is rounded.
        order: in which units go.
        replays: what was recorded of their steps, as CUDA graphs.
    """

    def __init__(
        self,
        stage: Flat,
        completion: Completion,
        errors: ErrorHandler,
        comm_thread: CommThread,
        streams: SideStreams,
        origin: Origin,
        rates: Callable[[], Mapping[str, float]] | None,
    ) -> None:
        self.stage, self.completion, self.errors, self.current = stage, completion, errors, errors.current
        self.comm_thread, self.streams, self.origin, self.rates = comm_thread, streams, origin, rates
        self.plan, self.channel, self.worker = completion.plan, completion.channel, completion.worker
        self.stats = completion.stats
        self.rules: Callable[[], Mapping[str, AdamRule]] = dict
        self.rounding = None if stage.sums_first else self.worker.rounding
        self.order = choose_order(self)
        self.replays = replays_for(self.plan, self.worker, stage, completion)

    def use(self, plan: ExchangePlan, order: StepOrder) -> None:
        """Exchange in another way from the next step on."""
        self.plan, self.order = plan, order
        self.worker.plan = self.completion.plan = plan
        self.channel.wire = plan.wire
        self.replays = replays_for(plan, self.worker, self.stage, self.completion)

    def submit(self, jobs: Sequence[Job], device: torch.device | None = None) -> None:
        """Run jobs on the communication thread, after all earlier ones; ``device``: of one who is not within ``push``,
        and whose own stream is not to wait for them."""
        with nullcontext() if device is None else self.streams.use(device, after_caller=True):
            for job in jobs:
                self.comm_thread.submit(job)

    def compress(self, unit: Unit, step: int, fill: Job | None = None) -> list[Job]:
        """Take out of the residual what is sent; return what is left to do on the communication thread.

        Args:
            fill: writes the unit's gradient, where no bucket brought it.
        """
        record, jobs = ExchangeRecord(unit.key), list[Job]()
        layout, fresh = cut_unit(unit, self.plan, step, [self.worker] if self.stage.ranks else [])
        if fresh:
            # Messages of different sizes would abort Gloo, so the ranks compare a layout before its first exchange.
            jobs.append(partial(self._compare_layout, unit, [*self.origin.take(), *map(str, layout.segments)]))
        if self.stage.sums_first:
            return [*jobs, partial(self._exchange_sum, unit, layout, record, step, fill)]
        if self.replays is not None:
            buckets = self._fed_by(unit)
            replay = None if fresh or self.errors.error else self.replays.find(unit, layout, buckets)
            if replay is not None:
                return [partial(self._replay, self.replays, replay, unit, layout, record)]
            gather_beside(unit, buckets)
        sent = self._take_out(unit, unit.grad, layout, record, step, fill)
        return [*jobs, partial(self._exchange, unit, layout, sent, record, step)]

    def _take_out(
        self, unit: Unit, grad: Tensor, layout: Layout, record: ExchangeRecord, step: int, fill: Job | None
    ) -> SparseGrad:
        """Return what is sent of a gradient, taken out of the residual."""
        try:
            with compressing():
                if fill is not None:
                    fill()
                sent, memory = compress_unit(unit, grad, layout, self.plan, self.worker, Moment(step), unit.workspace)
            record.energy = memory.energy if memory else 0.0
        except Exception as error:  # travels as a flag: every rank raises, none waits
            self.errors.tell_failed(unit, error)
            sent = failed_unit(unit, layout)
        record.ahead = 0.0 if unit.added is None else unit.added.seconds
        unit.unused, unit.added = set(), None
        record.compressed = time.perf_counter()
        return sent

    def add_part(self, part: BucketSlice, buffer: Tensor, unused: frozenset[str]) -> None:
        """Add what a unit is given of a bucket to its residual; all ranks hear of what goes wrong."""
        if self.errors.error is None and part.unit.added is not None:
            try:
                part.unit.added.add(part.there.names, part.here.of(buffer), unused)
            except Exception as error:  # the communication thread would only log it, and the gradient be lost
                self.errors.fail(error)

    def run(self, device: torch.device, job: Job) -> None:
        """Do a job of the communication thread that sends no message yet, unless the step has failed; all ranks hear of
        what goes wrong in it."""
        if self.errors.error is None:
            try:
                with self.on_thread(device):
                    job()
            except Exception as error:
                self.errors.fail(error)

    def run_exchange(self, name: str, device: torch.device, job: Job) -> None:
        """Do a job of the communication thread that exchanges, unless the step has failed."""
        if self.errors.error is None:
            try:
                with self.on_thread(device), exchanging():
                    job()
            except Exception as error:  # a future that never completes would hang backward
                self.errors.stop(self.errors.announced(name, error))

    def record(self, record: ExchangeRecord, traffic: float, numel: int) -> None:
        """Count an exchange that sent every entry."""
        record.exchanged = record.decoded = time.perf_counter()
        record.bytes, record.traffic = self.channel.take_count(), traffic
        self.stats.add(record)
        self.stats.count_entries(record, numel, numel)

    def on_thread(self, device: torch.device) -> AbstractContextManager[Any]:
        """Make our stream current on the communication thread; elsewhere ``push`` has done it."""
        return self.streams.use(device) if self.comm_thread.threaded else nullcontext()

    def sum_slices(self, pending: PendingBucket) -> None:
        """Sum over the ranks of the node what units gather from a bucket."""
        if self.errors.error is None:
            self.channel.unit = what = f"bucket {pending.bucket.index}"
            try:
                with self.on_thread(pending.bucket.buffer.device), exchanging():
                    self.stage.sum_slices(pending)
            except Exception as error:
                self.errors.stop(self.errors.announced(what, error))

    def _exchange_sum(self, unit: Unit, layout: Layout, record: ExchangeRecord, step: int, fill: Job | None) -> None:
        """Sum a unit over the ranks of the node, whose leader then exchanges that as its own gradient."""
        sent = nothing(unit)
        if self.errors.error is None:
            try:
                with self.on_thread(unit.grad.device):
                    self.channel.unit = unit.key
                    with exchanging():
                        total = self.stage.sum(unit, layout, self._failed(unit, fill))
                    record.arrived = record.compressed = time.perf_counter()
                    if self.stage.ranks:
                        rounding = partial(round_unit, unit, total, self.worker.rounding)
                        sent = self._take_out(unit, total, layout, record, step, rounding)
            except Exception as error:
                self.errors.stop(self.errors.announced(unit.key, error))
                return
        unit.unused = set()
        self._exchange(unit, layout, sent, record, step)

    def _exchange(self, unit: Unit, layout: Layout, sent: SparseGrad, record: ExchangeRecord, step: int) -> None:
        """Exchange, sum and write back, on the communication thread; the reducer may be a step ahead by now."""
        if self.errors.error is not None:
            self.worker.ledger.record_sent(unit, sent)
            self.errors.stop(self.errors.error, Cause.NEVER_SENT)
            return
        try:
            with self.on_thread(unit.grad.device):
                record.started = time.perf_counter()
                self.worker.ledger.record_sent(unit, sent, overwritten=True)
                record.energy_sent = torch.dot(sent.values, sent.values).item() if record.energy else 0.0
                self.channel.unit, self.channel.left_out = unit.key, None
                with exchanging():
                    reduced = self.stage.reduce(unit, sent, layout)
                record.exchanged = time.perf_counter()
                with decoding():
                    if self._writes_at_once:
                        unit.places = places_in(unit, self.current.buckets)
                    self.completion.finish(unit, layout, sent, reduced, record, step)
                    self.channel.left_out = None  # it is back
                    written = self.order.finish(unit, reduced)
                self._end_exchange(unit, layout, sent, record, written)
        except Exception as error:  # a future that never completes would hang backward
            self.errors.stop(self.errors.announced(unit.key, error))

    def _replay(self, replays: Replays, replay: Replay, unit: Unit, layout: Layout, record: ExchangeRecord) -> None:
        """Do all that was recorded of a unit's step: compress, exchange, sum and write back."""
        try:
            record.compressed = record.started = time.perf_counter()
            self.channel.unit = unit.key
            with exchanging():
                replays.play(replay, unit)
            record.exchanged = time.perf_counter()
            replays.completion.note(unit, layout, replay.rejected, record)
            written = self._fed_by(unit)
            for bucket in written:
                bucket.waits_for.discard(unit.key)
            self._end_exchange(unit, layout, replay.in_flight, record, written)
        except Exception as error:  # a future that never completes would hang backward
            self.errors.stop(self.errors.announced(unit.key, error))

    def _end_exchange(
        self, unit: Unit, layout: Layout, sent: SparseGrad, record: ExchangeRecord, written: Sequence[PendingBucket]
    ) -> None:
        record.decoded, record.bytes = time.perf_counter(), self.stage.take_count()
        if self.stage.ranks:
            traffic = unit.traffic(layout, self.plan.wire, self.stage.senders, sent.values.dtype)
            record.traffic = traffic.mean_bytes
        self.stats.add(record)
        for bucket in written:  # last: backward goes on, and the next step may begin
            bucket.complete()

    def _fed_by(self, unit: Unit) -> list[PendingBucket]:
        """Return the buckets that wait for a unit's result."""
        return [bucket for bucket in self.current.buckets if unit.key in bucket.waits_for]

    @property
    def _writes_at_once(self) -> bool:
        """Whether nobody but the buckets asks for the results of units."""
        return self.order.adds_parts and self.completion.waits and not self.plan.debug

    def write_back(self, unit: Unit) -> list[PendingBucket]:
        """Write a unit's result into the buckets it came from, and return those."""
        pending = self._fed_by(unit)
        scatter_result(unit, pending)
        return pending

    def _compare_layout(self, unit: Unit, lines: list[str]) -> None:
        try:
            if self.errors.error is None:
                self.channel.assert_consistent(f"loaded state, or the layout of {unit.key},", "\n".join(lines))
        except Exception as error:
            self.errors.stop(self.errors.announced(unit.key, error))

    def _failed(self, unit: Unit, fill: Job | None) -> bool:
        """Write a unit's gradient, where no bucket brought it; return whether that failed."""
        try:
            if fill is not None:
                fill()
        except Exception as error:
            self.errors.tell_failed(unit, error)
            return True
        return False
