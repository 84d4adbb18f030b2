"""A model whose gradients are exchanged: what a user holds in hand, whatever the host framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Module

from sparsync.collectives import Channel, Collective
from sparsync.compressors import Compressor
from sparsync.config.recipes import OURS, fill_in
from sparsync.config.registry import make_collective, make_compressor
from sparsync.engine import checkpoint
from sparsync.engine.bucketing import Bucket
from sparsync.engine.reducer import Reducer
from sparsync.engine.stats import Stats
from sparsync.errors import SparsyncError
from sparsync.feedback.momentum import MOMENTA, TakenMomentum, give_back, warn_of_momentum
from sparsync.feedback.residual import Correction
from sparsync.layout import SCOPES, Parameter
from sparsync.schedule import Schedule, as_schedule
from sparsync.version import __version__
from sparsync.wire import Wire


@dataclass(frozen=True)
class Options:
    """What ``attach`` was asked for, a recipe's options filled in; see there."""

    compressor: str | Compressor = "threshold"
    collective: str | Collective | None = None
    scope: str = "layer"
    density: float | Schedule | None = None
    values: str = "fp32"
    indices: str | None = None
    optimizer: torch.optim.Optimizer | None = None
    scaler: Any = None
    momentum: str = "keep"
    beta: float = 0.5
    masking: bool = True
    clip: float | None = None
    transactional: bool | None = None
    dense_below: int = 1024
    dense_1d: bool = True
    follow_lr: bool = False
    deadline: float = 300.0
    seed: int = 0
    debug: bool = False
    recipe: str | None = None

    @classmethod
    def of(cls, recipe: str | None, **given: Any) -> Options:
        """Options from what is given (``None``: not) and a recipe's name."""
        unknown = set(given) - set(cls.__dataclass_fields__)
        if unknown:
            raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
        return cls(**fill_in(recipe, given))

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ValueError(f"scope must be one of {', '.join(SCOPES)}, got {self.scope!r}")
        if self.dense_below < 0:
            raise ValueError(f"dense_below must be 0 or more entries, got {self.dense_below!r}")
        if self.follow_lr and self.optimizer is None:
            raise ValueError("follow_lr=True needs optimizer=, to read its learning rates")
        if self.momentum not in MOMENTA:
            raise ValueError(f"momentum must be one of {', '.join(MOMENTA)}, got {self.momentum!r}")
        if self.momentum == "move" and self.optimizer is None:
            raise ValueError("momentum='move' needs optimizer=, to take it out of")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be a norm above 0, got {self.clip!r}")
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
        block = self.compressor.block and self.collective.blocks and not Wire(options.values).codec.signs
        self.wire = Wire(options.values, options.indices or ("block" if block else "int"))
        if self.wire.indices == "block" and not block:
            raise ValueError("indices='block' needs a compressor that sends blocks and collective='allgather'")
        self.correction = Correction(options.beta, options.masking) if options.momentum == "correct" else None
        self.collective.check(self.wire, self.compressor.dense, self.compressor.random)
        self.density = as_schedule(self.compressor.density if options.density is None else options.density)
        self.small = frozenset() if self.compressor.dense else frozenset(filter(self._is_small, self._names.values()))
        self.group, self._may_skip = group, may_skip
        self.detached = False
        self._reducer: Reducer | None = None
        self._taken: TakenMomentum | None = None
        self._releases: list[Callable[[], None]] = []

    # ---- what a user calls ----------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Bytes, entries, times and energy: of the last step (``.step``) and of all steps (``.total``)."""
        return self._running().newest_stats()

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
            form += f", indices as {self.wire.indices}"
        lines = [
            f"sparsync {__version__} on {reducer.channel.size} workers ({reducer.channel.backend})",
            f"  recipe       {self.options.recipe or 'none'}",
            f"  compressor   {type(self.compressor).__name__} ({scope})",
            f"  collective   {type(self.collective).__name__}, {form}",
            f"  compressed   {len(numel) - len(self.small)} tensors, {sparse:,} entries",
            f"  dense        {len(self.small)} tensors, {small:,} entries (1-D or small)",
            f"  transaction  {'yes, steps can be undone' if reducer.feedback.transactional else 'no'}",
        ]
        momentum = [self._taken.describe()] if self._taken else []
        if self.correction is not None:
            masking = "with" if self.correction.masking else "without"
            momentum.append(f"{self.correction.beta:g} before the residual, {masking} masking")
        if self.options.optimizer is None and self.options.recipe in OURS:
            momentum.append("the optimizer's is not known here and stays; pass optimizer=")
        if momentum:
            lines.append(f"  momentum     {'; '.join(momentum)}")
        if self.options.clip is not None:
            lines.append(f"  clipping     each worker's gradient, at a norm of {self.options.clip:g} a segment")
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

    def velocity(self, name: str) -> Tensor | None:
        """Under momentum correction, a parameter's velocity on this rank; ``None`` if it has none."""
        return self._running().velocity(name)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, thresholds and step: tensors and plain types only. Save one per rank."""
        return checkpoint.state_dict(self._running())

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from ``state_dict()``: this rank's own, or those of all ranks of a run of any size, in order."""
        checkpoint.load_state_dict(self._running(), state)

    def is_attached(self) -> bool:
        """Whether the model's gradients go through this handle."""
        return self._reducer is not None

    def detach(self) -> None:
        """Stop: end the communication thread, give the process group back; the model then trains dense.

        The residual is dropped with the handle; take ``state_dict()`` before, to keep it. Before a process exits:
        ``detach()``, delete the DDP model, then ``torch.distributed.destroy_process_group()``.
        """
        self.detached = True
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

    def push(self, index: int, buffer: Tensor, parameters: Sequence[Tensor], last: bool) -> Future[Tensor]:
        """Take a bucket: ``buffer`` holds the gradients of ``parameters``. The future gives it back with the result."""
        reducer = self._reducer or self.start()
        try:
            names = tuple(self._names[id(parameter)] for parameter in parameters)
        except KeyError:
            raise SparsyncError("this hook state belongs to another model; make one for each model") from None
        return reducer.push(Bucket(index, buffer, names, last))

    def start(self) -> Reducer:
        """Make the process group and compare with the other ranks; done by ``attach``, or by the first bucket."""
        options = self.options
        group = self.group or (dist.group.WORLD if dist.is_initialized() else None)
        device = next(self.module.parameters()).device
        channel = Channel(group, self.wire, options.deadline, device)
        # What is decided on a device is decided for that device alone.
        channel.may_defer = channel.may_defer and all(p.device == device for p in self.module.parameters())
        try:
            channel.assert_consistent("configuration", self._configuration())
            channel.assert_consistent("model", "\n".join(map(str, self.parameters)))
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
            rates=self.rates if options.follow_lr else None,
            correction=self.correction,
            clip=options.clip,
        )
        if options.optimizer is not None:
            if options.momentum != "keep":
                self._taken = TakenMomentum(options.optimizer, self.correction.beta if self.correction else 0.0)
                self.on_detach(self._taken.undo)
            else:
                give_back(options.optimizer)
                if not self.compressor.dense:
                    warn_of_momentum(options.optimizer, self.density(0))
        return self._reducer

    def _running(self) -> Reducer:
        if self._reducer is None:
            raise SparsyncError("not attached: detach() was called, or no bucket has come yet")
        return self._reducer

    def _is_small(self, name: str) -> bool:
        parameter = self.module.get_parameter(name)
        return parameter.numel() < self.options.dense_below or (self.options.dense_1d and parameter.dim() < 2)

    def rates(self) -> dict[str, float]:
        """The optimizer's learning rates, by parameter name."""
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
            "indices": self.wire.indices,
            "transactional": o.scaler is not None or bool(o.transactional),
            "dense": sorted(self.small),
            "momentum": o.momentum,
            "correction": self.correction,
            "clip": o.clip,
            "follow_lr": o.follow_lr,
            "seed": o.seed,
            "debug": o.debug,
        }
        return "\n".join(f"{key}={value}" for key, value in lines.items())


def _text(method: object) -> str:
    """A method's configuration; one that does not print it is taken for its class."""
    text = repr(method)
    return type(method).__qualname__ if " at 0x" in text else text
