"""The whole path of a gradient: bucket -> compress -> exchange -> sum -> bucket.

``push`` is called from backward, bucket by bucket, and compresses; the communication thread exchanges, sums and writes
the result back. On a GPU all of it runs on a stream of its own, beside backward's; where an exchange needs nothing from
the host (``deferred``: NCCL, or a single worker), the thread is not needed either, and what came of an exchange is
heard of when a later step begins. Nothing here knows which framework the buckets come from.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from sparsync.collectives import Channel, Collective, Reduced
from sparsync.collectives.comm.comm_thread import CommThread
from sparsync.compressors import Compressor, Context, State
from sparsync.engine.bucketing import Bucket, BucketMapper, PendingBucket, Unit, scatter_result
from sparsync.engine.completion import News, warn
from sparsync.engine.snapshot import Snapshot
from sparsync.engine.stats import Exchange, Stats
from sparsync.errors import Mismatch, SparsyncError, StepFailed
from sparsync.feedback.residual import Correction, Feedback, accumulation_dtype
from sparsync.kernels import Memory
from sparsync.layout import Layout, Parameter
from sparsync.schedule import Schedule
from sparsync.sparse import SparseGrad

log = logging.getLogger("sparsync")


@dataclass
class InFlight:
    """What this step has sent, or (negative) what came home of it; ``number`` is that of its last exchange."""

    unit: Unit
    sent: SparseGrad
    number: int = 0


class Reducer:
    """Exchanges the gradients of one model.

    Args:
        parameters: in the model's order, which is the same on every rank.
        density: step -> share of the entries to send.
        small: names of the parameters that travel dense: all together, once a step, in full precision.
        transactional: a step can be undone (and is, when a gradient is not finite).
        may_skip: parameters may be unused, and what is sent for them is then lost.
        debug: compare the results of all ranks after every exchange.
        loss_scale: gives the loss scale; the residual follows its changes.
        rates: gives the learning rate by parameter name; the residual is divided by its changes.
        correction: momentum correction, if any.
        clip: largest norm of this rank's gradient in a segment, if any; in units of the unscaled gradient.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        compressor: Compressor,
        collective: Collective,
        channel: Channel,
        *,
        scope: str,
        density: Schedule,
        small: frozenset[str] = frozenset(),
        transactional: bool = False,
        may_skip: bool = False,
        seed: int = 0,
        debug: bool = False,
        loss_scale: Callable[[], float] | None = None,
        rates: Callable[[], Mapping[str, float]] | None = None,
        correction: Correction | None = None,
        clip: float | None = None,
    ) -> None:
        self.compressor, self.channel = compressor, channel
        self.density, self.seed, self.debug = density, seed, debug
        self.loss_scale, self.rates, self.clip = loss_scale, rates, clip
        self.buckets = BucketMapper(parameters, compressor, collective, scope, small, may_skip)
        self.feedback = Feedback(parameters, transactional, correction)
        # Whether any step could lose something: not if every entry is sent as it is.
        self._has_residuals = not compressor.dense or channel.wire.codec.round is not None or correction is not None
        self.state: State = {}
        self.stats = Stats()
        self.step = 0
        self.error: SparsyncError | None = None
        simple = all(p.dtype != torch.float64 for p in parameters) and channel.wire.indices != "block"
        channel.deferred = channel.may_defer and collective.deferrable and simple and not debug
        # Where nothing is waited for, no thread is needed to wait; a single worker never waits.
        self._comm_thread = CommThread(threaded=channel.group is not None and not channel.deferred)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._news = News(channel, self.stats)
        self._pending_buckets: list[PendingBucket] = []
        self._in_flight: list[InFlight] = []  # what this step has sent, less what came home
        self._next_bucket = 0
        self._open = False  # between the first bucket of a step and its last
        self._unsettled = False  # a step is done, and neither committed nor rolled back
        self._bad = False  # ... and a gradient in it was not finite
        self._snapshot = Snapshot()
        self.last_scale: float | None = None
        self.last_rates: dict[str, float] = {}

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
            bucket_slot, complete = self.buckets.arrive(bucket)
            self._pending_buckets.append(bucket_slot)
            with self._beside(bucket.buffer.device, after_all=True):
                for unit in complete:
                    self._send(unit)
                if bucket.last:
                    self._comm_thread.submit(partial(self._close_step, bucket.buffer.device, self.step))
            if bucket.last:
                self._open = False
                self.step += 1
            if self.error is not None:  # it came up meanwhile, and may have missed this bucket
                self._comm_thread.submit(partial(self._stop, self.error))
            return bucket_slot.future
        except Exception as error:  # whatever it is, backward must raise it and the peers must hear of it
            self.fail(error)
            future: Future[Tensor] = Future()
            future.set_exception(error)  # type: ignore[arg-type]
            return future

    def _send(self, unit: Unit) -> None:
        """Compress, on backward's thread; the rest follows on the communication thread."""
        exchange, layout = Exchange(unit.key), self._layout(unit)
        try:
            memory = self._memory(unit, layout)
            ctx = Context(
                self.step,
                self.channel.rank,
                self.seed,
                self._rounding(unit),
                unit.collective.shared,
                unit.collective.shared or self.channel.wire.indices == "block",
                None if self.clip is None else self.clip * (self.last_scale or 1.0),
                frozenset(unit.unused),
                self.channel.wire.values,
                unit.buffers,
            )
            sent = unit.compressor.compress(unit.grad, memory, layout, ctx, self.state)
            exchange.energy = memory.energy if memory else 0.0
        except Exception as error:  # travels as a flag: every rank raises, none waits
            sent = self._nothing(unit, layout, f"failed to compress {unit.key}: {type(error).__name__}: {error}")
        unit.unused = set()
        exchange.compressed = time.perf_counter()
        self._comm_thread.submit(partial(self._receive, unit, layout, sent, exchange, self.step))

    def _receive(self, unit: Unit, layout: Layout, sent: SparseGrad, exchange: Exchange, step: int) -> None:
        """Exchange, sum and write back, on the communication thread; ``self.step`` may be a step ahead by now."""
        if self.error is not None:
            self._take_home(unit, sent)
            self._stop(self.error)
            return
        try:
            with self._beside(unit.grad.device) if self._comm_thread.threaded else nullcontext():  # or ``push`` did
                exchange.started = time.perf_counter()
                exchange.energy_sent = torch.dot(sent.values, sent.values).item() if exchange.energy else 0.0
                self._in_flight.append(InFlight(unit, self._own_copy(unit, sent)))
                self.channel.unit = unit.key
                reduced = unit.collective.reduce(sent, layout, self.channel, unit.workspace)
                exchange.exchanged = time.perf_counter()
                if self.channel.deferred:
                    self._judge_later(unit, layout, reduced, exchange)
                else:
                    self._judge(unit, layout, reduced, step)
                pending = [bucket_slot for bucket_slot in self._pending_buckets if unit.key in bucket_slot.waits_for]
                scatter_result(unit, pending)
                exchange.decoded, exchange.bytes = time.perf_counter(), self.channel.take_count()
                exchange.traffic = self._traffic(unit, layout, sent.values.dtype)
                self.stats.add(exchange)
                if not self.channel.deferred:
                    self.stats.learn(exchange, int(sent.count), layout.sendable)
                for bucket_slot in pending:
                    bucket_slot.complete()
        except Exception as error:  # a future that never completes would hang backward
            self._stop(error)

    def _judge(self, unit: Unit, layout: Layout, reduced: Reduced, step: int) -> None:
        """Write the result into the unit, spoilt if this step is bad."""
        # The sum may overflow, on every rank alike.
        overflow = torch.zeros((), dtype=torch.int32, device=unit.grad.device) if self._has_residuals else None
        reduced.write_mean(unit.grad, overflow)
        self._accept(unit, reduced)
        if reduced.bad or self._bad or (overflow is not None and overflow):
            self._poison(unit, layout, reduced.bad, step)
        if self.debug:
            self.channel.assert_consistent(f"result of {unit.key}", _fingerprint(unit.grad))

    def _accept(self, unit: Unit, reduced: Reduced) -> None:
        """What was not taken goes back into our residual."""
        if reduced.rejected is not None:
            self.feedback.restore_to_residual(unit.key, reduced.rejected)
            # Before what was sent: taken out again first, the sums that follow are those of ``compress``, and exact.
            self._in_flight.insert(-1, InFlight(unit, replace(reduced.rejected, values=-reduced.rejected.values)))

    def _judge_later(self, unit: Unit, layout: Layout, reduced: Reduced, exchange: Exchange) -> None:
        """The same, decided on the device."""
        device = unit.grad.device
        device_status = self.channel.device_status(device)
        reduced.write_mean(unit.grad, device_status.bad if self._has_residuals else None)
        self._accept(unit, reduced)
        device_status.poison(unit.grad, self._starts(unit, layout), self.feedback.transactional)
        for given in self._in_flight:
            if given.unit is unit:
                given.number = self.channel.sequence
        self._news.of_exchange(exchange, layout)

    def _close_step(self, device: torch.device, step: int) -> None:
        """All of a step's units are written back."""
        if self.channel.deferred and self.error is None:
            device_status = self.channel.device_status(device)
            for given in self._in_flight:
                residual = self.feedback.working(given.unit.key) if self._keeps(given.unit) else None
                if residual is not None and not self.feedback.transactional:
                    device_status.bring_home(residual, given.sent, given.number)
            self._in_flight = []  # it was applied, or came home
            self._news.of_step(step, device)

    def _catch_up(self, before: int) -> None:
        """Hear what came of the steps before this one; raises, on every rank at the same point, what went wrong."""
        try:
            for bad in self._news.hear(before):
                self._bad = bad
        except SparsyncError as error:
            self._news.forget()
            # Whoever asked hears it before the others, who may wait for this rank by now.
            told = self.channel.monitor.broadcast_error(error)
            self._stop(told)
            raise told from None

    def _wait(self) -> None:
        """Catch up, if nothing is under way."""
        self._join()
        if self.error is None and not self._open:
            self.catch_up()

    def catch_up(self) -> None:
        """Hear all there is to hear, and wait until all of it is done."""
        self._join()
        self._catch_up(self.step + 1)

    def newest_stats(self) -> Stats:
        """The statistics with all there is to hear."""
        self._news.learn()
        return self.stats

    def _poison(self, unit: Unit, layout: Layout, bad: list[tuple[int, int]], step: int) -> None:
        """In this step some rank's gradient was not finite: the optimizer shall see it, and what we sent comes home."""
        self._bad = True
        for rank, where in bad:
            warn(step, layout.spans[where].name, rank)
        unit.grad[torch.tensor([span.start for span in layout.spans], device=unit.grad.device)] = math.nan
        self._all_home()

    def _all_home(self) -> None:
        """Nothing of this step is going to be applied."""
        for given in self._in_flight:
            self._take_home(given.unit, given.sent)
        self._in_flight = []

    def _take_home(self, unit: Unit, sent: SparseGrad) -> None:
        """What we sent goes back into our residual. (A step that can be undone is undone as a whole instead.)"""
        if not self.feedback.transactional and self._keeps(unit):
            with self._beside(unit.grad.device):
                self.feedback.restore_to_residual(unit.key, sent)

    # ---- steps ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._open:
            raise StepFailed(UNFINISHED)
        # A step that can be undone must be heard of before the next; of others there is more time to hear.
        self._catch_up(self.step if self.feedback.transactional else self.step - 1)
        self._join()  # what follows touches what the last step may still be writing
        self._settle()
        self._open = self._unsettled = True
        self._next_bucket = 0
        self._pending_buckets, self._in_flight, self._bad = [], [], False
        self._rescale()
        if self.feedback.transactional:  # saved in the new units, which the residual keeps if the step is undone
            self._snapshot.take(self.state)
        self.channel.begin_step(self._beside)
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
            self._comm_thread.drain()  # what was on its way comes home first
        self._unsettled = False
        if self.feedback.transactional and (undo or self._bad or self.error is not None):
            self.feedback.rollback()
            self._snapshot.restore(self.state)
            self.stats.total.skipped += 1
        else:
            self.feedback.commit()

    def restore(
        self,
        residuals: Mapping[str, Tensor],
        velocities: Mapping[str, Tensor],
        step: int,
        compressor: State,
        loss_scale: float | None,
        rates: Mapping[str, float],
    ) -> None:
        """Go on from a checkpoint, as if nothing had been before."""
        if self._open:
            raise SparsyncError("a step is under way: load before or after it")
        self.catch_up()
        self.feedback.load_state_dict(residuals, velocities)
        self.step, self.last_scale, self.last_rates = step, loss_scale, dict(rates)
        # On the host: memory of the caller's stream would be free again before ours has read it.
        self.state = {name: {key: t.to("cpu", copy=True) for key, t in bag.items()} for name, bag in compressor.items()}
        self.buckets.forget_layouts()
        self._unsettled = False

    def _rescale(self) -> None:
        """Bring the residual to the units of the gradient that is about to come in."""
        if self.loss_scale is not None:
            scale = self.loss_scale()
            if self.last_scale is not None and scale != self.last_scale:
                ratio = scale / self.last_scale
                self.feedback.rescale(dict.fromkeys(self.feedback.parameters, ratio), velocity=True)
                self.compressor.rescale(self.state, ratio)
            self.last_scale = scale
        if self.rates is not None:
            self.last_rates = self.feedback.follow(self.last_rates, self.rates())

    # ---- when things go wrong -------------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """This rank cannot go on, nor send anything its peers could read: they hear of it through the store."""
        self._open = False
        if self.error is None:
            kind = type(error) if isinstance(error, SparsyncError) else SparsyncError
            self.error = self.channel.monitor.broadcast_error(kind(f"rank {self.channel.rank}: {error}"))
            self._comm_thread.submit(partial(self._stop, self.error))

    def residual(self, name: str) -> Tensor | None:
        """What is kept of a parameter, after the last step unless that is going to be undone."""
        self._wait()
        return self.feedback.residual(name, newest=not (self._bad or self.error))

    def velocity(self, name: str) -> Tensor | None:
        """Likewise a parameter's velocity under momentum correction."""
        self._wait()
        return self.feedback.velocity(name, newest=not (self._bad or self.error))

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

    def _stop(self, error: Exception) -> None:
        """Nothing more is exchanged; whoever waits for a bucket hears why."""
        if self.error is None:
            known = isinstance(error, SparsyncError)
            self.error = error if known else SparsyncError(f"{type(error).__name__}: {error}")  # type: ignore[assignment]
        try:
            self._all_home()
        finally:
            for bucket_slot in self._pending_buckets:
                if not bucket_slot.future.done():
                    bucket_slot.future.set_exception(self.error)  # type: ignore[arg-type]

    def _nothing(self, unit: Unit, layout: Layout, cause: str) -> SparseGrad:
        """A message without entries that says this rank failed."""
        self.channel.monitor.tell(f"rank {self.channel.rank}: {cause}")
        # As the others send: a sum of different dtypes may be under way before anybody hears of this.
        dtype = accumulation_dtype(unit.grad.dtype) if self._keeps(unit) else unit.grad.dtype
        return SparseGrad.failed(layout.capacity, layout.numel, dtype, unit.grad.device)

    def close(self) -> None:
        """End the communication thread and give the process group back."""
        self._comm_thread.close()
        try:
            self._wait()
        except SparsyncError:
            log.exception("one of the last steps failed")
        self.channel.close()
        self._pending_buckets = []

    # ---- helpers --------------------------------------------------------------------------------------------------

    def _beside(self, device: torch.device, after_all: bool = False) -> AbstractContextManager[Any]:
        """On a GPU, our own stream; ``after_all``: which waits for all that was queued on the caller's.

        Memory that is used here belongs to the caller's stream or to ours: the caller's waits for ours before a bucket
        is used again, as its future demands, and ours for the caller's before the next bucket is taken.
        """
        if device.type != "cuda":
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if after_all:
            self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._streams[device])  # type: ignore[no-untyped-call,no-any-return]

    def _join(self) -> None:
        """The caller's stream waits for ours."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def _own_copy(self, unit: Unit, sent: SparseGrad) -> SparseGrad:
        """What may have to come home: where all is sent, a copy, as the sum over the ranks overwrites it."""
        if sent.indices is not None or not self._keeps(unit) or self.feedback.transactional:
            return sent
        if "own" not in unit.workspace:
            unit.workspace["own"] = torch.empty_like(sent.values)
        return replace(sent, values=unit.workspace["own"].copy_(sent.values))

    def _starts(self, unit: Unit, layout: Layout) -> Tensor:
        """Where each parameter starts, on the unit's device."""
        if "starts" not in unit.workspace:
            starts = [span.start for span in layout.spans]
            unit.workspace["starts"] = torch.tensor(starts, device=unit.grad.device)
        starts_: Tensor = unit.workspace["starts"]
        return starts_

    def _traffic(self, unit: Unit, layout: Layout, dtype: torch.dtype) -> float:
        """Bytes an exchange of the unit puts on the network."""
        if "traffic" not in unit.workspace:
            cost = unit.collective.traffic(layout, self.channel.wire, self.channel.size, dtype)
            unit.workspace["traffic"] = cost.mean_bytes
        bytes_: float = unit.workspace["traffic"]
        return bytes_

    def _keeps(self, unit: Unit) -> bool:
        """Whether the unit keeps anything: not if every entry is sent as it is."""
        return not unit.compressor.dense or self._rounding(unit) is not None or self.feedback.correction is not None

    def _rounding(self, unit: Unit) -> Any:
        # Small tensors travel as they are, whatever the others do.
        return self.channel.wire.codec.round if unit.compressor is self.compressor else None

    def _memory(self, unit: Unit, layout: Layout) -> Memory | None:
        if not self._keeps(unit):
            return None
        return self.feedback.memory(unit.key, layout.spans, unit.grad.numel(), unit.grad.device)

    def _layout(self, unit: Unit) -> Layout:
        layout, fresh = unit.layout_at(1.0 if unit.compressor.dense else self.density(self.step))
        if fresh:
            for name, bag in unit.compressor.init(layout).items():
                if name not in self.state:
                    self.state[name] = bag
                    self._snapshot.add(name, bag)
            # Messages of different sizes would abort Gloo, so the ranks compare a layout before its first exchange.
            text = "\n".join(map(str, layout.segments))
            self._comm_thread.submit(partial(self._assert_consistent, f"layout of {unit.key}", text))
        return layout

    def _assert_consistent(self, what: str, text: str) -> None:
        try:
            if self.error is None:
                self.channel.assert_consistent(what, text)
        except Exception as error:
            self._stop(error)


UNFINISHED = (
    "the last backward did not finish: gradients of its first buckets were sent, the others never came; "
    "build the DistributedDataParallel model anew"
)


def _fingerprint(result: Tensor) -> str:
    """A text that differs when any bit of ``result`` differs."""
    return hashlib.sha256(result.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
