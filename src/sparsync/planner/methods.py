"""The methods that are compared, as options of ``attach``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sparsync.compressors import RandomK, TopK
from sparsync.config import ExchangePlan, resolve
from sparsync.engine.budget import within_budget

OPTIMIZERS = ("sgd", "adam", "adamw")


@dataclass(frozen=True)
class Method:
    """A way to exchange gradients.

    Args:
        about: what it is, in a few words.
        options: of ``attach``.
        plain: DDP's own sums, without a hook of ours.
        accurate: trainings end where dense ones do, as docs/results.md shows; the others are faster than they learn.
        dense: every entry is sent.
        summed: gradients are summed inside machines first (``per_node``), and the method goes on between them.
    """

    about: str
    options: Mapping[str, Any] = field(default_factory=dict)
    plain: bool = False
    accurate: bool = False
    dense: bool = False
    summed: bool = False

    def plan(self, tensors: Mapping[str, Tensor], workers: int, optimizer: str = "sgd") -> ExchangePlan:
        """Return what ``attach`` would do with these parameters and so many workers."""
        given = dict(self.options)
        if "recipe" in given and given["recipe"] != "paper":
            given["optimizer"] = make_optimizer(optimizer)
        return within_budget(resolve(**given), tensors, workers)


METHODS: Mapping[str, Method] = {
    "dense fp32": Method("plain DDP", {"compressor": "none"}, plain=True, accurate=True, dense=True),
    "dense bf16": Method(
        "DDP with torch's bf16 hook", {"compressor": "none", "values": "bf16"}, plain=True, accurate=True, dense=True
    ),
    "default": Method("recipe default", {"recipe": "default"}, accurate=True),
    "balanced": Method("recipe balanced", {"recipe": "balanced"}, accurate=True),
    "topk 0.1 %": Method("0.1 % of every bucket", {"compressor": TopK(0.001), "scope": "bucket"}),
    "gtopk 0.1 %": Method(
        "0.1 % of every bucket, by a tree", {"compressor": TopK(0.001), "collective": "gtopk", "scope": "bucket"}
    ),
    "paper": Method("recipe paper: 0.1 % of the model", {"recipe": "paper"}),
    "random 1 %": Method(
        "the same random 1 % on all workers", {"compressor": RandomK(0.01), "collective": "shared", "scope": "bucket"}
    ),
}


# Where machines have several workers; as trainings they are those of as many workers as machines, with larger batches.
SUMMED: Mapping[str, Method] = {
    f"{name}, summed": replace(METHODS[name], about=f"{METHODS[name].about}, summed inside machines first", summed=True)
    for name in ("default", "balanced")
}


ROUND_SHARE = 1 / 20  # of a dense exchange: with 16 workers about 2 % of the entries, as SparseLoCo sends


class Round(Method):
    """A round of ``OuterLoop``, if nothing is said of what it may send; a small model sends more."""

    def plan(self, tensors: Mapping[str, Tensor], workers: int, optimizer: str = "sgd") -> ExchangePlan:
        plan = resolve(budget=ROUND_SHARE)
        assert plan.budget is not None
        return within_budget(replace(plan, budget=replace(plan.budget, asked=False)), tensors, workers)


ROUND = Round("a round of local steps")


def make_optimizer(name: str) -> torch.optim.Optimizer:
    """Return an optimizer of this class, in capitals or not, which nothing is trained with."""
    if name.lower() not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}")
    weights = [Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))]
    if name.lower() == "sgd":
        return torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    return (torch.optim.AdamW if name.lower() == "adamw" else torch.optim.Adam)(weights)
