"""Models of ``torch.distributed._composable.replicate``: the model keeps its class, and a hidden DDP its parameters."""

from __future__ import annotations

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from sparsync.hosts.checks.coverage import IGNORED

CALLBACK = "Trainer(callbacks=[sparsync.hosts.lightning.Sparsync()])"
ADAPTERS = {
    "transformers.Trainer": "sparsync.hosts.transformers.use(trainer)",
    "accelerate.Accelerator": "sparsync.hosts.accelerate.attach(accelerator, model, optimizer)",
    "lightning.LightningModule": CALLBACK,
    "lightning.Trainer": CALLBACK,
    "pytorch_lightning.LightningModule": CALLBACK,
    "pytorch_lightning.Trainer": CALLBACK,
}


def hidden_ddp(model: Module) -> DistributedDataParallel | None:
    """Return the DDP of a model of ``replicate()``, made now if it has not run yet; ``None`` for other models."""
    kinds = type(model).__mro__
    if not any(
        kind.__name__ == "DDP" and kind.__module__.startswith("torch.distributed._composable") for kind in kinds
    ):
        return None
    from torch.distributed._composable.replicate import replicate

    state = replicate.state(model)
    assert state is not None
    if not state.has_initialized:
        state.lazy_init()
    return state._ddp  # type: ignore[no-any-return]


def left_out_of(model: Module, ddp: DistributedDataParallel) -> dict[str, str]:
    """Return the trained parameters of ``model`` that its hidden ``ddp`` does not hold, as ``left_out_by`` does."""
    held = {id(parameter) for parameter in ddp.parameters()}
    return {name: IGNORED for name, p in model.named_parameters() if p.requires_grad and id(p) not in held}


def refusal(model: Module) -> str:
    """Return what is wrong with a model that ``attach`` cannot take, and what to do."""
    kind = type(model).__name__
    if kind == "FullyShardedDataParallel":
        return (
            "FullyShardedDataParallel (FSDP1) gives its hooks no shards to choose from: use fully_shard (FSDP2), and "
            'attach(model, replicate=mesh["replicate"])'
        )
    if kind == "DataParallel":
        return "DataParallel is one process and exchanges nothing: use DistributedDataParallel, a process for each GPU"
    for base in type(model).__mro__:
        instead = ADAPTERS.get(f"{base.__module__.partition('.')[0]}.{base.__name__}")
        if instead is not None:
            return f"attach() takes a DistributedDataParallel model, got {kind}: use {instead}"
    parts = model.named_modules() if isinstance(model, Module) else ()
    inner = [name for name, part in parts if isinstance(part, DistributedDataParallel)]
    if inner:
        return f"attach() takes the DistributedDataParallel model itself, which is {inner[0]!r} of this {kind}"
    return (
        f"attach() takes a DistributedDataParallel model, or one of fully_shard, got {kind}; wrap it first, or pass "
        "what your framework's prepare() returned"
    )
