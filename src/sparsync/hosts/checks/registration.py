"""Noticing a hook that was made by ``comm_hook``, and that nobody has registered with DDP."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparsync.hosts.handle import Handle

log = logging.getLogger("sparsync")

SENTENCE = (
    "this model's optimizer steps, and no bucket has come to the hook that comm_hook() made for it: it trains dense. "
    "Accelerate ignores a callable in DistributedDataParallelKwargs(comm_hook=...), and Lightning a ddp_comm_hook on a "
    "CPU; leave comm_hook() out, and call sparsync.attach(model, optimizer=optimizer) with the model that is wrapped"
)


def notice_unregistered_hook(handle: Handle) -> None:
    """Look, at each step of any optimizer until a bucket has come, whether this model's gradients are applied without
    one; tell of it once. Before a step nothing can be told: gradients may be accumulated for long."""
    watched, trained = weakref.ref(handle), [weakref.ref(p) for p in handle.module.parameters() if p.requires_grad]
    settled = False

    def look(optimizer: Any, *_: object) -> None:
        nonlocal settled
        own = None if settled else watched()
        if own is None or own.is_attached() or own.detached:  # a hook cannot be removed while hooks are run
            settled = True
            return
        if not (dist.is_initialized() and dist.get_world_size(own.group) > 1):
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        if any(id(p) in held for p in (ref() for ref in trained)):
            settled = True
            if dist.get_rank() == 0:
                log.warning("%s", SENTENCE)

    remove = register_optimizer_step_pre_hook(look).remove
    handle.on_detach(remove)
    weakref.finalize(handle, remove)
