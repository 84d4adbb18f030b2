"""Residuals that follow the learning rate: what was left over is applied with the rate of its day, within bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from sparsync.config import resolve
from sparsync.engine.checkpoint import load_state_dict, state_dict
from sparsync.engine.worker import LARGEST_FALL, WorkerState
from sparsync.layout import Parameter
from sparsync.simulate import VirtualWorkers

STEPS = 60


def worker() -> WorkerState:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(8))], lr=1.0)
    plan = resolve(compressor="topk", optimizer=optimizer, follow_lr=True)
    return WorkerState(0, [Parameter.of("w", torch.zeros(8))], plan)


def test_the_residual_follows_two_decays_and_no_further_also_from_a_checkpoint() -> None:
    """The rates that residuals are in; in these the residual is divided by each change."""
    own = worker()
    seen = []
    for rate in (0.0, 0.5, 1.0, 0.1, 0.01, 0.001, 0.0, 0.02):
        own.begin_step(None, {"w": rate})
        seen.append(own.rates.get("w", 0.0))
        again = worker()
        load_state_dict(again, 1, state_dict(own, 1, 1, "one"))
        own = again
    assert seen == pytest.approx([0.0, 0.5, 1.0, 0.1, 0.01, 1 / LARGEST_FALL, 1 / LARGEST_FALL, 0.02])


def team(follow: bool) -> tuple[VirtualWorkers, Any, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(module: nn.Module, batch: Any, carried: Any) -> Any:
        return nn.functional.cross_entropy(module(batch[0]), batch[1]), carried

    made = VirtualWorkers(model, loss, optimizer, 2, compressor="topk", density=0.02, follow_lr=follow, dense_below=0)
    return made, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS), model


def norms(follow: bool) -> list[float]:
    workers, schedule, model = team(follow)
    found = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(2, 16, 20, generator=draw)
        workers.backward([(part, part[:, :4].argmax(1)) for part in x])
        found.append(float(nn.utils.clip_grad_norm_(model.parameters(), math.inf)))
        workers.optimizer.step()
        schedule.step()
    return found


def test_a_cosine_that_ends_at_zero_does_not_blow_up_the_gradient() -> None:
    plain, followed = norms(False), norms(True)
    assert max(followed) > 3 * max(plain)  # it does follow
    assert max(followed) < LARGEST_FALL * max(plain)
    assert followed[-1] < 2 * followed[-2]  # where the rate falls to a fourth in a step
