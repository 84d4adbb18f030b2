"""What frameworks put around model and optimizer is looked into, or refused before anything was changed."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from tests.failures.ddp_training import SIZES, Chain, digest, loss_of
from tests.failures.reducers import error_of
from tests.world import World


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another, without hooks of its own, as frameworks have them."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups


def case_unknown_wrappers(rank: int, size: int) -> dict[str, Any]:
    """Attach what cannot be attached; then what can."""
    ddp = DistributedDataParallel(Chain(SIZES))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    before = copy.deepcopy(optimizer.state_dict())
    outer = nn.Sequential(ddp)
    found = {
        "wrapper": error_of(sparsync.attach, ddp, optimizer=Wrapper(optimizer)),
        "hook": error_of(sparsync.comm_hook, ddp.module, optimizer=Wrapper(optimizer)),
        "other": error_of(sparsync.attach, ddp, optimizer="adamw"),
        "model": error_of(sparsync.attach, outer, optimizer=optimizer),
        "bare": error_of(sparsync.attach, ddp.module, optimizer=optimizer),
        "several": error_of(sparsync.attach, ddp, optimizer=[optimizer]),
    }
    untouched = optimizer.state_dict() == before and not ddp._comm_hooks and not optimizer._optimizer_step_pre_hooks
    sync = sparsync.attach(ddp, optimizer=optimizer)
    loss_of(ddp, rank, 0).backward()
    optimizer.step()
    sync.detach()
    return {**found, "untouched": untouched}


def test_what_is_not_known_is_refused_before_anything_is_changed(worlds: dict[int, World]) -> None:
    for found in worlds[2].run(case_unknown_wrappers):
        assert found["untouched"]
        for name, words in {
            "wrapper": ("Wrapper", "'inner'"),
            "hook": ("Wrapper", "'inner'"),
            "other": ("str", "torch.optim.Optimizer itself"),
            "model": ("Sequential", "'0'"),
            "bare": ("Chain", "wrap it first"),
            "several": ("list", "groups of one"),
        }.items():
            kind, text = found[name]
            assert kind == "ValueError", text
            assert all(word in text for word in words), text


def case_compiled(rank: int, size: int) -> dict[str, Any]:
    """Train with ``torch.compile`` around DDP, inside it, and without; a state of each is loaded into the next."""
    found: dict[str, Any] = {}
    state: Any = None
    for place in ("none", "outside", "inside"):
        model: Any = Chain(SIZES)
        if place == "inside":
            model = torch.compile(model, backend="eager")
        ddp: Any = DistributedDataParallel(model)
        if place == "outside":
            ddp = torch.compile(ddp, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = sparsync.attach(ddp, "topk", density=0.05, optimizer=optimizer)
        for step in range(2):
            optimizer.zero_grad()
            x = torch.randn(4, SIZES[0], generator=torch.Generator().manual_seed(10 * step + rank))
            ddp(x).square().sum().backward()
            optimizer.step()
        found[place] = digest(model.parameters()), [p.name for p in sync.parameters], sync.stats().total.steps
        if state is not None:
            sync.load_state_dict(state)
        state = sync.state_dict()
        sync.detach()
    return found


def test_a_compiled_model_is_attached_and_has_the_same_names() -> None:
    for finished, found in World.once(2, case_compiled):
        assert finished, found
        assert found["none"] == found["outside"] == found["inside"]
        assert found["none"][1][0] == "layer0.weight"
        assert found["none"][2] == 2
