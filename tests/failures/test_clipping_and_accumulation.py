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
from tests.failures.ddp_training import (
    SIZES,
    SMALL_BUCKETS,
    Chain,
    MassBalance,
    gathered,
    local_gradients,
    logged,
    loss_of,
    training,
)


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


def case_without_zero_grad(rank: int, size: int, zero: str) -> list[str]:
    """What the last exchange gave is still there when the next backward adds to it, unless it is zeroed."""
    model, steps = Chain(SIZES), 4
    balance = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    with logged() as said, training(model, TopK(0.05), SMALL_BUCKETS) as run:
        for step in range(steps):
            if zero == "before forward":
                run.optimizer.zero_grad()
            loss = loss_of(run.ddp, rank, step)
            if zero == "after forward":
                run.optimizer.zero_grad(set_to_none=False)
            came = local_gradients(model, lambda m, step=step: loss_of(m, rank, step))
            for name, p in model.named_parameters():
                balance[name] += came[name] + (0 if p.grad is None else p.grad)
            loss.backward()
            for name, p in model.named_parameters():
                balance[name] -= p.grad
            run.optimizer.step()
        residuals = run.residuals()
    for name, left in balance.items():
        kept = sum(gathered(residuals.get(name, torch.zeros_like(left))))
        torch.testing.assert_close(kept, sum(gathered(left)), rtol=1e-4, atol=1e-4)
    return [text for text in said if "zero_grad" in text]


@pytest.mark.parametrize("zero", ["never", "before forward", "after forward"])
def test_backward_without_zero_grad_loses_nothing_and_is_told_once(worlds: Any, zero: str) -> None:
    answers = worlds[3].run(case_without_zero_grad, zero=zero)
    assert [len(said) for said in answers] == [int(zero == "never"), 0, 0]  # what holds for all is said by the first


def case_accumulating(rank: int, size: int) -> list[str]:
    model = Chain(SIZES)
    with logged() as said, training(model, TopK(0.05), SMALL_BUCKETS) as run:
        for step in range(3):
            run.optimizer.zero_grad()
            with run.ddp.no_sync():
                loss_of(run.ddp, rank, 2 * step).backward()
            loss_of(run.ddp, rank, 2 * step + 1).backward()
            run.optimizer.step()
    return [text for text in said if "zero_grad" in text]


def test_accumulation_under_no_sync_is_not_told(worlds: Any) -> None:
    assert worlds[2].run(case_accumulating) == [[], []]
