"""Sparsync under Hugging Face's ``Trainer``: attaches when training begins, and travels with its checkpoints."""

from __future__ import annotations

import inspect
import logging
from functools import wraps
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from sparsync.compressors import Compressor
from sparsync.config import resolve
from sparsync.engine.stats import Stats, Totals
from sparsync.hosts.ddp import attach
from sparsync.hosts.handle import Handle
from sparsync.hosts.states.rank_files import load_ranks, save_ranks
from sparsync.hosts.unwrap import unwrap_model, unwrap_optimizer

__all__ = ["SparsyncCallback", "use"]

log = logging.getLogger("sparsync")

ALONE = (
    "there is nothing to exchange: this Trainer has one process, and trains as it does without sparsync; start several "
    "with torchrun --nproc-per-node=... to exchange gradients"
)
SHARDED = (
    "sparsync exchanges the gradients of DistributedDataParallel, and this Trainer uses {}; start it with torchrun "
    "alone, or leave sparsync out"
)


def use(trainer: Trainer, compressor: str | Compressor | None = None, **options: Any) -> SparsyncCallback:
    """Exchange the gradients of every ``trainer.train()`` sparsely from now on.

    Args:
        compressor, options: of ``sparsync.attach``. A budget is spent over the Trainer's own number of steps, if
            ``total_steps`` is not given.

    Returns:
        The callback that was added: its ``handle`` while training runs, its ``stats()`` also after that.
    """
    if not isinstance(trainer, Trainer):
        raise ValueError(f"use() takes a transformers.Trainer, got {type(trainer).__name__}")
    if "optimizer" in options:
        raise ValueError("optimizer= is the Trainer's own, and cannot be given")
    inspect.signature(attach).bind(None, compressor, **options)  # which raises what is unknown
    if any(isinstance(other, SparsyncCallback) for other in trainer.callback_handler.callbacks):
        raise ValueError("this Trainer uses sparsync already; trainer.remove_callback(SparsyncCallback) ends that")
    sharded = [kind for kind in ("deepspeed", "fsdp") if getattr(trainer, f"is_{kind}_enabled", False)]
    if sharded:
        raise ValueError(SHARDED.format({"deepspeed": "DeepSpeed", "fsdp": "FSDP"}[sharded[0]]))
    callback = SparsyncCallback(trainer, {"compressor": compressor, **options})
    trainer.add_callback(callback)
    return callback


class SparsyncCallback(TrainerCallback):  # type: ignore[misc]
    """Attaches, saves, loads, logs and detaches; ``use`` makes it.

    Attributes:
        handle: what ``sparsync.attach`` returned, while training runs.
    """

    def __init__(self, trainer: Trainer, options: dict[str, Any]) -> None:
        self.trainer, self.options = trainer, options
        self.handle: Handle | None = None
        self._stats: Stats | None = None
        self._resumed: str | None = None  # the checkpoint that training goes on from
        self._trial: Any = None
        self._logged = Totals()
        self._listen()

    def stats(self) -> Stats:
        """Return the figures of the training that runs, or of the last one."""
        stats = self._stats if self.handle is None else self.handle.stats()
        if stats is None:
            raise ValueError("there are no figures: no training has begun, or it had one process")
        return stats

    def _listen(self) -> None:
        """Hear what callbacks are not told: the checkpoint that training resumes from, and logs while they are made."""
        trainer, train, write = self.trainer, self.trainer.train, self.trainer.log

        @wraps(train)
        def train_from(resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any) -> Any:
            last = resume_from_checkpoint is True
            folder = get_last_checkpoint(trainer.args.output_dir) if last else resume_from_checkpoint
            self._resumed, self._trial = folder or None, trial
            return train(resume_from_checkpoint, trial, *args, **kwargs)

        @wraps(write)
        def write_with_figures(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            write({**logs, **self._figures()} if "loss" in logs else logs, *args, **kwargs)

        trainer.train, trainer.log = train_from, write_with_figures

    # ---- what the Trainer calls, on every rank --------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to the model as it is wrapped now. The optimizer's own state is loaded already."""
        if self.handle is not None:  # of a training that an error has ended
            self.handle.abandon()
            self.handle = None
        trainer = self.trainer
        if args.world_size == 1:
            log.warning("%s", ALONE)
            return
        model = unwrap_model(trainer.model_wrapped)
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(SHARDED.format(type(model).__name__))
        options = dict(self.options)
        optimizer, scaler = unwrap_optimizer(trainer.optimizer, options.pop("scaler", None))
        plan = resolve(optimizer=optimizer, scaler=scaler, **options)
        if plan.budget is not None:
            options.setdefault("total_steps", state.max_steps)
        self.handle, self._logged = attach(model, optimizer=optimizer, scaler=scaler, **options), Totals()
        if self._resumed is not None and not load_ranks(self.handle, self._resumed):
            log.warning("%s holds no residuals: they start from zero", self._resumed)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save this rank's residuals beside what the Trainer has saved."""
        if self.handle is not None and not args.save_only_model:
            folder = Path(self.trainer._get_output_dir(self._trial))
            save_ranks(self.handle, folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the optimizer back."""
        self._detach()

    def _figures(self) -> dict[str, float]:
        """Return what the exchange has cost since the last time, a step."""
        if self.handle is None:
            return {}
        now, then = self.handle.stats().total, self._logged
        steps, numel = now.steps - then.steps, now.numel - then.numel
        self._logged = Totals(now.steps, now.bytes, now.traffic, now.entries, now.numel)
        return {
            "sparsync/density": (now.entries - then.entries) / max(1, numel),
            "sparsync/traffic": (now.traffic - then.traffic) / max(1, steps),
        }

    def _detach(self) -> None:
        if self.handle is not None:
            if self.handle.is_attached():
                self._stats = self.handle.stats()
            self.handle.detach()
            self.handle = None
