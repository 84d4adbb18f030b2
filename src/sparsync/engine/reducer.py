"""The whole path of a gradient: bucket -> compress -> exchange -> mean -> bucket.

``push`` is called from backward, bucket by bucket, and compresses; the communication thread exchanges and writes the
result back. On a GPU all of it runs on a stream of its own, beside backward's. In which order units go is the
``step_order``'s to know; whether the host waits for an exchange, so that a thread is needed at all, the
``completion``'s. Backward waits for every bucket's future before it
ends: so the two threads never work on the same step's end. Nothing here knows the framework that buckets come from.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from sparsync.collectives import Channel
from sparsync.collectives.comm.comm_thread import CommThread
from sparsync.config import ExchangePlan
from sparsync.engine import checkpoint
from sparsync.engine.bucketing import (
    VERDICT,
    Bucket,
    BucketMapper,
    BucketSlice,
    PendingBucket,
    Unit,
    gather_beside,
    places_in,
    scatter_result,
)
from sparsync.engine.completion import choose_completion
from sparsync.engine.hierarchy import Flat, nothing
from sparsync.engine.ledger import Cause
from sparsync.engine.profiling import compressing, decoding, exchanging
from sparsync.engine.replay import Replay, Replays, replays_for
from sparsync.engine.stats import ExchangeRecord, Stats
from sparsync.engine.step_order import Job, StepOrder, choose_order
from sparsync.engine.step_vote import StepVote
from sparsync.engine.streams import SideStreams
from sparsync.engine.unit_step import Moment, begin_unit, compress_unit, cut_unit, failed_unit, round_unit
from sparsync.engine.worker import WorkerState, preconditioner_for
from sparsync.errors import Damaged, Mismatch, SparsyncError, StepFailed
from sparsync.feedback import AdamRule
from sparsync.layout import Layout, Parameter
from sparsync.sparse import SparseGrad

log = logging.getLogger("sparsync")

UNFINISHED = (
    "the last backward did not finish: gradients of its first buckets were sent, the others never came; "
    "build the DistributedDataParallel model anew"
)


class Reducer:
    """Exchanges the gradients of one model.

    Args:
        parameters: in the model's order, which is the same on every rank.
        dense_names: parameters that travel dense: all in one message, once a step, in full precision; with a
            preconditioner in those of their buckets' sketches.
        may_skip: parameters may be unused, and what is sent for them is then lost.
        rates: gives the learning rate by parameter name, if residuals follow it.
        device: of the parameters, if they are preconditioned.
        stage: whose gradients a rank exchanges: its own, or those of its node.

    Attributes:
        rules: gives the optimizer's hyperparameters by parameter name, to a preconditioner.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        plan: ExchangePlan,
        channel: Channel,
        *,
        dense_names: frozenset[str] = frozenset(),
        may_skip: bool = False,
        rates: Callable[[], Mapping[str, float]] | None = None,
        device: torch.device | None = None,
        stage: Flat | None = None,
    ) -> None:
        self.plan, self.channel, self.rates, self._device = plan, channel, rates, device or torch.device("cpu")
        self.stage = Flat(channel) if stage is None else stage
        self.buckets = BucketMapper(parameters, plan, dense_names, may_skip)
        self._streams = SideStreams()
        senders, ranks = self.stage.senders, self.stage.ranks
        preconditioner = preconditioner_for(plan, parameters, dense_names, self._device, channel.size, senders)
        self.worker = WorkerState(channel.rank, parameters, plan, self._streams.use, preconditioner, ranks)
        self.rounding = None if self.stage.sums_first else self.worker.rounding
        self.rules: Callable[[], Mapping[str, AdamRule]] = dict
        self.before_step: Job = lambda: None  # on every rank, when the first bucket of a step has come
        self.stats = Stats()
        self.step = 0
        self.waited = self._last_push = 0.0  # seconds that backward waited for the last step's exchanges
        self.origin = checkpoint.Origin(channel.monitor.first_to_say("training", uuid.uuid4().hex, "attach"))
        self._order = choose_order(self)
        self.completion = choose_completion(plan, list(parameters), channel, self.worker, self.stats)
        self._replays = replays_for(plan, self.worker, self.stage, self.completion)
        self.vote = StepVote(channel.monitor, self.completion)
        # Where nothing is waited for, no thread is needed to wait; a single worker never waits.
        self._comm_thread = CommThread(threaded=channel.group is not None and self.completion.waits)
        self._pending_buckets: list[PendingBucket] = []
        self._next_bucket = 0
        self._open = False  # between the first bucket of a step and its last
        self._unsettled = False  # a step is done, and neither committed nor undone

    @property
    def error(self) -> SparsyncError | None:
        """What ended this training, if anything has."""
        return self.vote.error

    # ---- the path -------------------------------------------------------------------------------------------------

    def push(self, bucket: Bucket) -> Future[Tensor]:
        """Take a bucket whose gradients are ready; the future gives its buffer back, holding the result."""
        try:
            if self.error is not None:
                raise self.error
            if bucket.index == 0:
                self._begin()
            if bucket.index != self._next_bucket:
                raise Mismatch(f"the order of buckets differs: {bucket.index} came where {self._next_bucket} was due")
            self._next_bucket += 1
            pending, complete = self.buckets.add(bucket)
            self._pending_buckets.append(pending)
            with self._streams.use(bucket.buffer.device, after_caller=True):
                if self._replays is None or pending.plan.own is None:  # else with the bucket's own unit
                    pending.gather()
                if self.stage.sums_first:
                    self._comm_thread.submit(partial(self._sum_slices, pending))
                self._order.add(pending, complete, self.step)
                if bucket.last:
                    self._comm_thread.submit(partial(self._close_step, bucket.buffer.device, self.step))
            if bucket.last:
                self._open, self._last_push = False, time.perf_counter()
                self.step += 1
            if self.error is not None:  # it came up meanwhile, and may have missed this bucket
                self._comm_thread.submit(partial(self._stop, self.error))
            return pending.future
        except Exception as error:  # whatever it is, backward must raise it and the peers must hear of it
            self.fail(error)
            future: Future[Tensor] = Future()
            future.set_exception(error)  # type: ignore[arg-type]
            return future

    def submit(self, jobs: Sequence[Job], device: torch.device | None = None) -> None:
        """Run jobs on the communication thread, after all earlier ones; ``device``: of one who is not within ``push``,
        and whose own stream is not to wait for them."""
        with nullcontext() if device is None else self._streams.use(device, after_caller=True):
            for job in jobs:
                self._comm_thread.submit(job)

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
        if self._replays is not None:
            buckets = self._fed_by(unit)
            replay = None if fresh or self.error else self._replays.find(unit, layout, buckets)
            if replay is not None:
                return [partial(self._replay, self._replays, replay, unit, layout, record)]
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
            self._tell_failed(unit, error)
            sent = failed_unit(unit, layout)
        record.ahead = 0.0 if unit.added is None else unit.added.seconds
        unit.unused, unit.added = set(), None
        record.compressed = time.perf_counter()
        return sent

    def add_part(self, part: BucketSlice, buffer: Tensor, unused: frozenset[str]) -> None:
        """Add what a unit is given of a bucket to its residual; all ranks hear of what goes wrong."""
        if self.error is None and part.unit.added is not None:
            try:
                part.unit.added.add(part.there.names, part.here.of(buffer), unused)
            except Exception as error:  # the communication thread would only log it, and the gradient be lost
                self.fail(error)

    def run(self, device: torch.device, job: Job) -> None:
        """Do a job of the communication thread that sends no message yet, unless the step has failed; all ranks hear of
        what goes wrong in it."""
        if self.error is None:
            try:
                with self._on_thread(device):
                    job()
            except Exception as error:
                self.fail(error)

    def run_exchange(self, name: str, device: torch.device, job: Job) -> None:
        """Do a job of the communication thread that exchanges, unless the step has failed."""
        if self.error is None:
            try:
                with self._on_thread(device), exchanging():
                    job()
            except Exception as error:  # a future that never completes would hang backward
                self._stop(self._announced(name, error))

    def record(self, record: ExchangeRecord, traffic: float, numel: int) -> None:
        """Count an exchange that sent every entry."""
        record.exchanged = record.decoded = time.perf_counter()
        record.bytes, record.traffic = self.channel.take_count(), traffic
        self.stats.add(record)
        self.stats.count_entries(record, numel, numel)

    def _on_thread(self, device: torch.device) -> AbstractContextManager[Any]:
        """Make our stream current on the communication thread; elsewhere ``push`` has done it."""
        return self._streams.use(device) if self._comm_thread.threaded else nullcontext()

    def _sum_slices(self, pending: PendingBucket) -> None:
        """Sum over the ranks of the node what units gather from a bucket."""
        if self.error is None:
            self.channel.unit = what = f"bucket {pending.bucket.index}"
            try:
                with self._on_thread(pending.bucket.buffer.device), exchanging():
                    self.stage.sum_slices(pending)
            except Exception as error:
                self._stop(self._announced(what, error))

    def _exchange_sum(self, unit: Unit, layout: Layout, record: ExchangeRecord, step: int, fill: Job | None) -> None:
        """Sum a unit over the ranks of the node, whose leader then exchanges that as its own gradient."""
        sent = nothing(unit)
        if self.error is None:
            try:
                with self._on_thread(unit.grad.device):
                    self.channel.unit = unit.key
                    with exchanging():
                        total = self.stage.sum(unit, layout, self._failed(unit, fill))
                    record.arrived = record.compressed = time.perf_counter()
                    if self.stage.ranks:
                        rounding = partial(round_unit, unit, total, self.worker.rounding)
                        sent = self._take_out(unit, total, layout, record, step, rounding)
            except Exception as error:
                self._stop(self._announced(unit.key, error))
                return
        unit.unused = set()
        self._exchange(unit, layout, sent, record, step)

    def _exchange(self, unit: Unit, layout: Layout, sent: SparseGrad, record: ExchangeRecord, step: int) -> None:
        """Exchange, sum and write back, on the communication thread; ``self.step`` may be a step ahead by now."""
        if self.error is not None:
            self.worker.ledger.record_sent(unit, sent)
            self._stop(self.error, Cause.NEVER_SENT)
            return
        try:
            with self._on_thread(unit.grad.device):
                record.started = time.perf_counter()
                self.worker.ledger.record_sent(unit, sent, overwritten=True)
                record.energy_sent = torch.dot(sent.values, sent.values).item() if record.energy else 0.0
                self.channel.unit, self.channel.left_out = unit.key, None
                with exchanging():
                    reduced = self.stage.reduce(unit, sent, layout)
                record.exchanged = time.perf_counter()
                with decoding():
                    if self._writes_at_once:
                        unit.places = places_in(unit, self._pending_buckets)
                    self.completion.finish(unit, layout, sent, reduced, record, step)
                    self.channel.left_out = None  # it is back
                    written = self._order.finish(unit, reduced)
                self._end_exchange(unit, layout, sent, record, written)
        except Exception as error:  # a future that never completes would hang backward
            self._stop(self._announced(unit.key, error))

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
            self._stop(self._announced(unit.key, error))

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
        return [bucket for bucket in self._pending_buckets if unit.key in bucket.waits_for]

    @property
    def _writes_at_once(self) -> bool:
        """Whether nobody but the buckets asks for the results of units."""
        return self._order.adds_parts and self.completion.waits and not self.plan.debug

    def write_back(self, unit: Unit) -> list[PendingBucket]:
        """Write a unit's result into the buckets it came from, and return those."""
        pending = self._fed_by(unit)
        scatter_result(unit, pending)
        return pending

    def _close_step(self, device: torch.device, step: int) -> None:
        """End a step, all of whose units are written; buckets that wait for it are complete."""
        if self.error is not None:
            return
        try:
            with self._on_thread(device):
                self.completion.close_step(device, step, self._pending_buckets)
            for bucket in self._pending_buckets if self.plan.transactional else ():  # others may be of the next step
                with self._streams.use(bucket.bucket.buffer.device):
                    bucket.waits_for.discard(VERDICT)
                    bucket.complete()
            self.waited = max(0.0, time.perf_counter() - self._last_push)
        except Exception as error:  # a future that never completes would hang backward
            self._stop(self._announced("the end of the step", error))

    def _compare_layout(self, unit: Unit, lines: list[str]) -> None:
        try:
            if self.error is None:
                self.channel.assert_consistent(f"loaded state, or the layout of {unit.key},", "\n".join(lines))
        except Exception as error:
            self._stop(self._announced(unit.key, error))

    # ---- steps ----------------------------------------------------------------------------------------------------

    def use(self, plan: ExchangePlan, buckets: BucketMapper, order: StepOrder) -> None:
        """Exchange in another way from the next step on; what is kept goes along, by name."""
        self.settle()
        self.plan, self.buckets, self._order = plan, buckets, order
        self.worker.plan = self.completion.plan = plan
        self.channel.wire = plan.wire
        self._replays = replays_for(plan, self.worker, self.stage, self.completion)

    def _begin(self) -> None:
        if self._open:
            raise StepFailed(UNFINISHED)
        if self.plan.auto and (loaded := self.origin.take()):  # which dense steps do not compare with their layouts
            self.channel.assert_consistent("loaded state", "\n".join(loaded))
        self.before_step()
        # A step that can be undone must be known before the next; of others there is more time to learn.
        self._poll(self.step if self.plan.transactional else self.step - 1)
        self._streams.join()  # what follows touches what the last step may still be writing
        self._settle()
        self._open = self._unsettled = True
        self._next_bucket, self._pending_buckets, self.vote.step = 0, [], self.step
        scale = self.plan.scaler.get_scale() if self.plan.scaler is not None else None
        self.worker.begin_step(scale, self._order.begin_step(self.step, scale))
        self.completion.begin_step(self._streams.use)
        early = self._order.adds_parts and not self.stage.sums_first
        for unit in self.buckets.gathered:
            unit.added = begin_unit(unit, self.plan, self.worker, Moment(self.step)) if early else None
        self.stats.begin()

    def settle(self, undo: bool = False) -> None:
        """Commit the last step, or undo it if asked to, if a gradient was not finite or if the step failed."""
        self._wait()
        self._settle(undo)

    def _settle(self, undo: bool = False) -> None:
        if not self._unsettled:
            if undo:
                raise SparsyncError("there is no step to undo: the last one was committed, or none was made")
            return
        if self._open:
            raise SparsyncError("a step is under way: call this after backward")
        if self.error is not None:
            self._comm_thread.drain()  # what was on its way goes back to the residual first
        self._unsettled = False
        if self.plan.transactional and (undo or self.completion.bad or self.vote.undone):
            self.worker.undo()
            self.completion.bad = True  # also where the user undid it: others may have to learn that it does not count
            self.stats.total.skipped += 1
        else:
            self.worker.commit()

    def settle_as_agreed(self, commit: bool) -> None:
        """End the last step, of which nothing more will come, as the ranks have agreed: it counts, even where its last
        exchange failed, or is undone."""
        self._open = False
        if self._unsettled:
            self._unsettled = False
            if commit and self.channel.left_out is not None:
                self.worker.feedback.restore_to_residual(self.channel.unit, self.channel.left_out)
            self.worker.commit() if commit else self.worker.undo()

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank keeps. The last step is committed first."""
        self.settle()
        steps = self.step if self.error is None else self.vote.completed
        return checkpoint.state_dict(self.worker, self.channel.size, steps, self.origin.training, self.stage.groups)

    def check_state(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Refuse, with a ``ValueError``, what ``load_state_dict`` cannot go on from."""
        checkpoint.check_state(self.worker, self.channel.size, state, self.stage.groups)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a checkpoint, as if nothing had been before."""
        if self._open:
            raise SparsyncError("a step is under way: load before or after it")
        self.catch_up()
        groups = self.stage.groups
        self.step = checkpoint.load_state_dict(self.worker, self.channel.size, state, self.origin, groups)
        self.vote.step = self.step
        self._pending_buckets = []
        self.buckets.forget_layouts()
        self._unsettled = False

    # ---- what the device decided, and what went wrong ---------------------------------------------------------------

    def catch_up(self) -> None:
        """Learn all there is to learn of past steps, and wait until all of it is done."""
        self._streams.join()
        self._poll(self.step + 1)

    def _poll(self, before: int) -> None:
        """Learn of the steps before this one; raises, on every rank at the same point, what went wrong."""
        try:
            self.completion.poll(before)
        except SparsyncError as error:
            # Whoever asked hears it before the others, who may wait for this rank by now.
            told = self.channel.monitor.broadcast_error(error)
            self._stop(told)
            self.completion.forget()
            raise self.vote.close(told, self._pending_buckets) from None

    def _wait(self) -> None:
        """Catch up, if nothing is under way."""
        self._streams.join()
        if self.error is None and not self._open:
            self.catch_up()

    def fail(self, error: Exception) -> None:
        """Give up: this rank can send nothing its peers could read, so they hear of it through the store."""
        self._open = False
        if self.error is None:
            kind = type(error) if isinstance(error, SparsyncError) else SparsyncError
            told = self.channel.monitor.broadcast_error(kind(f"rank {self.channel.rank}: {error}"))
            self._comm_thread.submit(partial(self._stop, self.vote.close(told, self._pending_buckets)))

    def _announced(self, what: str, error: Exception) -> SparsyncError:
        """Return an error of the communication thread that all ranks know of. What the library raises there is seen by
        all, in their headers, or was broadcast; anything else has happened here alone, as what cannot be read."""
        if isinstance(error, Damaged):
            return self.channel.monitor.broadcast_error(error)
        if isinstance(error, SparsyncError):
            return error
        own = f"rank {self.channel.rank}: {what}: {type(error).__name__}: {error}"
        return self.channel.monitor.broadcast_error(SparsyncError(own))

    def _stop(self, error: SparsyncError, cause: Cause = Cause.EXCHANGE_FAILED) -> None:
        """Exchange nothing more; whoever waits for a bucket hears why."""
        error = self.vote.close(error, self._pending_buckets)
        try:
            if self.vote.undone:
                self.worker.ledger.restore(cause)
            else:  # it was applied, but for what was rejected
                self.worker.ledger.restore_held()
        finally:
            for bucket in self._pending_buckets:
                if not bucket.future.done():
                    bucket.future.set_exception(error)  # type: ignore[arg-type]

    def _failed(self, unit: Unit, fill: Job | None) -> bool:
        """Write a unit's gradient, where no bucket brought it; return whether that failed."""
        try:
            if fill is not None:
                fill()
        except Exception as error:
            self._tell_failed(unit, error)
            return True
        return False

    def _tell_failed(self, unit: Unit, error: Exception) -> None:
        """Leave word why this rank has nothing to send; its message says only that."""
        cause = f"failed to compress {unit.key}: {type(error).__name__}: {error}"
        self.channel.monitor.tell(f"rank {self.channel.rank}: {cause}")

    # ---- what a handle asks for -------------------------------------------------------------------------------------

    def check(self, starting: bool = False) -> None:
        """Raise the error that ended an earlier step, if any; ``starting``: a new forward pass is about to begin."""
        if starting and self._open:
            self.fail(StepFailed(UNFINISHED))
            raise StepFailed(UNFINISHED)
        if not starting:
            self._wait()
        if self.error is not None:
            if starting:
                raise StepFailed(f"an earlier step failed, build the model anew; the cause was: {self.error}")
            raise self.error

    def residual(self, name: str) -> Tensor | None:
        """Return the residual of a parameter, after the last step unless that is going to be undone."""
        self._wait()
        return self.worker.feedback.residual(name, newest=not (self.completion.bad or self.vote.undone))

    def velocity(self, name: str) -> Tensor | None:
        """Return a parameter's velocity under momentum correction, likewise."""
        self._wait()
        return self.worker.feedback.velocity(name, newest=not (self.completion.bad or self.vote.undone))

    def mean_of(self, tensor: Tensor) -> Tensor:
        """Return the mean over all ranks of what is summed up in ``tensor``, in its place; once a rank is gone, over
        those whose gradients are exchanged here."""
        if self._open:  # backward did not end here, and the others wait for what it never sent
            self.fail(StepFailed(UNFINISHED))
        if self.error is None and self.channel.size > 1:
            try:
                self.channel.unit = "handing back"
                return self.channel.all_reduce(tensor).div_(self.channel.size)
            except Exception as error:
                known = self.vote.close(self._announced(self.channel.unit, error), self._pending_buckets)
                log.warning("the optimizer is given this rank's own velocities, not their mean: %s", known)
        return tensor.div_(max(1, self.stage.ranks))

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return, of each time, that of the slowest rank; between two steps, on all ranks."""
        self.channel.unit = "times of steps"
        own = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        found: list[float] = self.channel.all_gather(own).amax(0).tolist()
        return found

    def newest_stats(self) -> Stats:
        """Return the statistics with all that is known."""
        self.completion.update_stats()
        return self.stats

    def close(self) -> None:
        """End the communication thread and give the process group back."""
        self._comm_thread.close()
        try:
            self._wait()
        except SparsyncError:
            log.exception("one of the last steps failed")
        finally:
            self.stage.close()
            self.channel.close()
            self._pending_buckets = []
            self.before_step = lambda: None  # which may know other ways, whose buffers end with them
            self.buckets.forget_layouts()
