"""What a round of local steps exchanges: which parameters, in which fragments, and how."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from sparsync.compressors import Compressor
from sparsync.config import ExchangePlan, resolve
from sparsync.engine.budget import plan_for
from sparsync.hosts.unwrap import plain_name
from sparsync.planner.methods import ROUND_SHARE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What belongs to the gradients of a step, or to those who sum them in stages.
REFUSED = ("scaler", "transactional", "momentum", "beta", "masking", "precondition", "second_moment",
           "follow_lr", "joined", "per_node", "on_loss")  # fmt: skip


def check_arguments(
    every: int, fragments: int, overlap: int, outer_lr: float, outer_momentum: float, tensors: int
) -> None:
    """Refuse, with a ``ValueError``, what an outer loop over so many tensors cannot be made with."""
    if not (isinstance(every, int) and every >= 1):
        raise ValueError(f"every must be 1 or more steps, got {every!r}")
    if not (isinstance(fragments, int) and 1 <= fragments <= min(every, tensors)):
        most = f"{min(every, tensors)}, as many as a round has steps and the model tensors"
        raise ValueError(f"fragments must be from 1 to {most}, got {fragments!r}")
    if not (isinstance(overlap, int) and 0 <= overlap < every):
        raise ValueError(f"overlap must be from 0 to {every - 1} steps, less than a round, got {overlap!r}")
    if not 0 < outer_lr < math.inf:
        raise ValueError(f"outer_lr must be above 0, and finite, got {outer_lr!r}")
    if not 0 <= outer_momentum < 1:
        raise ValueError(f"outer_momentum must be at least 0 and below 1, got {outer_momentum!r}")


def cut(
    own: Mapping[str, Tensor], parts: int, plan: ExchangePlan, workers: int
) -> list[tuple[dict[str, Tensor], ExchangePlan]]:
    """Cut tensors, in their order, into so many fragments of about the same size, none of them empty; return each with
    its plan. What follows from a budget follows from the whole model."""
    found = list[tuple[dict[str, Tensor], ExchangePlan]]()
    names, total, done, at = list(own), sum(p.numel() for p in own.values()), 0, 0
    if parts > 1:
        plan = replace(plan_for(plan, own, workers), budget=None, spending=None)
    for part in range(1, parts + 1):
        first, last = at, len(names) - (parts - part)  # one at least is left for each that follows
        while at < last and (at == first or done + own[names[at]].numel() / 2 <= part * total / parts or part == parts):
            done += own[names[at]].numel()
            at += 1
        here = {name: own[name] for name in names[first:at]}
        dense = None if plan.dense is None else plan.dense & here.keys()
        found.append((here, replace(plan, dense=dense)))
    return found


def trained_parameters(model: Module) -> dict[str, Tensor]:
    """Return the parameters that are trained, by name; refuse those that local steps do not know."""
    if type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
        raise ValueError("OuterLoop takes the plain model: its workers step by themselves, and DDP would sum gradients")
    own: dict[str, Tensor] = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    if not own:
        raise ValueError("there is nothing to exchange: no parameter of the model is trained")
    for name, p in own.items():
        if p.dtype not in DTYPES or type(p.data).__name__ == "DTensor":
            raise ValueError(
                f"parameters must be whole, and fp32, bf16 or fp16; {name!r} is a {type(p.data).__name__} of {p.dtype}"
            )
    if len({p.device for p in own.values()}) > 1:
        raise ValueError("all parameters must be on one device")
    return own


def round_plan(
    compressor: str | Compressor | None,
    budget: float | None,
    steps: int | None,
    every: int,
    options: Mapping[str, Any],
    beside: float = 0.0,
) -> ExchangePlan:
    """Return the plan of a round.

    Args:
        budget: of every step.
        steps: of the training.
        beside: share of dense's bytes that a round takes for something else.
    """
    for name in REFUSED:
        if options.get(name) is not None:
            raise ValueError(f"{name}= is of gradients, which OuterLoop does not exchange; leave it out")
    given = {**options, "compressor": compressor, "joined": "freeze", "momentum": "keep", "total_steps": steps}
    asked, share = budget is not None, None
    if budget is not None:
        if not (isinstance(budget, int | float) and 0 < budget <= 1):
            raise ValueError(f"budget must be a share of dense's bytes, above 0 and at most 1, got {budget!r}")
        if every * budget <= beside:
            raise ValueError(f"budget must be above {beside / every:.2g}, what second moments take, got {budget!r}")
        share = min(1.0, every * budget - beside)
    elif compressor is None and options.get("density") is None and options.get("recipe") is None:
        share = ROUND_SHARE
    if share is not None:
        given |= {"budget": share, "total_steps": max(1, steps // every) if steps else None}
    plan = resolve(**given)
    if plan.auto:
        raise ValueError("recipe='auto' times single steps, and a round has many: leave it out")
    if plan.budget is not None and not asked:  # it gives way to a small model, as a recipe's does
        plan = replace(plan, budget=replace(plan.budget, asked=False))
    return plan
