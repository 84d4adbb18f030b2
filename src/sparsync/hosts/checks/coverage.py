"""Which parameters of a DDP model come in buckets; what DDP keeps from them goes by without us."""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module
from torch.nn.parallel import DistributedDataParallel

from sparsync.errors import SparsyncError
from sparsync.hosts.unwrap import plain_name

IGNORED = "ignored by DDP, each rank has its own"
DELAYED = "reduced by DDP later, dense"
NOT_EXCHANGED = (
    "is trained, and DDP does not exchange it, so that replicas would drift apart: it knows what was trained when the "
    "model was wrapped; freeze and unfreeze before, and wrap the model anew"
)


def left_out_by(ddp: DistributedDataParallel) -> dict[str, str]:
    """Return the trained parameters that never come in a bucket, and what becomes of them."""
    delayed = {id(parameter) for parameter in ddp._delay_all_reduce_params}
    return {
        plain_name(name): DELAYED if id(parameter) in delayed else IGNORED
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and _as_ddp_names_it(name) in ddp.parameters_to_ignore
    }


def ignored_in(module: Module) -> dict[str, str]:
    """Return what a model asks every DDP to ignore, as ``left_out_by`` does."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return {
        plain_name(name): IGNORED
        for name, p in module.named_parameters()
        if p.requires_grad and _as_ddp_names_it(name) in ignored
    }


def refuse_changed_since(ddp: DistributedDataParallel, names: Mapping[int, str]) -> None:
    """Refuse a model of which other parameters are trained than when it was wrapped.

    Args:
        names: of those that are trained and not left out, by ``id``.
    """
    told = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    if told.get("num_parameter_tensors", len(names)) == len(names):
        return  # what has changed places is seen in the first step: to ask DDP for its parameters takes their memory
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    known = {id(p) for bucket in buckets for p in bucket.parameters()}
    missing = [name for key, name in names.items() if key not in known]
    if missing:
        raise ValueError(f"{missing[0]!r} {NOT_EXCHANGED}")
    frozen = [plain_name(n) for n, p in ddp.module.named_parameters() if id(p) in known and not p.requires_grad]
    if frozen:
        raise ValueError(
            f"{frozen[0]!r} is frozen, and was trained when the model was wrapped, so that DDP waits for its gradient: "
            "freeze it before, and wrap the model anew"
        )


def frozen_in(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the parameters that are not trained, and that DDP would not exchange if they were."""
    return {
        plain_name(name): p
        for name, p in ddp.module.named_parameters()
        if not p.requires_grad and _as_ddp_names_it(name) not in ddp.parameters_to_ignore
    }


def refuse_unfrozen(frozen: Mapping[str, Tensor]) -> None:
    """Raise if any of ``frozen_in`` is trained by now."""
    missing = [name for name, p in frozen.items() if p.requires_grad]
    if missing:
        raise SparsyncError(f"{missing[0]!r} {NOT_EXCHANGED}")


def refuse_sparse_gradients(module: Module, left_out: Container[str]) -> None:
    """Refuse embeddings whose gradients are sparse tensors, which have no flat form to choose entries from."""
    for prefix, part in module.named_modules():
        name = plain_name(f"{prefix}.weight".lstrip("."))
        sparse = isinstance(part, Embedding | EmbeddingBag) and part.sparse and part.weight.requires_grad
        if sparse and name not in left_out:
            raise ValueError(
                f"{name!r} has sparse gradients, which are not compressed: build its {type(part).__name__} with "
                "sparse=False (rows that were not used are not sent either), or let DDP ignore it"
            )


def describe_left_out(left_out: dict[str, str]) -> str:
    """Return the names of what is left out, by what becomes of them."""
    groups: dict[str, list[str]] = {}
    for name, why in left_out.items():
        groups.setdefault(why, []).append(name)
    return "; ".join(f"{', '.join(names)} ({why})" for why, names in groups.items())


def _as_ddp_names_it(name: str) -> str:
    """Return a parameter's name as DDP compares it: those of the model itself have a dot before them."""
    return name if "." in name else f".{name}"
