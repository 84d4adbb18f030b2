"""Sparsync in Lightning: a callback that attaches to the trainer's DDP model.

``Trainer(strategy="ddp", callbacks=[sparsync.hosts.lightning.Sparsync()])``
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from sparsync.compressors import Compressor
from sparsync.engine.stats import Stats
from sparsync.hosts.ddp import attach
from sparsync.hosts.handle import Handle
from sparsync.hosts.states.gathered import gather_states, to_cpu

log = logging.getLogger("sparsync")

PACKAGES = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch_lightning"}
KEY = "sparsync"  # in a checkpoint, of the states of all ranks in their order


def _callback_class() -> Any:
    """Return Lightning's ``Callback``. A trainer takes only its own package's, of which there are two with the same
    content: those that are imported already, or else the first that is installed."""
    names = [name for name in PACKAGES if name in sys.modules]
    names = names or [name for name, package in PACKAGES.items() if find_spec(package)][:1]
    if not names:
        raise ImportError("sparsync.hosts.lightning needs Lightning: pip install 'sparsync[lightning]'")
    return type("Callback", tuple(import_module(name).Callback for name in names), {})


class Sparsync(_callback_class()):  # type: ignore[misc]
    """Exchanges the gradients of a trainer's model sparsely, from the start of ``fit`` to its end.

    Checkpoints hold the states of all ranks, which the first rank gathers, and every rank reads to go on: that takes as
    many times the host's memory as there are ranks, each once the model in fp32, or twice with AdamW or momentum
    correction.

    Args:
        compressor, options: ``sparsync.attach``'s; the optimizer and the loss scaler are the trainer's.
    """

    def __init__(self, compressor: str | Compressor | None = None, **options: Any) -> None:
        super().__init__()
        for name in ("ddp", "optimizer", "scaler"):
            if name in options:
                raise ValueError(f"{name}= is the trainer's own, and cannot be given")
        inspect.signature(attach).bind(None, compressor, **options)  # which raises what is unknown
        self.handle: Handle | None = None  # while the trainer fits
        self._options: dict[str, Any] = {"compressor": compressor, **options}
        self._loaded: list[Mapping[str, Any]] = []  # states of all ranks, until there is a handle
        self._began = False  # on all ranks at once
        self._kept: Mapping[str, Any] | None = None  # this rank's state, once training has ended
        self._stats: Stats | None = None
        self._logged = 0

    def stats(self) -> Stats:
        """Return bytes, entries and times of the training that runs, or of the last one."""
        stats = self._stats if self.handle is None else self.handle.stats()
        if stats is None:
            raise ValueError(
                "there are no figures: no training has begun, or ddp_spawn and ddp_fork kept them in their workers"
            )
        return stats

    # ---- what the trainer calls -------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach: model and optimizer are there, and the optimizer has loaded its part of a checkpoint."""
        ddp = trainer.strategy.model
        if not isinstance(ddp, DistributedDataParallel):
            return self._go_without(trainer.strategy)
        optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in trainer.optimizers]
        if len(optimizers) > 1:
            raise ValueError(
                f"Sparsync takes a module with one optimizer, and {type(pl_module).__name__} has {len(optimizers)}: "
                "make their parameters groups of one"
            )
        if getattr(trainer.strategy, "_ddp_comm_hook", None) is not None and not getattr(ddp, "_comm_hooks", None):
            log.warning(
                "Lightning registers DDPStrategy(ddp_comm_hook=...) on CUDA alone, and elsewhere, as here, trains "
                "dense without a word; now Sparsync's callback exchanges the gradients: leave ddp_comm_hook out"
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.handle = attach(ddp, optimizer=next(iter(optimizers), None), scaler=scaler, **self._options)
        if self._loaded:
            self.handle.load_state_dict(self._loaded)
        self._began, self._kept, self._loaded = True, None, []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Log what the last step sent, in the steps in which the trainer logs."""
        step = trainer.global_step
        if self.handle is None or step == self._logged or step % (trainer.log_every_n_steps or sys.maxsize):
            return
        self._logged, figures = step, self.handle.stats().as_dict()
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.log_metrics(figures, step - 1)

    def on_train_end(self, *_: Any) -> None:
        """Detach; this rank's state is kept, for checkpoints that are saved later."""
        if self.handle is not None:
            self._kept, self._stats = to_cpu(self.handle.state_dict()), self.handle.stats()
            self.handle.detach()
            self.handle = None

    def on_exception(self, *_: Any) -> None:
        """Stop without the other ranks, which may be anywhere."""
        handle, self.handle = self.handle, None
        if handle is not None:
            self._stats = handle.stats()
            try:
                self._kept = to_cpu(handle.state_dict())
            except Exception as error:
                log.warning("a checkpoint of this moment has no residuals: %s", error)
            handle.abandon()

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put the states of all ranks into the checkpoint, which the first rank writes; all ranks come here."""
        if not self._began:  # as when training was over already; or in a process that has spawned those that trained
            states: list[Any] = self._loaded
        else:
            own = self._kept if self.handle is None else self.handle.state_dict()
            states = gather_states(own, trainer.strategy.root_device)
        if not states:
            return
        missing = [rank for rank, state in enumerate(states) if state is None]
        if missing:
            log.warning("the checkpoint is saved without residuals: rank %d has none", missing[0])
        else:
            checkpoint[KEY] = states

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        """Hold the states until there is a handle: Lightning loads checkpoints before it makes the DDP model."""
        if trainer.state.fn == "fit":
            self._loaded = checkpoint.get(KEY, [])
            if not self._loaded and trainer.is_global_zero:
                log.warning("the checkpoint holds no residuals: they start from zero")

    def state_dict(self) -> dict[str, Any]:
        """Return where the states are; so Lightning warns who goes on from them without this callback."""
        return {"key": KEY}

    def _go_without(self, strategy: Any) -> None:
        """Say that there is nothing to exchange on a single device; refuse strategies that know no DDP."""
        name = type(strategy).__name__
        if not name.startswith("SingleDevice"):
            raise ValueError(
                f"Sparsync exchanges the gradients of DistributedDataParallel, and {name} makes no such model: use "
                "Trainer(strategy='ddp'), or leave the callback out"
            )
        if self._loaded:
            raise ValueError(
                f"the checkpoint holds residuals of {len(self._loaded)} workers, which {name} would lose: go on with "
                "Trainer(strategy='ddp', devices=1)"
            )
        log.warning("there is a single device and nothing to exchange: Sparsync's callback does nothing")
