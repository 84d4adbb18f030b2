"""When the host learns what came of an exchange: at once, or a step later. Chosen once, when the reducer starts."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsync.collectives import Channel, Reduced, Report
from sparsync.collectives.base import OverflowFlag
from sparsync.collectives.comm.device_status import DeviceStatus, Outcome
from sparsync.collectives.comm.header_checks import DeviceChecks, OnStream, check_fits, check_headers
from sparsync.config import ExchangePlan
from sparsync.engine.bucketing import PendingBucket, Unit
from sparsync.engine.ledger import Cause
from sparsync.engine.non_finite_log import NonFiniteLog
from sparsync.engine.stats import ExchangeRecord, Stats
from sparsync.engine.unit_step import finish_unit, poison, poison_unit
from sparsync.engine.worker import WorkerState
from sparsync.errors import SparsyncError
from sparsync.layout import Layout, Parameter, Span
from sparsync.sparse import NONFINITE, SparseGrad
from sparsync.workspace import Workspace


class Completion:
    """What becomes of an exchange once its messages are there.

    Attributes:
        waits: the host waits for every exchange, so that a thread of its own has to run them.
        bad: in the last step of which the host knows, a gradient was not finite.
    """

    waits = True

    def __init__(self, plan: ExchangePlan, channel: Channel, worker: WorkerState, stats: Stats) -> None:
        self.plan, self.channel, self.worker, self.stats = plan, channel, worker, stats
        self.bad, self.non_finite = False, NonFiniteLog(channel.rank == 0)

    def begin_step(self, on_stream: OnStream) -> None:
        """Begin a step."""
        self.bad = False

    def finish(
        self, unit: Unit, layout: Layout, sent: SparseGrad, reduced: Reduced, record: ExchangeRecord, step: int
    ) -> None:
        """Write the result into the unit; in a bad step, with NaN in it."""
        raise NotImplementedError

    def close_step(self, device: torch.device, step: int, buckets: Sequence[PendingBucket]) -> None:
        """End a step: all its units are written. If it can be undone, and is bad, all of its ``buckets`` show NaN, also
        those that were written before that was known: another optimizer may apply them."""

    def poll(self, before: int) -> None:
        """Learn what came of the steps before this one; raise, on every rank alike, what went wrong in them."""

    def completed(self, steps: int) -> int:
        """Return how many of so many steps are known to be completed."""
        return steps

    def update_stats(self) -> None:
        """Let the statistics have all that is known of past steps."""

    def forget(self) -> None:
        """Expect no more from the device."""


def choose_completion(
    plan: ExchangePlan, parameters: list[Parameter], channel: Channel, worker: WorkerState, stats: Stats
) -> Completion:
    """Return ``Deferred`` where nothing in an exchange needs the host, otherwise ``Immediate``."""
    simple = all(p.dtype != torch.float64 for p in parameters) and plan.wire.indices != "block"
    if channel.may_defer and plan.collective.deferrable and simple and not plan.debug:
        channel.checks = checks = DeviceChecks(channel.size)
        return Deferred(plan, channel, worker, stats, checks)
    return Immediate(plan, channel, worker, stats)  # the channel's own checks are the host's


class Immediate(Completion):
    """The host waits for every exchange and knows at once what came of it."""

    def finish(
        self, unit: Unit, layout: Layout, sent: SparseGrad, reduced: Reduced, record: ExchangeRecord, step: int
    ) -> None:
        flag = OverflowFlag(unit.grad.device) if self.plan.keeps_residuals else None
        finish_unit(unit, unit.grad, flag, [replace(reduced, rejected=None)], [self.worker])
        self.worker.ledger.restore_rejected(unit, reduced.rejected)  # and noted at once, for an error that comes now
        self.worker.ledger.record_rejected(unit, reduced.rejected)
        check_fits(int(self.channel.checks.failed_exchange(unit.grad.device)), self.channel.monitor)
        for rank, where in reduced.bad_ranks:
            self.non_finite.note(step, layout, rank, where)
        self.bad = self.bad or bool(reduced.bad_ranks) or (flag is not None and bool(flag.bad))
        if self.bad:
            poison_unit(unit, layout.spans)
            self.worker.ledger.restore(Cause.NON_FINITE)
        if self.plan.debug:
            self.channel.assert_consistent(f"result of {unit.key}", _fingerprint(unit.grad))
        self.stats.count_entries(record, int(sent.count), layout.sendable)

    def close_step(self, device: torch.device, step: int, buckets: Sequence[PendingBucket]) -> None:
        if self.bad and self.plan.transactional:
            for pending in buckets:
                poison(pending.bucket.buffer, pending.plan.spans)


@dataclass
class PendingStep:
    """A step whose outcome is on its way from the device."""

    step: int
    report: Report
    device: torch.device
    exchanges: list[tuple[ExchangeRecord, Layout]]
    outcome: Outcome | None = None


class PositionsOfParameters:
    """Where each parameter of a flat gradient starts, on its device."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self.starts = torch.tensor([span.start for span in spans], dtype=torch.int64, device=device)

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device, workspace: Workspace) -> PositionsOfParameters:
        """Return those of ``spans``, which the workspace belongs to."""
        return workspace.get(cls, device, lambda: cls(spans, device))


class Deferred(Completion):
    """The device decides, and the host never waits: it learns of a step when a later one begins."""

    waits = False

    def __init__(
        self, plan: ExchangePlan, channel: Channel, worker: WorkerState, stats: Stats, checks: DeviceChecks
    ) -> None:
        super().__init__(plan, channel, worker, stats)
        self._checks = checks
        self._started: list[tuple[ExchangeRecord, Layout]] = []  # exchanges of the step under way
        self._pending: list[PendingStep] = []

    def begin_step(self, on_stream: OnStream) -> None:
        super().begin_step(on_stream)
        self._checks.begin_step(on_stream)

    def finish(
        self, unit: Unit, layout: Layout, sent: SparseGrad, reduced: Reduced, record: ExchangeRecord, step: int
    ) -> None:
        self.write(unit, layout, reduced)
        self.note(unit, layout, reduced.rejected, record)

    def write(self, unit: Unit, layout: Layout, reduced: Reduced) -> None:
        """Write the result, which a CUDA graph may repeat."""
        status = self.status(unit.grad.device)
        result = replace(reduced, rejected=None)  # what is rejected goes back when the step is known to count
        finish_unit(unit, unit.grad, status if self.plan.keeps_residuals else None, [result], [self.worker])
        positions = PositionsOfParameters.of(layout.spans, unit.grad.device, unit.workspace)
        status.poison(unit.grad, positions.starts, self.plan.transactional)

    def note(self, unit: Unit, layout: Layout, rejected: SparseGrad | None, record: ExchangeRecord) -> None:
        """Expect word of an exchange whose result is written."""
        self.worker.ledger.record_rejected(unit, rejected, held=True)
        self.worker.ledger.record_exchange(unit, self.channel.sequence)
        self._started.append((record, layout))

    def status(self, device: torch.device) -> DeviceStatus:
        """Return what decides on that device."""
        return self._checks.status(device)

    def close_step(self, device: torch.device, step: int, buckets: Sequence[PendingBucket]) -> None:
        status = self._checks.status(device)
        for pending in buckets if self.plan.transactional else ():
            positions = PositionsOfParameters.of(pending.plan.spans, device, pending.plan.workspace)
            status.poison(pending.bucket.buffer, positions.starts, True)
        self.worker.ledger.restore_on_device(status)
        self._pending.append(PendingStep(step, status.close_step(), device, self._started))
        self._started = []

    def poll(self, before: int) -> None:
        while self._pending and self._pending[0].step < before:
            pending = self._pending[0]
            outcome = self._read(pending)
            suspect = outcome.bad or outcome.failed_exchange  # else the device has found nothing in the headers
            for (_, layout), headers in zip(pending.exchanges, outcome.exchanges, strict=True) if suspect else ():
                check_headers(headers, self.channel.monitor)
                for rank, header in enumerate(headers):
                    if header.flags & NONFINITE:
                        self.non_finite.note(pending.step, layout, rank, header.where)
            check_fits(outcome.failed_exchange, self.channel.monitor)
            self.bad = outcome.bad
            self._pending.pop(0)

    def completed(self, steps: int) -> int:
        until = time.monotonic() + self.channel.monitor.grace  # the device may be about to say it
        for pending in self._pending:
            if not pending.report.there(max(0.0, until - time.monotonic())) or self._failed(pending):
                return pending.step
        return steps

    def _failed(self, pending: PendingStep) -> bool:
        try:
            return self._read(pending).failed_exchange > 0
        except SparsyncError:
            return True

    def update_stats(self) -> None:
        for pending in self._pending:
            self._read(pending)

    def forget(self) -> None:
        self._started, self._pending = [], []

    def _read(self, pending: PendingStep) -> Outcome:
        """Return what a report says; raise before the deadline if a rank is gone and it never comes."""
        if pending.outcome is None:
            self.channel.await_report(pending.report)
            pending.outcome = self._checks.status(pending.device).read(pending.report)
            if len(pending.outcome.exchanges) != len(pending.exchanges):
                raise SparsyncError(
                    f"step {pending.step}: headers were verified {len(pending.outcome.exchanges)} times in "
                    f"{len(pending.exchanges)} exchanges; a collective with deferrable=True must do it once in each"
                )
            for (record, layout), headers in zip(pending.exchanges, pending.outcome.exchanges, strict=True):
                own = headers[self.channel.rank]
                self.stats.count_entries(record, own.extra or own.entries, layout.sendable)
        return pending.outcome


def _fingerprint(result: Tensor) -> str:
    """Return a text that differs when any bit of ``result`` differs."""
    return hashlib.sha256(result.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
