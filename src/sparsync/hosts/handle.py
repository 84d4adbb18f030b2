"""A model whose gradients are exchanged: what a user holds in hand, whatever the host framework."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Module

from sparsync.collectives import Channel
from sparsync.config import ExchangePlan
from sparsync.engine.bucketing import Bucket
from sparsync.engine.budget import within_budget
from sparsync.engine.reducer import Reducer
from sparsync.engine.stats import Stats
from sparsync.errors import SparsyncError
from sparsync.feedback import (
    TakenMomentum,
    TakenOptimizer,
    momentum_notice,
    rates_by_name,
    refuse_other_model,
    take_momentum,
)
from sparsync.hosts.scaler_check import notice_scaler
from sparsync.kernels import KernelPath
from sparsync.layout import Parameter
from sparsync.version import __version__

log = logging.getLogger("sparsync")


class Handle:
    """A model whose gradients Sparsync exchanges; ``attach`` makes it.

    It is also the ``state`` of the hook, for frameworks that register hooks themselves (see ``comm_hook``).

    Args:
        module: the bare model, not its wrapper.
        plan: how its gradients are exchanged; what follows from its budget is known once it starts.
        group: the model's process group; the default one where it is ``None``.
        may_skip: parameters may be unused, and what is sent for them is then lost.
    """

    def __init__(self, module: Module, plan: ExchangePlan, group: Any = None, may_skip: bool = False) -> None:
        if plan.optimizer is not None:
            refuse_other_model(plan.optimizer, module)
        self.module, self.plan, self.group, self._may_skip = module, plan, group, may_skip
        self._trained = trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._names = {id(p): name for name, p in trained.items()}
        self.parameters = [Parameter.of(name, p) for name, p in trained.items()]
        self.dense_names = plan.dense_names(trained)
        self.detached = False
        self._reducer: Reducer | None = None
        self._taken: TakenMomentum | None = None
        self._preconditioned: TakenOptimizer | None = None
        self._releases: list[Callable[[], None]] = []

    # ---- what a user calls ----------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return bytes, entries, times and energy: of the last step (``.step``) and of all steps (``.total``)."""
        return self._running().newest_stats()

    def describe(self) -> str:
        """Return in a few lines what is compressed, how, and what each worker sends in a step."""
        reducer = self._running()
        numel = {p.name: p.numel for p in self.parameters}
        dense = sum(numel[name] for name in self.dense_names)
        sparse = sum(numel.values()) - dense
        about = self.plan.describe(reducer.step, self._taken.describe() if self._taken else None)
        lines = {
            "recipe": about.pop("recipe"),
            "compressor": about.pop("compressor"),
            "collective": about.pop("collective"),
            "compressed": f"{len(numel) - len(self.dense_names)} tensors, {sparse:,} entries",
            "dense": f"{len(self.dense_names)} tensors, {dense:,} entries (1-D or small)",
            **about,
            "kernels": self._describe_kernels(),
        }
        title = f"sparsync {__version__} on {reducer.channel.size} workers ({reducer.channel.backend})"
        return "\n".join([title, *(f"  {name:<12} {text}" for name, text in lines.items())])

    def _describe_kernels(self) -> str:
        """Return what works on the units' gradients, which is decided when they are first compressed."""
        paths = Counter(unit.workspace.find(KernelPath) for unit in self._running().buckets.units)
        known = (f"{path} for {many} unit{'s' * (many > 1)}" for path, many in paths.items() if path is not None)
        return ", ".join(known) or "chosen in the first step"

    def check(self) -> None:
        """Raise, with its full text, the error that ended an exchange; ``backward`` raises it mangled by DDP."""
        self._running().check()

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

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, thresholds and step: tensors and plain types only. Save one per rank."""
        return self._running().state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from ``state_dict()``: this rank's own, or those of all ranks of a run of any size, in order."""
        self._running().load_state_dict(state)

    def is_attached(self) -> bool:
        """Return whether the model's gradients go through this handle."""
        return self._reducer is not None

    def detach(self) -> None:
        """Stop: end the communication thread, give the process group back; the model then trains dense.

        The residual is dropped with the handle; take ``state_dict()`` before, to keep it. Before a process exits:
        ``detach()``, delete the DDP model, then ``torch.distributed.destroy_process_group()``.
        """
        self.detached = True
        if self._preconditioned is not None and self._reducer is not None:
            self._preconditioned.undo(self._reducer.mean_of)
            self._preconditioned = None
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
        for release in self._releases:
            release()
        self._releases = []

    # ---- what the host framework calls ----------------------------------------------------------------------------

    def on_detach(self, release: Callable[[], None]) -> None:
        """Call ``release`` when this handle is detached."""
        self._releases.append(release)

    def check_start(self) -> None:
        """Raise, before a forward pass, what ended an earlier step."""
        self._running().check(starting=True)
        if self._preconditioned is not None:
            self._preconditioned.before_forward()

    def push(self, index: int, buffer: Tensor, parameters: Sequence[Tensor], last: bool) -> Future[Tensor]:
        """Take a bucket: ``buffer`` holds the gradients of ``parameters``. The future gives it back with the result."""
        reducer = self._reducer or self.start()
        try:
            names = tuple(self._names[id(parameter)] for parameter in parameters)
        except KeyError:
            raise SparsyncError("this hook state belongs to another model; make one for each model") from None
        if self._preconditioned is not None:
            scaler = self.plan.scaler
            scale = scaler.get_scale if scaler else lambda: 1.0
            self._preconditioned.correct_gradient(buffer, parameters, scale, self._may_skip)
        return reducer.push(Bucket(index, buffer, names, last))

    def start(self) -> Reducer:
        """Make the process group and compare with the other ranks; done by ``attach``, or by the first bucket."""
        group = self.group or (dist.group.WORLD if dist.is_initialized() else None)
        workers = dist.get_world_size(group) if group is not None else 1
        plan = self.plan = within_budget(self.plan, self._trained, workers)
        self.dense_names = plan.dense_names(self._trained)
        device = next(self.module.parameters()).device
        if plan.precondition and any(p.device != device for p in self.module.parameters()):
            raise ValueError("precondition=True needs all parameters on one device")
        channel = Channel(group, plan.wire, plan.deadline, device)
        # What is decided on a device is decided for that device alone.
        channel.may_defer = channel.may_defer and all(p.device == device for p in self.module.parameters())
        try:
            channel.assert_consistent("configuration", plan.configuration(self.dense_names))
            channel.assert_consistent("model", "\n".join(map(str, self.parameters)))
        except SparsyncError:
            channel.close()
            raise
        rates = None
        if plan.follow_lr:
            assert plan.optimizer is not None
            rates = partial(rates_by_name, plan.optimizer, self._names)
        self._reducer = Reducer(
            self.parameters, plan, channel, dense_names=self.dense_names, may_skip=self._may_skip, rates=rates,
            device=device,
        )  # fmt: skip
        beta = plan.correction.beta if plan.correction else 0.0
        try:
            if plan.precondition:
                self._take_optimizer(self._reducer)
            else:
                self._taken = take_momentum(plan.optimizer, plan.momentum, beta, plan.density_at(0))
        except Exception:
            self._reducer.close()
            self._reducer = None
            raise
        if self._taken is not None:
            self.on_detach(self._taken.undo)
        if plan.optimizer is not None and plan.scaler is None:
            self.on_detach(notice_scaler(plan.optimizer, self._tell))
        told = momentum_notice(
            self._preconditioned or self._taken, plan.optimizer, plan.momentum_asked or plan.compressor.dense
        )
        if told:
            self._tell(told)
        return self._reducer

    def _take_optimizer(self, reducer: Reducer) -> None:
        preconditioner, optimizer = reducer.worker.preconditioner, self.plan.optimizer
        assert preconditioner is not None
        assert optimizer is not None
        parameters = {p.name: p for p in self.parameters}
        self._preconditioned = TakenOptimizer(
            optimizer, self._names, parameters, preconditioner, [reducer.worker.feedback]
        )
        reducer.rules = self._preconditioned.rules

    def _tell(self, sentence: str) -> None:
        """Warn the user; what holds for all ranks is said by the first."""
        if self._running().channel.rank == 0:
            log.warning("%s", sentence)

    def _running(self) -> Reducer:
        if self._reducer is None:
            raise SparsyncError("not attached: detach() was called, or no bucket has come yet")
        return self._reducer
