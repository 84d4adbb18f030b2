"""The whole path of a gradient: bucket -> compress -> exchange -> mean -> bucket; and the steps it is made in.

``push`` is called from backward, bucket by bucket. What a bucket brings goes the way of ``unit_exchange``: compressed
at once, or on the communication thread, which exchanges and writes the result back. On a GPU all of it runs on a stream
of its own, beside backward's. In which order units go is the ``step_order``'s to know; whether the host waits for an
exchange, so that a thread is needed at all, the ``completion``'s; how a step fails, ``error_handling``'s. Backward
waits for every bucket's future before it ends: so the two threads never work on the same step's end. Nothing here knows
the framework that buckets come from.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from sparsync.collectives import Channel
from sparsync.collectives.comm.comm_thread import CommThread
from sparsync.config import ExchangePlan
from sparsync.engine import checkpoint
from sparsync.engine.bucket_mapper import BucketMapper
from sparsync.engine.bucketing import STEP_END, Bucket
from sparsync.engine.completion import choose_completion
from sparsync.engine.error_handling import ErrorHandler
from sparsync.engine.hierarchy import Flat
from sparsync.engine.stats import Stats
from sparsync.engine.step_order import Job, StepOrder
from sparsync.engine.step_vote import CurrentStep, StepVote
from sparsync.engine.streams import SideStreams
from sparsync.engine.unit_exchange import UnitExchange
from sparsync.engine.unit_step import Moment, begin_unit
from sparsync.engine.worker import WorkerState, preconditioner_for
from sparsync.errors import Mismatch, SparsyncError, StepFailed, without_frames
from sparsync.layout import Parameter

log = logging.getLogger("sparsync")

UNFINISHED = (
    "the last backward did not finish: gradients of its first buckets were sent, the others never came; "
    "build the DistributedDataParallel model anew"
)
DETACHED = "the model was detached while backward ran, before all gradients had come: detach() after backward"


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
        path: of one unit through a step.
        errors: who ends a step in which something goes wrong.
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
        self.plan, self.channel, self._device = plan, channel, device or torch.device("cpu")
        self.stage = Flat(channel) if stage is None else stage
        self.buckets = BucketMapper(parameters, plan, dense_names, may_skip)
        self._streams = SideStreams()
        senders, ranks = self.stage.senders, self.stage.ranks
        preconditioner = preconditioner_for(plan, parameters, dense_names, self._device, channel.size, senders)
        self.worker = WorkerState(channel.rank, parameters, plan, self._streams.use, preconditioner, ranks)
        self.before_step: Job = lambda: None  # on every rank, when the first bucket of a step has come
        self.stats = Stats()
        self.step = 0
        self.waited = self._last_push = 0.0  # seconds that backward waited for the last step's exchanges
        self.origin = checkpoint.Origin(channel.monitor.first_to_say("training", uuid.uuid4().hex, "attach"))
        self.completion = choose_completion(plan, list(parameters), channel, self.worker, self.stats)
        self._current = CurrentStep()
        self.vote = StepVote(channel.monitor, self.completion, self._current)
        # Where nothing is waited for, no thread is needed to wait; a single worker never waits.
        self._comm_thread = CommThread(threaded=channel.group is not None and self.completion.waits)
        self.errors = ErrorHandler(channel, self.vote, self.worker.ledger, self._comm_thread)
        self.path = UnitExchange(
            self.stage, self.completion, self.errors, self._comm_thread, self._streams, self.origin, rates
        )
        self._next_bucket = 0
        self._unsettled = False  # a step is done, and neither committed nor undone

    @property
    def error(self) -> SparsyncError | None:
        """What ended this training, if anything has."""
        return self.errors.error

    @property
    def under_way(self) -> bool:
        """Whether backward is to bring more buckets of a step, or waits for their results."""
        return self._current.open or not all(bucket.future.done() for bucket in self._current.buckets)

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
            self._current.buckets.append(pending)
            with self._streams.use(bucket.buffer.device, after_caller=True):
                if self.path.replays is None or pending.plan.own is None:  # else with the bucket's own unit
                    pending.gather()
                if self.stage.sums_first:
                    self._comm_thread.submit(partial(self.path.sum_slices, pending))
                self.path.order.add(pending, complete, self.step)
                if bucket.last:
                    self._comm_thread.submit(partial(self._close_step, bucket.buffer.device, self.step))
            if bucket.last:
                self._current.open, self._last_push = False, time.perf_counter()
                self.step += 1
            if self.error is not None:  # it came up meanwhile, and may have missed this bucket
                self._comm_thread.submit(partial(self.errors.stop, self.error))
            return pending.future
        except Exception as error:  # whatever it is, backward must raise it and the peers must hear of it
            self.errors.fail(error)
            future: Future[Tensor] = Future()
            future.set_exception(without_frames(error))  # type: ignore[arg-type]
            return future

    def _close_step(self, device: torch.device, step: int) -> None:
        """End a step, all of whose units are written; buckets that wait for it are complete."""
        if self.error is not None:
            return
        try:
            with self.path.on_thread(device):
                self.completion.close_step(device, step, self._current.buckets)
            for bucket in self._current.buckets if self.plan.transactional else ():  # others may be of the next step
                with self._streams.use(bucket.bucket.buffer.device):
                    bucket.waits_for.discard(STEP_END)
                    bucket.complete()
            self.waited = max(0.0, time.perf_counter() - self._last_push)
        except Exception as error:  # a future that never completes would hang backward
            self.errors.stop(self.errors.announced("the end of the step", error))

    # ---- steps ----------------------------------------------------------------------------------------------------

    def use(self, plan: ExchangePlan, buckets: BucketMapper, order: StepOrder) -> None:
        """Exchange in another way from the next step on; what is kept goes along, by name."""
        self.settle()
        self.plan, self.buckets = plan, buckets
        self.path.use(plan, order)

    def _begin(self) -> None:
        if self._current.open:
            raise StepFailed(UNFINISHED)
        if self.plan.auto and (loaded := self.origin.take()):  # which dense steps do not compare with their layouts
            self.channel.assert_consistent("loaded state", "\n".join(loaded))
        self.before_step()
        # A step that can be undone must be known before the next; of others there is more time to learn.
        self._poll(self.step if self.plan.transactional else self.step - 1)
        self._streams.join()  # what follows touches what the last step may still be writing
        self._settle()
        self._current.open = self._unsettled = True
        self._next_bucket, self._current.buckets, self._current.number = 0, [], self.step
        scale = self.plan.scaler.get_scale() if self.plan.scaler is not None else None
        self.worker.begin_step(scale, self.path.order.begin_step(self.step, scale))
        self.completion.begin_step(self._streams.use)
        early = self.path.order.adds_parts and not self.stage.sums_first
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
        if self._current.open:
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
        self._current.open = False
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
        if self._current.open:
            raise SparsyncError("a step is under way: load before or after it")
        self.catch_up()
        groups = self.stage.groups
        self.step = checkpoint.load_state_dict(self.worker, self.channel.size, state, self.origin, groups)
        self._current.number = self.step
        self._current.buckets = []
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
            self.errors.stop(told)
            self.completion.forget()
            raise self.vote.close(told) from None

    def _wait(self) -> None:
        """Catch up, if nothing is under way."""
        self._streams.join()
        if self.error is None and not self._current.open:
            self.catch_up()

    # ---- what a handle asks for -------------------------------------------------------------------------------------

    def check(self, starting: bool = False) -> None:
        """Raise the error that ended an earlier step, if any; ``starting``: a new forward pass is about to begin."""
        if starting and self._current.open:
            self.errors.fail(StepFailed(UNFINISHED))
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
        if self._current.open:  # backward did not end here, and the others wait for what it never sent
            self.errors.fail(StepFailed(UNFINISHED))
        if self.error is None and self.channel.size > 1:
            try:
                self.channel.unit = "handing back"
                return self.channel.all_reduce(tensor).div_(self.channel.size)
            except Exception as error:
                known = self.vote.close(self.errors.announced(self.channel.unit, error))
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
            for bucket in self._current.buckets:
                if not bucket.future.done():  # backward may wait for it, on another thread
                    bucket.future.set_exception(StepFailed(DETACHED))  # type: ignore[arg-type]
            self._current.buckets = []
            self.before_step = lambda: None  # which may know other ways, whose buffers end with them
            self.buckets.forget_layouts()
