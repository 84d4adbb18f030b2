"""Sparsync on ``DistributedDataParallel``: ``attach``, and the communication hook."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with types, not with text.

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from sparsync.collectives import Collective
from sparsync.compressors import Compressor
from sparsync.config import resolve
from sparsync.config.nodes import PerNode
from sparsync.errors import SparsyncError, without_frames
from sparsync.hosts.checks.buckets import PYTHON_REDUCER, BucketCheck
from sparsync.hosts.checks.coverage import frozen_in, ignored_in, left_out_by, refuse_changed_since, refuse_unfrozen
from sparsync.hosts.checks.registration import notice_unregistered_hook
from sparsync.hosts.composable import hidden_ddp, left_out_of, refusal
from sparsync.hosts.handle import Handle
from sparsync.hosts.survival import Change, Survival, check_states
from sparsync.hosts.unwrap import unwrap_model, unwrap_optimizer
from sparsync.schedule import Schedule

log = logging.getLogger("sparsync")


class Slot:
    """DDP takes one hook for life, so the hook's state is this slot, and handles come and go in it."""

    def __init__(self, group: Any) -> None:
        self.handle: Handle | None = None
        self.check: BucketCheck | None = None
        self.frozen: dict[str, Tensor] = {}
        self.group = group

    def clear(self) -> None:
        """Let the handle go; its process group may be another one than at first."""
        if self.handle is not None:
            self.group = self.handle.group
        self.handle = self.check = None

    def __deepcopy__(self, memo: Any) -> None:
        """Return nothing: a copy of a DDP model has no hook."""

    def __reduce__(self) -> Any:
        return type(None), ()


class Watch:
    """Raises, before a forward pass, what ended an earlier step, looks whether that brought buckets, and refuses to
    train what DDP does not exchange. A copy of the model is not watched."""

    def __init__(self, slot: Slot | None = None) -> None:
        self.slot = slot

    def __call__(self, ddp: Module, *_: Any) -> None:
        if self.slot is None or self.slot.handle is None:
            return
        self.slot.handle.check_start()
        if torch.is_grad_enabled():
            refuse_unfrozen(self.slot.frozen)
        if self.slot.check is not None:
            self.slot.check.before_forward(torch.is_grad_enabled() and bool(ddp.require_backward_grad_sync))

    def __deepcopy__(self, memo: Any) -> "Watch":
        return Watch()

    def __reduce__(self) -> Any:
        return Watch, ()


def _slot(ddp: DistributedDataParallel) -> Slot | None:
    return vars(ddp).get("_sparsync")


def hook(state: object, bucket: GradBucket) -> Future[Tensor]:
    """Exchange a bucket: the communication hook itself. ``state`` is a ``Handle`` or a ``Slot``."""
    if isinstance(bucket, tuple):  # called by Python, which an exception may reach
        raise SparsyncError(PYTHON_REDUCER)
    if isinstance(state, Slot) and state.check is not None:
        state.check.came = True
    handle = state.handle if isinstance(state, Slot) else state
    if handle is None:
        return _dense_hook(bucket, state.group if isinstance(state, Slot) else None)
    assert isinstance(handle, Handle)
    if handle.detached:
        return _dense_hook(bucket, handle.group)
    try:
        parameters, buffer = bucket.parameters(), bucket.buffer()
        _refuse_cast(buffer.dtype, parameters[0].dtype)
        # join() lets ranks without data run the hook on zeros, outside of any backward.
        joined = torch._C._current_graph_task_id() == -1  # type: ignore[attr-defined]
        return handle.push(bucket.index(), buffer, parameters, bucket.is_last(), joined)
    except Exception as error:  # an exception that leaves the hook would end the process
        handle.fail(error)  # or backward would wait for the buckets before this one
        future: Future[Tensor] = Future()
        future.set_exception(without_frames(error))  # type: ignore[arg-type]
        return future


def _refuse_cast(came: torch.dtype, own: torch.dtype) -> None:
    """Refuse gradients that were cast on their way here: what is cut off would be lost, and what is too large inf."""
    if came != own and not own.is_complex:
        name = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(came, str(came).removeprefix("torch."))
        raise SparsyncError(
            f"gradients of {own} come as {came}: something like {name}_compress_wrapper is around the hook; leave it "
            f"out and pass values={name!r} to comm_hook, which keeps what it cuts off"
        )


def _refuse_other_hook(ddp: DistributedDataParallel) -> None:
    """Refuse a model whose one communication hook is another's."""
    if getattr(ddp, "mixed_precision", None) is not None:
        raise SparsyncError(
            "DDP's own mixed_precision= holds the only communication hook that a model can have: leave it out and use "
            "torch.autocast (with a GradScaler: scaler=), or a model in bf16; values='bf16' halves what travels"
        )
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.module.parameters()):
        raise SparsyncError(
            "this model's optimizers step inside backward (_apply_optimizer_in_backward), which DDP does by the only "
            "communication hook that a model can have: make one optimizer that steps after backward, and pass it to "
            "attach(..., optimizer=optimizer)"
        )
    others = [other for other, _ in getattr(ddp, "_comm_hooks", []) if other is not hook]
    if others:
        raise SparsyncError(f"DDP takes one communication hook, and this model has another: {others[0].__qualname__}")


def _dense_hook(bucket: GradBucket, group: Any) -> Future[Tensor]:
    """Do what DDP does by itself; for models that were detached."""
    buffer = bucket.buffer().mul_(1 / dist.get_world_size(group))
    future: Future[Tensor] = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def comm_hook(
    module: Module,
    compressor: str | Compressor | None = None,
    *,
    recipe: str | None = None,
    process_group: Any = None,
    **options: Any,
) -> tuple[Handle, Any]:
    """Return the pair ``(state, hook)`` for frameworks that call ``register_comm_hook`` themselves.

    Takes ``attach``'s options, the bare module (not the DDP wrapper), whose parameter names it needs, and the model's
    process group where that is not the default one. The state is a ``Handle``; it starts with the first bucket.
    """
    module = unwrap_model(module)
    options["optimizer"], options["scaler"] = unwrap_optimizer(options.get("optimizer"), options.get("scaler"))
    plan = resolve(recipe, compressor=compressor, **options)
    if plan.on_loss != "raise":
        raise ValueError("on_loss='continue' needs attach(), which knows the DDP model")
    handle = Handle(module, plan, process_group, may_skip=True, left_out=ignored_in(module))
    notice_unregistered_hook(handle)
    return handle, hook


def attach(
    ddp: DistributedDataParallel,
    compressor: str | Compressor | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    recipe: str | None = None,
    budget: float | None = None,
    total_steps: int | None = None,
    scaler: Any = None,
    replicate: Any = None,
    collective: str | Collective | None = None,
    scope: str | None = None,
    density: float | Schedule | None = None,
    values: str | None = None,
    indices: str | None = None,
    momentum: str | None = None,
    beta: float | str | None = None,
    masking: bool | None = None,
    precondition: bool | None = None,
    second_moment: str | None = None,
    clip: float | None = None,
    transactional: bool | None = None,
    dense_below: int | None = None,
    dense_1d: bool | None = None,
    follow_lr: bool = False,
    joined: str = "drain",
    per_node: PerNode = 1,
    deadline: float = 300.0,
    seed: int = 0,
    debug: bool = False,
    on_loss: str = "raise",
    on_change: Callable[[Change], None] | None = None,
    states: Sequence[Any] = (),
) -> Handle:
    """Exchange the gradients of ``ddp`` sparsely from now on. All ranks call this, with the same arguments.

    With neither a compressor nor a recipe the ``"default"`` recipe is used. What is given explicitly goes before what a
    recipe says; without a recipe, what is not given is as the text says last.

    Args:
        ddp: the ``DistributedDataParallel`` model; ``torch.compile`` may be around or inside it.
        compressor: which entries are sent: a name (``"threshold"``, ``"topk"``, ``"gaussian"``, ``"dgc"``,
            ``"trimmed"``, ``"random"``, ``"block"``, ``"none"``, or another package's) or an object: ``TopK(0.01)``.
            ``"auto"`` is the recipe of that name.
        optimizer: of this model, for ``momentum`` and ``follow_lr``; without it momentum stays behind the residual.
            Accelerate's and Lightning's wrappers are looked into, for a loss scaler, too.
        recipe: options that go together: ``"default"`` (a budget of 1/60, the best we know), ``"balanced"`` (5 % of the
            entries, about a 60th of dense's bytes with any number of workers), ``"auto"`` (dense in bf16, or the sparse
            way within default's budget that is fastest here and now), ``"paper"`` (TopK-SGD as published) or
            ``"dgc"`` (Deep Gradient Compression).
        budget: share of the bytes of a dense fp32 ring all-reduce that a worker may send in a step, in (0, 1], on
            average over the training: ``1/60``. Everything that is sent counts. Density, collective, ``values``,
            ``indices`` and which small tensors travel dense follow from it, from the number of workers and from the
            model, as far as they are not given; ``describe()`` says what came of it. At first up to 8 times as much is
            sent, over the first tenth of the steps, and less later. One that cannot be reached is refused.
        total_steps: of the whole training, over which the budget is spent; 2,000 if it is not given: a longer training
            then sends less than its budget, a shorter one more.
        scaler: the ``GradScaler``, if one is used: the residual follows the loss scale and skipped steps are undone.

    Other Args: Rarely needed
        replicate: of a model of ``fully_shard`` (FSDP2): the ranks that hold the same shard, ``mesh["replicate"]``;
            gradients are summed dense inside the shards' mesh, by FSDP, and exchanged between these.
        collective: how they are summed: ``"allgather"``, ``"shared"``, ``"gtopk"``, ``"balanced"``, ``"dense"``, or an
            object; chosen to suit the compressor.
        scope: where the largest entries are looked for: in each ``"layer"``, each ``"bucket"``, or the whole model
            (``"global"``: nothing is sent before backward ends); layer.
        density: share of entries to send, in (0, 1], or a callable from step to density; the compressor's.
        values: how values travel: ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"sign"`` (1 bit) or ``"levels"`` (3 bits: a
            sign and one of four powers of 2); what is cut off is kept; fp32.
        indices: how indices travel: ``"int"``; ``"ef"``: sorted and Elias-Fano coded, in about a third of the bits;
            ``"block"``: a block's start alone; int, or block where it can be.
        momentum: ``"keep"`` leaves the optimizer's momentum m where it is. ``"move"`` makes steps without it, with
            lr / (1 - m), until ``detach`` (of Adam, with betas of at most 0.5 and 0.99): behind a low density
            momentum delays every entry a second time. ``"correct"`` puts momentum ``beta`` before the residual, and
            steps with lr (1 - beta) / (1 - m). The optimizer's groups keep their values. Both need torch's SGD (or
            Adam, which can only be moved); keep.
        precondition: the update that Adam or AdamW would make enters the residual, not the gradient; the optimizer then
            applies what was exchanged, until ``detach``. On for torch's Adam and AdamW under our recipes; torch's SGD,
            with rows and columns of every matrix evened out, has to be asked for.
        second_moment: of it: ``"sketch"``, of rows and columns from random signs, a few bytes; or ``"exact"``, of every
            entry, for which all of the gradient is sent, too: to compare with; sketch.
        beta, masking: of momentum correction: its momentum, and whether sent entries clear theirs; 0.5 and ``True``.
            Refused where momentum is not corrected, as where a recipe finds none in the optimizer (Adam has betas).
            Of a preconditioned update ``beta`` is the velocity's momentum: a number, ``"own"`` (the optimizer's) or
            ``"auto"``: 0.5 up to 1 % of the entries, the optimizer's own at all of them; auto.
        clip: largest norm that each worker's gradient may have in a segment (a layer, a bucket or the model, by
            ``scope``; the tensors that travel dense are one), before it is added to the residual; of preconditioned
            updates, largest norm of the mean gradient; none.
        transactional: steps can be undone (one more residual of memory); always so with ``scaler``.
        dense_below: tensors of fewer entries travel dense; 1024.
        dense_1d: biases and norms travel dense: they are few bytes, and delaying them costs accuracy; ``True``.
        follow_lr: divide the residual by each change of the learning rate, so that what was left over is applied with
            the rate of its day; below a hundredth of the highest rate it does not follow. ``clip_grad_norm_`` cuts what
            it brings: use ``clip``, which comes before the residual.
        joined: under ``join()``, what a rank without data does with its residual: ``"drain"``, go on sending from it,
            or ``"freeze"``: keep it as it is; where parameters may be unused it is always frozen.
        per_node: ranks that share a machine: their gradients are summed dense, the first of them keeps one residual for
            all and exchanges the sum with the other machines' first ranks. A number; ``"local"``, as torchrun's
            ``LOCAL_WORLD_SIZE`` says; or the ranks of each machine: ``[[0, 1], [2, 3, 4]]`` (ranks of the model's
            process group). ``budget`` then counts what goes between machines, ``clip`` a machine's mean gradient.
        deadline: seconds an exchange may take before all ranks stop with an error.
        seed: of the random kinds; the same on every rank.
        debug: compare results over the ranks after every exchange.
        on_loss: what the others do when a rank is killed, or frozen beyond the deadline: ``"raise"`` the same error; or
            ``"continue"`` without it, if steps are made within ``sync.surviving()``. That takes a store that is not on
            the lost rank, Gloo, the default process group and one more residual of memory, and ``optimizer``.
        on_change: is called with a ``Change`` (old and new rank and number of workers) when the training has gone on
            without a rank, or with another one: to share out the data anew.
        states: of a scheduler, ...: what a rank that is behind, or joins, takes from another beside weights and
            optimizer; anything with ``state_dict`` and ``load_state_dict``.

    Returns:
        The handle: ``stats()``, ``state_dict()``, ``describe()``, ``detach()``, ...
    """
    hosts = ("ddp", "replicate", "on_change", "states")
    given = {name: value for name, value in locals().items() if name not in (*hosts, "hosts")}  # before all else
    optimizer, scaler = unwrap_optimizer(optimizer, scaler)
    plan = resolve(**{**given, "optimizer": optimizer, "scaler": scaler})
    check_states(plan.on_loss, on_change, states)
    model = unwrap_model(ddp)
    if replicate is not None or any(kind.__name__ == "FSDPModule" for kind in type(model).__mro__):
        if plan.on_loss != "raise":
            raise ValueError("on_loss='continue' does not know models of fully_shard: shards are lost with their rank")
        from sparsync.hosts.fsdp import attach_fsdp

        return attach_fsdp(model, replicate, plan)
    ddp = hidden_ddp(model) or model
    if not isinstance(ddp, DistributedDataParallel):
        raise ValueError(refusal(ddp))
    slot = _slot(ddp)
    if slot is not None and slot.handle is not None:
        raise SparsyncError("this model is attached already; call detach() on its handle first")
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise ValueError("a step ends with its last bucket, which skip_all_reduce_unused_params=True may leave out")
    _refuse_other_hook(ddp)
    if getattr(ddp, "_use_python_reducer", False):
        raise ValueError(PYTHON_REDUCER)
    may_skip = bool(ddp.find_unused_parameters or ddp.static_graph)
    module, left_out = (ddp.module, left_out_by(ddp)) if model is ddp else (model, left_out_of(model, ddp))
    handle = Handle(module, plan, ddp.process_group, may_skip, left_out)
    refuse_changed_since(ddp, handle._names)
    if plan.on_loss == "continue":
        handle.survival = Survival(handle, ddp, states, on_change)
        handle.survival.begin()
    else:
        handle.start()
    if slot is None:
        slot = Slot(ddp.process_group if handle.survival is None else None)  # the default one, which may change
        try:
            ddp.register_comm_hook(slot, hook)
        except RuntimeError as error:
            handle.abandon()
            raise SparsyncError(f"DDP takes one communication hook, and this model has another: {error}") from error
        except Exception:
            handle.abandon()
            raise
        vars(ddp)["_sparsync"] = slot
    slot.handle, slot.frozen = handle, frozen_in(ddp)
    handle.on_detach(slot.clear)
    slot.check = BucketCheck(p for p in ddp.module.parameters() if p.requires_grad)
    handle.on_detach(slot.check.remove)
    if optimizer is not None:
        look = slot.check.look
        handle.on_detach(optimizer.register_step_pre_hook(lambda *_: look()).remove)
    watch = Watch(slot)
    handle.on_detach(model.register_forward_pre_hook(watch if model is ddp else lambda *_: watch(ddp)).remove)
    log.log(logging.INFO if handle._running().channel.rank == 0 else logging.DEBUG, "%s", handle.describe())
    return handle
