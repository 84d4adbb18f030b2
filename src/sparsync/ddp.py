"""Sparsync on ``DistributedDataParallel``: the only module that knows DDP."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with types, not with text.

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from sparsync import checkpoint
from sparsync.collectives import Channel, Collective
from sparsync.compressors import Compressor
from sparsync.errors import SparsyncError
from sparsync.layout import SCOPES, Parameter
from sparsync.reducer import Reducer
from sparsync.registry import make_collective, make_compressor
from sparsync.schedule import Schedule, as_schedule
from sparsync.stats import Stats
from sparsync.units import Bucket
from sparsync.version import __version__
from sparsync.wire import Wire

log = logging.getLogger("sparsync")


@dataclass(frozen=True)
class Options:
    """What ``attach`` was asked for; see there."""

    compressor: str | Compressor = "threshold"
    collective: str | Collective | None = None
    scope: str = "layer"
    density: float | Schedule | None = None
    values: str = "fp32"
    indices: str = "int"
    optimizer: torch.optim.Optimizer | None = None
    scaler: Any = None
    transactional: bool | None = None
    dense_below: int = 1024
    dense_1d: bool = True
    follow_lr: bool = False
    deadline: float = 300.0
    seed: int = 0
    debug: bool = False

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ValueError(f"scope must be one of {', '.join(SCOPES)}, got {self.scope!r}")
        if self.dense_below < 0:
            raise ValueError(f"dense_below must be 0 or more entries, got {self.dense_below!r}")
        if self.follow_lr and self.optimizer is None:
            raise ValueError("follow_lr=True needs optimizer=, to read its learning rates")
        if self.scaler is not None and self.transactional is False:
            raise ValueError("scaler= needs steps that can be undone: leave transactional out, or set it to True")


class Handle:
    """A model whose gradients Sparsync exchanges; ``attach`` makes it.

    It is also the ``state`` of the hook, for frameworks that register hooks themselves (see ``comm_hook``).
    """

    def __init__(self, module: Module, options: Options, group: Any = None, may_skip: bool = False) -> None:
        self.module, self.options = module, options
        self._names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        self.parameters = [Parameter.of(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.compressor = make_compressor(options.compressor)
        self.collective = make_collective(options.collective, self.compressor)
        self.wire = Wire(options.values, options.indices)
        self.collective.check(self.wire, self.compressor.dense, self.compressor.random)
        self.density = as_schedule(self.compressor.density if options.density is None else options.density)
        self.small = frozenset() if self.compressor.dense else frozenset(filter(self._is_small, self._names.values()))
        self._group, self._may_skip = group, may_skip
        self.detached = False
        self._reducer: Reducer | None = None
        self._attached_to: DistributedDataParallel | None = None
        self._hooks: list[Any] = []

    # ---- what a user calls ----------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Bytes, entries, times and energy: of the last step (``.step``) and of all steps (``.total``)."""
        return self._running().stats

    def describe(self) -> str:
        """What is compressed, how, and what each worker sends in a step, in a few lines."""
        reducer = self._running()
        numel = {p.name: p.numel for p in self.parameters}
        small = sum(numel[name] for name in self.small)
        sparse = sum(numel.values()) - small
        now = self.density(reducer.step)
        scope = "every entry" if self.compressor.dense else f"scope {self.options.scope}, density {now:g} now"
        form = f"values as {self.options.values}"
        if not self.compressor.dense:
            form += f", indices as {self.options.indices}"
        lines = [
            f"sparsync {__version__} on {reducer.channel.size} workers ({reducer.channel.backend})",
            f"  compressor   {type(self.compressor).__name__} ({scope})",
            f"  collective   {type(self.collective).__name__}, {form}",
            f"  compressed   {len(numel) - len(self.small)} tensors, {sparse:,} entries",
            f"  dense        {len(self.small)} tensors, {small:,} entries (1-D or small)",
            f"  transaction  {'yes, steps can be undone' if reducer.feedback.transactional else 'no'}",
        ]
        return "\n".join(lines)

    def check(self) -> None:
        """Raise, with its full text, the error that ended an exchange; ``backward`` raises it mangled by DDP."""
        self._running().check()

    def commit(self) -> None:
        """Keep what the last step did to the residual; happens by itself when the next step begins."""
        self._running().settle()

    def rollback(self) -> None:
        """Undo what the last step did to residual and thresholds, because its gradient is not going to be applied."""
        reducer = self._running()
        if not reducer.feedback.transactional:
            raise SparsyncError("rollback() needs attach(..., transactional=True)")
        reducer.settle(undo=True)

    def residual(self, name: str) -> Tensor | None:
        """What is kept of a parameter's gradient, in the parameter's shape; ``None`` if it never kept anything."""
        return self._running().residual(name)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, thresholds and step: tensors and plain types only. Save one per rank."""
        return checkpoint.state_dict(self._running())

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from ``state_dict()``: this rank's own, or those of all ranks of a run of any size, in order."""
        checkpoint.load_state_dict(self._running(), state)

    def is_attached(self) -> bool:
        """Whether the model's gradients go through this handle."""
        ddp = self._attached_to
        slot = _slot(ddp) if ddp is not None else None
        return slot is not None and slot.handle is self

    def detach(self) -> None:
        """Stop: end the communication thread, give the process group back; the model then trains dense.

        The residual is dropped with the handle; take ``state_dict()`` before, to keep it. Before a process exits:
        ``detach()``, delete the DDP model, then ``torch.distributed.destroy_process_group()``.
        """
        self.detached = True
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._attached_to is not None and (slot := _slot(self._attached_to)) is not None and slot.handle is self:
            slot.handle = None
        self._attached_to = None

    # ---- what the hook calls --------------------------------------------------------------------------------------

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        reducer = self._reducer or self.start()
        try:
            names = tuple(self._names[id(parameter)] for parameter in bucket.parameters())
        except KeyError:
            raise SparsyncError("this hook state belongs to another model; make one for each model") from None
        return reducer.push(Bucket(bucket.index(), bucket.buffer(), names, bucket.is_last()))

    def start(self) -> Reducer:
        """Make the process group and compare with the other ranks; done by ``attach``, or by the first bucket."""
        options = self.options
        group = self._group or (dist.group.WORLD if dist.is_initialized() else None)
        device = next(self.module.parameters()).device
        channel = Channel(group, self.wire, options.deadline, device)
        try:
            channel.agree("configuration", self._configuration())
            channel.agree("model", "\n".join(map(str, self.parameters)))
        except SparsyncError:
            channel.close()
            raise
        self._reducer = Reducer(
            self.parameters,
            self.compressor,
            self.collective,
            channel,
            scope="bucket" if self.compressor.dense else options.scope,
            density=self.density,
            small=self.small,
            transactional=options.scaler is not None or bool(options.transactional),
            may_skip=self._may_skip,
            seed=options.seed,
            debug=options.debug,
            loss_scale=options.scaler.get_scale if options.scaler is not None else None,
            rates=self._rates if options.follow_lr else None,
        )
        return self._reducer

    def _running(self) -> Reducer:
        if self._reducer is None:
            raise SparsyncError("not attached: detach() was called, or no bucket has come yet")
        return self._reducer

    def _is_small(self, name: str) -> bool:
        parameter = self.module.get_parameter(name)
        return parameter.numel() < self.options.dense_below or (self.options.dense_1d and parameter.dim() < 2)

    def _rates(self) -> dict[str, float]:
        assert self.options.optimizer is not None
        groups = self.options.optimizer.param_groups
        return {self._names[id(p)]: float(g["lr"]) for g in groups for p in g["params"] if id(p) in self._names}

    def _configuration(self) -> str:
        """Everything that must be the same on every rank, a line each."""
        o = self.options
        densities = [self.density(step) for step in (0, 1, 10, 100, 1000, 10_000, 100_000)]
        lines = {
            "compressor": _text(self.compressor),
            "collective": _text(self.collective),
            "scope": o.scope,
            "density": densities,
            "values": o.values,
            "indices": o.indices,
            "transactional": o.scaler is not None or bool(o.transactional),
            "dense": sorted(self.small),
            "follow_lr": o.follow_lr,
            "seed": o.seed,
            "debug": o.debug,
        }
        return "\n".join(f"{key}={value}" for key, value in lines.items())


def _text(method: object) -> str:
    """A method's configuration; one that does not print it is taken for its class."""
    text = repr(method)
    return type(method).__qualname__ if " at 0x" in text else text


class Slot:
    """DDP takes one hook for life, so the hook's state is this slot, and handles come and go in it."""

    def __init__(self, group: Any) -> None:
        self.handle: Handle | None = None
        self.group = group

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a DDP model has no hook."""

    def __reduce__(self) -> Any:
        return type(None), ()


class Watch:
    """Raises, before a forward pass, what ended an earlier step. A copy of the model is not watched."""

    def __init__(self, handle: Handle | None = None) -> None:
        self.handle = handle

    def __call__(self, *_: Any) -> None:
        if self.handle is not None:
            self.handle._running().check(starting=True)

    def __deepcopy__(self, memo: Any) -> "Watch":
        return Watch()

    def __reduce__(self) -> Any:
        return Watch, ()


def _slot(ddp: DistributedDataParallel) -> Slot | None:
    return vars(ddp).get("_sparsync")


def hook(state: object, bucket: GradBucket) -> Future[Tensor]:
    """The communication hook itself. ``state`` is a ``Handle`` or a ``Slot``."""
    handle = state.handle if isinstance(state, Slot) else state
    if handle is None:
        return _dense_hook(bucket, state.group if isinstance(state, Slot) else None)
    assert isinstance(handle, Handle)
    if handle.detached:
        return _dense_hook(bucket, handle._group)
    try:
        return handle.reduce(bucket)
    except Exception as error:  # an exception that leaves the hook would end the process
        future: Future[Tensor] = Future()
        future.set_exception(error)  # type: ignore[arg-type]
        return future


def _dense_hook(bucket: GradBucket, group: Any) -> Future[Tensor]:
    """What DDP does by itself; for models that were detached."""
    buffer = bucket.buffer().mul_(1 / dist.get_world_size(group))
    future: Future[Tensor] = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def comm_hook(
    module: Module, compressor: str | Compressor = "threshold", *, process_group: Any = None, **options: Any
) -> tuple[Handle, Any]:
    """The pair ``(state, hook)`` for frameworks that call ``register_comm_hook`` themselves.

    Takes ``attach``'s options, the bare module (not the DDP wrapper), whose parameter names it needs, and the model's
    process group where that is not the default one. The state is a ``Handle``; it starts with the first bucket.
    """
    return Handle(module, Options(compressor, **options), process_group, may_skip=True), hook


def attach(
    ddp: DistributedDataParallel,
    compressor: str | Compressor = "threshold",
    *,
    collective: str | Collective | None = None,
    scope: str = "layer",
    density: float | Schedule | None = None,
    values: str = "fp32",
    indices: str = "int",
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    transactional: bool | None = None,
    dense_below: int = 1024,
    dense_1d: bool = True,
    follow_lr: bool = False,
    deadline: float = 300.0,
    seed: int = 0,
    debug: bool = False,
) -> Handle:
    """Exchange the gradients of ``ddp`` sparsely from now on. All ranks call this, with the same arguments.

    Args:
        compressor: which entries are sent: ``"threshold"``, ``"topk"``, ``"none"``, or an object: ``TopK(0.01)``.
        collective: how they are summed: ``"allgather"``, ``"dense"``, or an object; ``None`` chooses.
        scope: where the largest entries are looked for: in each ``"layer"``, each ``"bucket"``, or the whole model
            (``"global"``: nothing is sent before backward ends).
        density: share of entries to send, in (0, 1], or a callable from step to density; overrides the compressor's.
        values: how values travel: ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"sign"``; what is cut off is kept.
        indices: how indices travel: ``"int"``, or ``"ef"``: sorted and Elias-Fano coded, in about a third of the bits.
        optimizer: for ``follow_lr``.
        scaler: the ``GradScaler``, if one is used: the residual follows the loss scale and skipped steps are undone.
        transactional: steps can be undone (one more residual of memory); always so with ``scaler``.
        dense_below: tensors of fewer entries travel dense.
        dense_1d: biases and norms travel dense: they are few bytes, and delaying them costs accuracy.
        follow_lr: divide the residual by each change of the learning rate.
        deadline: seconds an exchange may take before all ranks stop with an error.
        seed: of the random kinds; the same on every rank.
        debug: compare results over the ranks after every exchange.

    Returns:
        The handle: ``stats()``, ``state_dict()``, ``describe()``, ``detach()``, ...
    """
    options = Options(
        compressor, collective, scope, density, values, indices, optimizer, scaler, transactional,
        dense_below, dense_1d, follow_lr, deadline, seed, debug,
    )  # fmt: skip
    if not isinstance(ddp, DistributedDataParallel):
        raise ValueError(f"attach() takes a DistributedDataParallel model, got {type(ddp).__name__}; wrap it first")
    slot = _slot(ddp)
    if slot is not None and slot.handle is not None:
        raise SparsyncError("this model is attached already; call detach() on its handle first")
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise ValueError("a step ends with its last bucket, which skip_all_reduce_unused_params=True may leave out")
    may_skip = bool(ddp.find_unused_parameters or ddp.static_graph)
    handle = Handle(ddp.module, options, ddp.process_group, may_skip)
    handle.start()
    if slot is None:
        slot = Slot(ddp.process_group)
        try:
            ddp.register_comm_hook(slot, hook)
        except RuntimeError as error:
            handle.detach()
            raise SparsyncError(f"DDP takes one communication hook, and this model has another: {error}") from error
        vars(ddp)["_sparsync"] = slot
    slot.handle = handle
    handle._attached_to = ddp
    handle._hooks = [ddp.register_forward_pre_hook(Watch(handle))]
    log.info("%s", handle.describe())
    return handle
