"""Sparsync under Hugging Face Accelerate: residuals travel with ``accelerator.save_state`` and ``load_state``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sparsync.compressors import Compressor
from sparsync.hosts import ddp
from sparsync.hosts.handle import Handle
from sparsync.hosts.states.rank_files import NAME, load_ranks, save_ranks

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger("sparsync")


def attach(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    compressor: str | Compressor | None = None,
    *,
    name: str = NAME,
    **options: Any,
) -> Handle:
    """Exchange the gradients of a model sparsely that ``accelerator.prepare`` returned, and ``keep`` its state.

    Args:
        model, optimizer: as ``prepare`` returned them.
        compressor, options: of ``sparsync.attach``.
        name: of its files in a checkpoint; one for each model, where there are several.
    """
    kind = accelerator.distributed_type.value
    if accelerator.num_processes == 1:
        raise ValueError(
            "there is nothing to exchange: this Accelerator has one process; start several with torchrun or "
            "accelerate launch, or leave sparsync out"
        )
    if not kind.startswith("MULTI_"):
        raise ValueError(f"sparsync exchanges gradients of DistributedDataParallel, and this Accelerator uses {kind}")
    sync = ddp.attach(model, compressor, optimizer=optimizer, **options)
    keep(accelerator, sync, name)
    return sync


def keep(accelerator: Accelerator, sync: Handle, name: str = NAME) -> None:
    """Let ``save_state`` write every rank's residuals, a file for each, and ``load_state`` read them, until ``detach``.

    Args:
        sync: what ``sparsync.attach`` returned.
        name: of the files; one for each handle, where there are several.
    """
    kept = vars(accelerator).setdefault("_sparsync", set())
    if name in kept:
        raise ValueError(f"this Accelerator keeps a state as {name!r} already: give the second another name=")
    kept.add(name)

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        save_ranks(sync, folder, name)

    def load(models: list[Any], folder: str) -> None:
        if not load_ranks(sync, folder, name):
            log.warning("%s holds no residuals of %s: they start from zero", folder, name)

    sync.on_detach(lambda: kept.discard(name))
    sync.on_detach(accelerator.register_save_state_pre_hook(save).remove)
    sync.on_detach(accelerator.register_load_state_pre_hook(load).remove)
