"""A unit's step on a GPU, replayed: when all that it works on has stayed in its place for some steps, what it launches
is captured in CUDA graphs, and from then on the host launches those.

What changes from step to step, a graph finds on the device: gradients, residuals, thresholds, and the number of the
exchange. Whatever else a launch depends on is part of its ``Place``: where that is another one, the step is made as
usual, and may be captured in its turn.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sparsync.collectives.comm.recording import Recording, can_record
from sparsync.compressors.base import vouches
from sparsync.config import ExchangePlan
from sparsync.engine.bucketing import PendingBucket, Unit, copy_result, gather_beside
from sparsync.engine.completion import Completion, Deferred
from sparsync.engine.hierarchy import Flat
from sparsync.engine.unit_step import Moment, compress_unit
from sparsync.engine.worker import WorkerState
from sparsync.kernels import KernelPath, Memory
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad

log = logging.getLogger("sparsync")

WARM_UPS = 5  # steps in one place before it is captured: what is made on first use must not be captured
MOST = 4  # places of a unit: residuals of a step that can be undone take turns


class Place(NamedTuple):
    """What the launches of a unit's step depend on, beside its layout."""

    pointers: tuple[int, ...]  # gradient, residual, velocity, the buckets that wait for it and the units they feed
    kept: tuple[int, ...]  # what is known by itself: workspaces and the compressor's state
    clip: float | None
    report: tuple[int, int]  # where the device says what came of the exchange


@dataclass(frozen=True)
class Replay:
    """A unit's step in one place, recorded.

    Args:
        in_flight: what is sent; ``rejected``: what of it does not make it into the result.
        exchanges: headers that are verified.
        words: of the report that the device writes.
    """

    recording: Recording
    in_flight: SparseGrad
    rejected: SparseGrad | None
    exchanges: int
    words: int


@dataclass
class KnownPlace:
    """A place that a unit's step was made in; ``holds``: what it names, so that the name stays."""

    holds: list[Any]
    runs: int = 0
    replay: Replay | None = None
    failed: bool = False


class KnownPlaces(dict[Place, KnownPlace]):
    """Those of one unit, since it has its layout."""


class Replays:
    """Captures and replays the steps of units."""

    def __init__(self, plan: ExchangePlan, worker: WorkerState, stage: Flat, completion: Deferred) -> None:
        self.plan, self.worker, self.stage, self.completion = plan, worker, stage, completion

    def find(self, unit: Unit, layout: Layout, pending: Sequence[PendingBucket]) -> Replay | None:
        """Return the recording of what a unit's step launches here and now; ``None``: it has to be made as usual.

        Args:
            pending: the buckets that its result goes to.
        """
        compressor, collective = unit.compressor, unit.collective
        by_kernels = unit.workspace.find(KernelPath) is KernelPath.TRITON  # in the steps before
        safe = vouches(compressor, "graph_safe", "compress", "launch") and vouches(collective, "graph_safe", "reduce")
        if unit.unused or compressor.random or not (safe and by_kernels and can_record(unit.grad.device)):
            return None
        place, holds = self._place(unit, layout, pending)
        known = unit.workspace.get(KnownPlaces, None, KnownPlaces)
        if place not in known:
            while len(known) >= MOST:
                del known[next(iter(known))]
            known[place] = KnownPlace(holds)
        here = known[place]
        here.runs += 1
        if here.replay is None and here.runs > WARM_UPS and not here.failed:
            try:
                here.replay = self._record(unit, layout, pending)
            except Exception as error:  # nothing has run yet, so it can still be done as it is
                here.failed = True
                log.warning("%s: no CUDA graph of its exchange, which is slower for it: %s", unit.key, error)
        return here.replay

    def play(self, replay: Replay, unit: Unit) -> None:
        """Do what was recorded, up to the result in the unit's place and in its buckets."""
        channel, device = self.stage.channel, unit.grad.device
        self.worker.ledger.record_sent(unit, replay.in_flight)
        channel.number(device)
        replay.recording.play()
        channel.sequence += replay.exchanges
        self.completion.status(device).go_to(channel.sequence, replay.words)

    def _record(self, unit: Unit, layout: Layout, pending: Sequence[PendingBucket]) -> Replay:
        """Record a unit's step, of which nothing runs yet, and nothing is noted."""
        channel, status = self.stage.channel, self.completion.status(unit.grad.device)
        channel.number(unit.grad.device)
        number, words = channel.sequence, status.place[1]
        recording = channel.recording = Recording()
        try:
            with recording:
                gather_beside(unit, pending)
                moment = Moment(0)  # for which nothing that is graph-safe asks
                sent, _ = compress_unit(unit, unit.grad, layout, self.plan, self.worker, moment, unit.workspace)
                in_flight = self.worker.ledger.keep(unit, sent)
                reduced = self.stage.reduce(unit, sent, layout)
                self.completion.write(unit, layout, reduced)
                copy_result(unit, pending)
            exchanges, written = channel.sequence - number, status.place[1] - words
        finally:
            channel.recording, channel.sequence = None, number
            status.go_to(number, words - status.place[1])
        return Replay(recording, in_flight, reduced.rejected, exchanges, written)

    def _place(self, unit: Unit, layout: Layout, pending: Sequence[PendingBucket]) -> tuple[Place, list[Any]]:
        """Return where a unit's step works, and the objects that it names."""
        worker, grad = self.worker, unit.grad
        pointers = [grad.data_ptr(), *(bucket.bucket.buffer.data_ptr() for bucket in pending)]
        pointers += [part.unit.grad.data_ptr() for bucket in pending for part in bucket.plan.slices]
        holds: list[Any] = [worker.compressor_state.get(segment.name) for segment in layout.segments]
        if unit.keeps:
            memory: Memory = worker.feedback.memory(unit.key, layout.spans, grad.numel(), grad.device)
            pointers += [memory.before.data_ptr(), memory.after.data_ptr()]
            if memory.velocity is not None:
                pointers += [memory.velocity.before.data_ptr(), memory.velocity.after.data_ptr()]
            holds.append(memory.workspace)
        clip = None if self.plan.clip is None else self.plan.clip * (worker.loss_scale or 1.0)
        report = self.completion.status(grad.device).place
        return Place(tuple(pointers), tuple(map(id, holds)), clip, report), holds


def replays_for(plan: ExchangePlan, worker: WorkerState, stage: Flat, completion: Completion) -> Replays | None:
    """Return what replays the steps of units, where it is the device that decides and nothing comes between."""
    if not isinstance(completion, Deferred) or stage.sums_first or worker.preconditioner is not None:
        return None
    return Replays(plan, worker, stage, completion)
