"""Gradients that are clipped after the exchange, or accumulated before it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import TopK
from tests.failures.checked_training import inputs, mlp, train
from tests.failures.ddp_training import SIZES, SMALL_BUCKETS, Chain, MassBalance, loss_of, training


def case_clipping(rank: int, size: int) -> None:
    model = Chain(SIZES)
    balance, clipped = MassBalance(model), 0
    with training(model, TopK(0.05), SMALL_BUCKETS) as run:

        def clip() -> None:
            nonlocal clipped
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            after = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            torch.testing.assert_close(after, norm.clamp(max=0.5), rtol=1e-4, atol=0)
            clipped += bool(norm > 0.5)

        for step in range(5):
            balance.step(run, lambda m, step=step: loss_of(m, rank, step), after=clip)
        balance.assert_balanced(run)
        assert clipped


def test_clipping_after_the_exchange_takes_nothing_from_the_residual(worlds: Any) -> None:
    """It works on the averaged gradient, the same on every rank, and takes nothing from what is kept."""
    worlds[3].run(case_clipping)


def case_no_sync(rank: int, size: int, scope: str) -> None:
    ddp = DistributedDataParallel(mlp())
    handle = sparsync.attach(ddp, "topk", density=0.02, scope=scope)
    train(ddp, handle, inputs(rank, 8, 40, steps=9), accumulate=3)
    assert handle.stats().total.steps == 3
    handle.detach()
    del ddp
    gc.collect()


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_gradients_accumulated_under_no_sync_lose_nothing(worlds, scope):
    worlds[2].run(case_no_sync, scope=scope)
