"""What preconditioned feedback keeps in memory: a residual and a velocity, no more than AdamW's own two states."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from tests.world import World

WIDTH = 512  # sketches, messages and tables are small beside matrices of this width
CLOSED = (str, bytes, int, float, type, ModuleType, nn.Module)


def tensors_behind(root: Any) -> Iterator[Tensor]:
    """Yield all tensors that an object holds, directly or through others; models and modules are not looked into."""
    seen, ahead = set[int](), [root]
    while ahead:
        found = ahead.pop()
        if id(found) in seen or isinstance(found, CLOSED):
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            yield found
        elif isinstance(found, FunctionType):  # its globals are not its own
            ahead += [found.__closure__, found.__defaults__]
        else:
            ahead += gc.get_referents(found)


def bytes_of(tensors: Iterable[Tensor], but: Iterable[Tensor] = ()) -> int:
    """Return the bytes of their storages, each once, without those that others use, too."""
    foreign = {tensor.untyped_storage().data_ptr() for tensor in but}
    held = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(size for place, size in held.items() if place not in foreign)


def case_memory(rank: int, size: int, scope: str, scaled: bool) -> tuple[float, float, float]:
    """Return, over the bytes of AdamW's two states: residual and velocity, all that the handle holds, the optimizer."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.5, gradient_as_bucket_view=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    own = {"scaler": scaler} if scaled else {}
    handle = sparsync.attach(ddp, optimizer=optimizer, budget=1 / 60, total_steps=10, scope=scope, **own)
    for _ in range(4):  # past DDP's bucket rebuild
        optimizer.zero_grad()
        scaler.scale(ddp(torch.randn(8, WIDTH)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    parameters = list(model.parameters())
    # Gradients are views of DDP's buckets, which are DDP's own.
    foreign = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    feedback = handle._running().worker.feedback
    states = 2 * sum(p.numel() * p.element_size() for p in parameters)
    kept = bytes_of(tensors_behind([feedback._residuals.flat, feedback._velocities.flat]), foreign)
    everything = bytes_of(tensors_behind(handle), foreign)
    beside = bytes_of(tensors_behind(dict(optimizer.state)), foreign)
    handle.detach()
    del ddp
    gc.collect()
    return kept / states, everything / states, beside / states


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_the_memory_is_that_of_adamw(worlds: dict[int, World], scope: str, scaled: bool) -> None:
    """With a loss scaler twice that, so that steps can be undone; scope ``global`` gathers gradients, which takes one
    gradient more."""
    times = 2 if scaled else 1
    gathered = 0.5 if scope == "global" else 0.0
    for kept, everything, beside in worlds[2].run(case_memory, scope=scope, scaled=scaled):
        assert 0.95 * times <= kept <= 1.05 * times  # with what finds entries in it quickly
        assert everything <= 1.2 * times + gathered  # messages, sketches, tables
        assert beside == 0
