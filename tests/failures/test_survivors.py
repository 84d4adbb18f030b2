"""With ``on_loss="continue"`` the survivors of a lost rank go on, and another one joins them."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
from tests.crew import Crew
from tests.failures.ddp_training import ALL_SPARSE, SIZES, SMALL_BUCKETS, Chain, digest, loss_of

DEADLINE = 20.0


def case_training(store: Any, steps: int, dies: str = "", at: int = 0, **options: Any) -> dict[str, Any]:
    model = Chain(SIZES)
    ddp = DistributedDataParallel(model, **SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    changes: list[Any] = []
    sync = sparsync.attach(
        ddp, "topk", density=0.05, optimizer=optimizer, deadline=DEADLINE, on_loss="continue",
        on_change=changes.append, **ALL_SPARSE, **options,
    )  # fmt: skip
    rank = dist.get_rank()
    if dies == "backward" and rank == 1:
        model.get_parameter("layer1.weight").register_hook(lambda _: os._exit(9) if sync.steps >= at else None)
    while sync.steps < steps:
        with sync.surviving():
            optimizer.zero_grad()
            loss_of(ddp, dist.get_rank(), sync.steps).backward()
            optimizer.step()
    sync.finish()
    found = {
        "digest": digest(model.parameters()), "steps": sync.steps, "rank": dist.get_rank(),
        "workers": dist.get_world_size(), "changes": changes, "lost": sync.stats().total.lost_ranks,
    }  # fmt: skip
    sync.detach()
    return found


def test_first() -> None:
    with Crew() as crew:
        for rank in range(3):
            crew.start(case_training, rank, 3, steps=8, dies="backward", at=3)
        assert crew.result(1) == "died with exit code 9"
        a, b = crew.result(0), crew.result(2)
    print(a)
    print(b)
    assert a["digest"] == b["digest"]
