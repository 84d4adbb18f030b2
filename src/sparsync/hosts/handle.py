"""A model whose gradients are exchanged: what a user holds in hand, whatever the host framework."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Module

from sparsync.collectives import Channel
from sparsync.config import ExchangePlan
from sparsync.engine.auto import AutoSwitch
from sparsync.engine.bucketing import Bucket
from sparsync.engine.checkpoint import share_of
from sparsync.engine.reducer import Reducer
from sparsync.engine.stats import Stats
from sparsync.errors import SparsyncError, without_frames
from sparsync.feedback import (
    TakenMomentum,
    TakenOptimizer,
    momentum_notice,
    refuse_other_model,
    take_momentum,
)
from sparsync.hosts.checks.coverage import NOT_EXCHANGED, describe_left_out, refuse_sparse_gradients
from sparsync.hosts.checks.optimizer import notice_other_optimizer
from sparsync.hosts.checks.restart import SENTENCE as RESTARTED
from sparsync.hosts.checks.restart import restarts
from sparsync.hosts.checks.scaler import notice_scaler
from sparsync.hosts.checks.zero_grad import notice_old_gradients
from sparsync.hosts.description import describe_exchange
from sparsync.hosts.start_reducer import start_reducer
from sparsync.hosts.states.checkpointed import Checkpointed
from sparsync.hosts.unwrap import plain_name
from sparsync.layout import Parameter
from sparsync.local_shard import local_shard

if TYPE_CHECKING:
    from sparsync.hosts.survival import Survival

log = logging.getLogger("sparsync")

COPIED = (
    "a handle belongs to this process and its group, and can be neither copied nor pickled: save its state_dict(), and "
    "give that to load_state_dict() after another attach()"
)
DROPPED = (
    "detach() comes between backward and optimizer.step(): the update that was exchanged is dropped, and gradients are "
    "None, as the optimizer's own rule would take it for a gradient; call optimizer.step() before detach()"
)


class Handle(Checkpointed):
    """A model whose gradients Sparsync exchanges; ``attach`` makes it.

    It is also the ``state`` of the hook, for frameworks that register hooks themselves (see ``comm_hook``).

    Args:
        module: the bare model, not its wrapper.
        plan: how its gradients are exchanged; what follows from its budget is known once it starts.
        group: the model's process group; the default one where it is ``None``.
        may_skip: parameters may be unused, and what is sent for them is then lost.
        left_out: parameters that never come in a bucket, and what becomes of them.
        shards: says, where this rank has parts of parameters alone, which these are; ``group`` has the ranks that hold
            the same.
    """

    def __init__(
        self,
        module: Module,
        plan: ExchangePlan,
        group: Any = None,
        may_skip: bool = False,
        left_out: Mapping[str, str] | None = None,
        shards: str | None = None,
    ) -> None:
        if plan.optimizer is not None:
            refuse_other_model(plan.optimizer, module)
        self.module, self.plan, self.group, self._may_skip = module, plan, group, may_skip
        self._asked = plan  # what follows from its budget changes with the number of workers
        self.left_out, self.shards = dict(left_out or {}), shards
        refuse_sparse_gradients(module, self.left_out)
        named = [(plain_name(name), p) for name, p in module.named_parameters() if p.requires_grad]
        self._trained = trained = {name: local_shard(p) for name, p in named if name not in self.left_out}
        if self.left_out and not trained:
            raise ValueError(f"there is nothing to exchange: {describe_left_out(self.left_out)}")
        self._names = {id(p): name for name, p in named if name in trained}
        self.parameters = [Parameter.of(name, p) for name, p in trained.items()]
        self.dense_names = plan.dense_names(trained)
        self._unseen = set(trained)  # by the first step's buckets
        self.detached = False  # a handle of comm_hook() is neither detached nor attached before its first bucket
        self._refused: Exception | None = None  # why the last bucket was, which the reducer has not heard of
        self._handled = id(sys.exc_info()[1])  # all of this may be made where an exception is handled
        self._reducer: Reducer | None = None
        self._auto: AutoSwitch | None = None
        self._taken: TakenMomentum | None = None
        self._preconditioned: TakenOptimizer | None = None
        self._on_stop: list[Callable[[], None]] = []
        self._on_detach: list[Callable[[], None]] = []
        self._restarts, self._told = restarts(), False
        self.survival: Survival | None = None  # with on_loss="continue"

    # ---- what a user calls ----------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return bytes, entries, times and energy: of the last step (``.step``) and of all steps (``.total``)."""
        return self._running().newest_stats()

    def describe(self) -> str:
        """Return in plain words what is sent, how much less than dense that is and what was changed; then details."""
        taken = self._taken.describe() if self._taken else None
        parts = self._trained, self.dense_names, self.left_out
        return describe_exchange(self._running(), *parts, taken, self._auto, self.shards)

    def check(self) -> None:
        """Raise, with its full text, the error that ended an exchange; ``backward`` raises it mangled by DDP."""
        if self._refused is not None:
            raise self._refused
        self._running().check()

    @property
    def steps(self) -> int:
        """Steps that this training has made, those of a checkpoint that was loaded included."""
        return self._running().step

    def surviving(self) -> AbstractContextManager[None]:
        """Return a context for one whole step, from ``zero_grad`` to ``optimizer.step``, with ``on_loss="continue"``.

        When a rank is lost meanwhile, the others go on after it with equal weights: the step counts for all of them, or
        for none, so look at ``steps``. Ranks that wait to join do so at its beginning.
        """
        return self._survival().step()

    def finish(self) -> None:
        """End a training with ``on_loss="continue"``: wait for the others' last step; whoever missed it catches up."""
        self._survival().finish()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        super().load_state_dict(state)
        if self.survival is not None:
            self.survival.forget_ages()

    def _survival(self) -> Survival:
        if self.survival is None:
            raise SparsyncError('this needs attach(..., on_loss="continue")')
        return self.survival

    def commit(self) -> None:
        """Keep what the last step did to the residual; happens by itself when the next step begins."""
        self._running().settle()

    def rollback(self) -> None:
        """Undo what the last step did to residual and thresholds, because its gradient is not going to be applied."""
        reducer = self._running()
        if not self.plan.transactional:
            raise SparsyncError("rollback() needs attach(..., transactional=True)")
        reducer.settle(undo=True)

    def residual(self, name: str) -> Tensor | None:
        """Return the residual of a parameter, in the parameter's shape; ``None`` if it never kept anything."""
        return self._running().residual(name)

    def velocity(self, name: str) -> Tensor | None:
        """Return, under momentum correction, a parameter's velocity on this rank; ``None`` if it has none."""
        return self._running().velocity(name)

    def set_process_group(self, group: Any) -> None:
        """Exchange over another process group from now on; all its ranks call this, between two steps.

        What this rank keeps is carried over and, in a group of another size, scaled so that means stay. A rank that is
        not in the new group detaches. Statistics begin anew. DDP has to be told as well, or built anew.
        """
        reducer = self._running()
        self._refuse_shards("set_process_group()", "state_dict(), and load it after you have attached anew,")
        if self.survival is not None:
            raise SparsyncError("set_process_group() does not go with on_loss='continue', which makes the group anew")
        if self.plan.per_node != 1:
            raise SparsyncError(
                "set_process_group() does not know per_node=: who keeps residuals may change with the ranks; save "
                "state_dict() of every rank, attach anew, and load them all"
            )
        reducer.check()
        state = self.state_dict()
        self._stop()
        self.group = group
        reducer = self.start()
        self._load(share_of([state], state, reducer.channel.rank, reducer.channel.size))

    def is_attached(self) -> bool:
        """Return whether gradients go through this handle; with ``comm_hook`` not before the first bucket."""
        return self._reducer is not None

    def detach(self) -> None:
        """Stop: end the communication thread, give the process group back; the model then trains dense.

        The residual is dropped with the handle; take ``state_dict()`` before, to keep it. Before a process exits:
        ``detach()``, delete the DDP model, then ``torch.distributed.destroy_process_group()``. While an exception is
        under way, as in ``finally``, the other ranks may not come, and this is ``abandon()``.
        """
        error = sys.exc_info()[1]
        alone = error is not None and id(error) != self._handled and not isinstance(error, GeneratorExit)
        if alone and self._preconditioned is not None:
            log.warning(
                "%s is under way: detach() waits for no other rank, and the optimizer is given this rank's own "
                "velocities, not their mean", type(error).__name__,
            )  # fmt: skip
        self._detach(alone)

    def abandon(self) -> None:
        """Stop as ``detach`` does, but alone, because the other ranks may not come: of Adam and AdamW, the optimizer is
        given this rank's own velocities, not their mean."""
        self._detach(alone=True)

    def _detach(self, alone: bool) -> None:
        reducer = self._reducer
        if reducer is not None and reducer.under_way and torch._C._current_graph_task_id() != -1:  # type: ignore[attr-defined]
            raise SparsyncError("a step is under way: call this after backward")
        self._tell_of_dropped_update()
        self.detached = True
        self._stop(None if alone or reducer is None else reducer.mean_of)
        for release in self._on_detach:
            release()
        self._on_detach = []

    def __getstate__(self) -> NoReturn:
        raise TypeError(COPIED)

    def _tell_of_dropped_update(self) -> None:
        if self._preconditioned is not None and self._preconditioned.update_waits:
            self._tell(DROPPED)

    @torch.inference_mode(False)
    def _stop(self, mean_of: Callable[[Tensor], Tensor] | None = None) -> None:
        """Give the optimizer back, and end the exchange; ``mean_of``: hand velocities back as their mean."""
        if self._preconditioned is not None:
            self._preconditioned.undo(*([mean_of] if mean_of else []))
            self._preconditioned = None
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = self._auto = None
        for release in self._on_stop:
            release()
        self._on_stop = []

    # ---- what the host framework calls ----------------------------------------------------------------------------

    def on_detach(self, release: Callable[[], None]) -> None:
        """Call ``release`` when this handle is detached."""
        self._on_detach.append(release)

    def check_start(self) -> None:
        """Raise, before a forward pass, what ended an earlier step."""
        self._running().check(starting=True)
        if self._preconditioned is not None:
            self._preconditioned.before_forward()

    def push(
        self, index: int, buffer: Tensor, parameters: Sequence[Tensor], last: bool, joined: bool = False
    ) -> Future[Tensor]:
        """Take a bucket: ``buffer`` holds the gradients of ``parameters``. The future gives it back with the result.

        ``joined``: this rank has no data, and the buffer holds zeros.
        """
        reducer = self._reducer or self.start()
        try:
            names = tuple(self._names[id(parameter)] for parameter in parameters)
        except KeyError:
            error = SparsyncError("this hook state belongs to another model; make one for each model")
            if reducer.under_way:  # those who wait for other buckets must hear of it
                raise error from None
            self._refused, future = error, Future[Tensor]()  # and its own model goes on
            future.set_exception(without_frames(error))  # type: ignore[arg-type]
            return future
        self._refused = None
        if self._unseen:
            self._unseen.difference_update(names)
            if last and self._unseen:
                raise SparsyncError(f"{min(self._unseen)!r} {NOT_EXCHANGED}")
        if self._restarts:
            self._tell(RESTARTED.format(self._restarts))
        self._restarts = 0
        frozen = joined and self.plan.joined == "freeze"
        if self._preconditioned is not None:
            scaler = self.plan.scaler
            scale = scaler.get_scale if scaler else lambda: 1.0
            self._preconditioned.correct_gradient(buffer, parameters, scale, self._may_skip or frozen)
        return reducer.push(Bucket(index, buffer, names, last, frozen))

    @property
    def update_waits(self) -> bool:
        """Whether an update was exchanged that the optimizer has not applied, zeroed or not."""
        return self._preconditioned is not None and self._preconditioned.preconditioner.pending

    @property
    def bad_step(self) -> bool:
        """Whether, in the last step, a gradient was not finite; a host that knows of other ranks' may set it."""
        return self._running().completion.bad

    @bad_step.setter
    def bad_step(self, bad: bool) -> None:
        self._running().completion.bad = bad

    def fail(self, error: Exception) -> None:
        """Stop with an error that has happened on this rank, of which the others are told."""
        if self._reducer is None:
            self._refused = error
        else:
            self._reducer.errors.fail(error)

    @torch.inference_mode(False)
    def start(self) -> Reducer:
        """Make the process group and compare with the other ranks; done by ``attach``, or by the first bucket."""
        device, asked = self._device(), self._asked
        one_device = all(p.device == device for p in self.module.parameters())
        if asked.precondition and not one_device:
            raise ValueError("precondition=True needs all parameters on one device")
        channel = Channel(self._peers(), asked.wire, asked.deadline, device)
        try:
            self._reducer = start_reducer(
                asked, self._trained, self._names, channel, device, one_device, self._may_skip
            )
            plan = self.plan = self._reducer.plan
            self.dense_names = plan.dense_names(self._trained)
            if plan.precondition:
                self._take_optimizer(self._reducer)
            else:
                beta = plan.correction.beta if plan.correction else 0.0
                self._taken = take_momentum(plan.optimizer, plan.momentum, beta, self._names)
        except Exception as error:
            if not isinstance(error, SparsyncError | ValueError):  # these are the same on all ranks; others wait for us
                own = f"rank {channel.rank}: attach: {type(error).__name__}: {error}"
                channel.monitor.broadcast_error(SparsyncError(own))
                channel.monitor.leave_vote(0)
            (self._reducer or channel).close()
            self._reducer = None
            raise
        if plan.auto:
            self._auto = AutoSwitch(self._reducer, self._trained, self.dense_names, self._may_skip, device)
        if self._taken is not None:
            self._on_stop.append(self._taken.undo)
        if plan.optimizer is not None and (self._preconditioned or self._taken):
            self._on_stop.append(notice_other_optimizer(plan.optimizer, weakref.WeakMethod(self._tell)))
        if plan.optimizer is not None and plan.scaler is None:
            self._on_stop.append(notice_scaler(plan.optimizer, self._tell))
        if not plan.precondition:  # which takes off what is there already
            reducer, watched = self._reducer, [p for p in self._trained.values() if p.requires_grad]  # no shards
            self._on_stop.append(notice_old_gradients(watched, lambda: reducer.step > 0, self._tell))
        known, density = plan.momentum_asked or plan.compressor.dense, plan.density_at(0)
        told = momentum_notice(self._preconditioned or self._taken, plan.optimizer, known, density)
        if told and not self._told:
            self._tell(told)
        self._told = True
        return self._reducer

    def _peers(self) -> Any:
        """Return the process group of the model; ``None`` without ``torch.distributed``."""
        return self.group or (dist.group.WORLD if dist.is_initialized() else None)

    def _device(self) -> torch.device:
        return next(self.module.parameters()).device

    def _take_optimizer(self, reducer: Reducer) -> None:
        preconditioner, optimizer = reducer.worker.preconditioner, self.plan.optimizer
        assert preconditioner is not None
        assert optimizer is not None
        parameters = {p.name: p for p in self.parameters}
        self._preconditioned = TakenOptimizer(
            optimizer, self._names, parameters, preconditioner, [reducer.worker.feedback], self._tell
        )
        reducer.path.rules = self._preconditioned.rules

    def _tell(self, sentence: str) -> None:
        """Warn the user; what holds for all ranks is said by the first."""
        if self._running().channel.rank == 0:
            log.warning("%s", sentence)

    def _running(self) -> Reducer:
        if self._reducer is None:
            raise SparsyncError("not attached: detach() was called, or no bucket has come yet")
        return self._reducer
