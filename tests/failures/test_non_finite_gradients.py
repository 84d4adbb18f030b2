"""A gradient that is not finite is named once, by the first rank, and never enters a residual."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import TopK
from tests.failures.ddp_training import (
    ALL_SPARSE,
    SIZES,
    SMALL_BUCKETS,
    Chain,
    assert_replicas_equal,
    bad_gradient,
    local_gradients,
    logged,
    loss_of,
    training,
)


def case_nan_on_one_rank(rank: int, size: int, name: str, compressor: Any, **options: Any) -> list[str]:
    model = Chain(SIZES)
    with training(model, compressor, **options) as run, logged() as messages:
        for step in range(2):
            run.step(lambda m, step=step: loss_of(m, rank, step))
        assert messages == []
        before = run.residuals()
        came_in = local_gradients(model, lambda m: loss_of(m, rank, 2))
        with bad_gradient(model, name, math.nan, rank == 1):
            run.optimizer.zero_grad()
            loss_of(run.ddp, rank, 2).backward()
        assert not torch.isfinite(model.get_parameter(name).grad).all()  # the optimizer would see it on every rank
        if rank == 1:
            came_in[name].view(-1)[2] = 0.0  # what is not finite does not come in
        after = run.residuals()
        undone = options.get("transactional")
        together = next((bucket for bucket in run.buckets() if name in bucket), ())
        for n in after if undone else together:  # without transactions, what travelled with it comes home
            assert torch.equal(after[n], before[n] if undone else before[n] + came_in[n]), n
        assert all(torch.isfinite(r).all() for r in after.values())
        for step in (3, 4):
            run.step(lambda m, step=step: loss_of(m, rank, step))
            assert all(torch.isfinite(p).all() for p in model.parameters())
        return messages


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("layer1.weight", {"compressor": TopK(0.05)}),
        ("layer1.weight", {"compressor": TopK(0.05), "transactional": True}),
        ("layer2.bias", {"compressor": TopK(0.05), "transactional": True}),
        ("layer1.weight", {"compressor": "none", "values": "bf16"}),
    ],
    ids=["kept", "undone", "dense", "rounded"],
)
def test_nan_on_one_rank_is_named_by_the_first(worlds: Any, name: str, options: dict[str, Any]) -> None:
    expected = [f"step 2: the gradient of {name} was not finite on rank 1"]
    assert worlds[3].run(case_nan_on_one_rank, name=name, **options) == [expected, [], []]


def case_many(rank: int, size: int) -> list[str]:
    """Weights are NaN after the first bad step: many tensors, in every bucket, on both ranks and in all 12 steps."""
    with training(Chain(SIZES), TopK(0.05), SMALL_BUCKETS, **ALL_SPARSE) as run, logged() as messages:
        for step in range(12):
            run.step(lambda m, step=step: loss_of(m, rank, step) * math.nan)
        return messages


def test_many_gradients_that_are_not_finite_are_told_in_the_first_step_and_the_tenth(worlds: Any) -> None:
    (first, tenth), others = worlds[2].run(case_many)
    assert first.startswith("step 0: the gradient of ")
    assert tenth.startswith("step 9: the gradient of ")
    assert tenth.endswith("was not finite on rank 0; that makes 10 such steps")
    assert others == []


@dataclass(frozen=True)
class SelectsNothing(TopK):
    """Selects nothing."""

    def choose(self, u: Tensor, *_: Any) -> Tensor:
        return torch.empty(0, dtype=torch.int64)


def case_hidden_overflow(rank: int, size: int) -> None:
    model, scaler = Chain(SIZES), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with training(model, SelectsNothing(0.05), scaler=scaler, **ALL_SPARSE) as run:
        run.step(lambda m: loss_of(m, rank, 0), scaler)
        assert run.handle.stats().step.entries == 0
        with bad_gradient(model, "layer1.weight", math.inf, rank == 0):
            run.step(lambda m: loss_of(m, rank, 1), scaler)
        assert model.get_parameter("layer1.weight").grad.isnan().any()
        assert scaler.get_scale() == 2.0**9


def test_an_overflow_is_seen_though_nothing_is_sent(worlds: Any) -> None:
    worlds[2].run(case_hidden_overflow)


def case_huge_gradient(rank: int, size: int, clipped: bool) -> float:
    model = Chain(SIZES)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = sparsync.attach(ddp, density=0.05, precondition=True, optimizer=optimizer, **ALL_SPARSE)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(ddp, rank, step)
        if step == 1 and rank == 1:
            loss = loss + 1e30 * sum(p.flatten()[0] for p in model.parameters())
        loss.backward()
        if clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert_replicas_equal(model)
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    kept = [handle.residual(name) for name, _ in model.named_parameters()]
    handle.detach()
    assert all(value is None or torch.isfinite(value).all() for value in kept)
    return float(moved.abs().max())


@pytest.mark.parametrize("clipped", [False, True], ids=["as it is", "clipped"])
def test_a_finite_gradient_whose_square_is_not_leaves_adamw_finite(worlds: Any, clipped: bool) -> None:
    assert all(0 < moved < 1 for moved in worlds[3].run(case_huge_gradient, clipped=clipped))
