"""Uneven inputs under ``join()``: a rank that has run out of data takes part with zeros."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import TopK
from tests.failures.ddp_training import SIZES, SMALL_BUCKETS, Chain, gathered, local_gradients, loss_of, training

NAME, OWN_STEPS, STEPS = "layer1.weight", 3, 6  # the last rank makes all steps, the others run out of data before
DENSITY = 0.05


def case_join(rank: int, size: int, joined: str, scope: str, **options: Any) -> dict[str, Any]:
    model = Chain(SIZES)
    came = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    applied = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    options = {"scope": scope, "joined": joined, "dense_below": 0} | options
    with training(model, TopK(DENSITY), SMALL_BUCKETS, **options) as run:
        with run.ddp.join():
            for step in range(STEPS if rank == size - 1 else OWN_STEPS):
                for name, grad in local_gradients(model, lambda m, step=step: loss_of(m, rank, step)).items():
                    came[name] += grad
                run.step(lambda m, step=step: loss_of(m, rank, step))
                for name, p in model.named_parameters():
                    applied[name] += p.grad
            before = run.residuals()
        after = run.residuals()
        for name in came:
            kept = sum(gathered(after.get(name, torch.zeros_like(came[name]))))
            mean = gathered(applied[name])[-1]  # only the last rank has seen all results
            torch.testing.assert_close(size * mean + kept, sum(gathered(came[name])), rtol=1e-4, atol=1e-4)
    return {
        "same": {name: torch.equal(after[name], before[name]) for name in before},
        "fewer": int(before[NAME].count_nonzero() - after[NAME].count_nonzero()),
        "k": round(DENSITY * came[NAME].numel()),
    }


@pytest.mark.parametrize("size", [2, 3])
def test_a_joined_rank_goes_on_sending_what_it_kept(worlds: Any, size: int) -> None:
    for answer in worlds[size].run(case_join, joined="drain", scope="layer")[:-1]:
        assert answer["fewer"] == (STEPS - OWN_STEPS) * answer["k"]


@pytest.mark.parametrize(
    "options",
    [{"scope": "layer"}, {"scope": "global"}, {"scope": "layer", "momentum": "correct"}],
    ids=["layer", "global", "correct"],
)
def test_the_residual_of_a_joined_rank_may_be_frozen(worlds: Any, options: dict[str, Any]) -> None:
    """Bit for bit; and it is there when the rank has data again."""
    case = case_frozen_velocity if "momentum" in options else case_join
    for answer in worlds[3].run(case, joined="freeze", **options)[:-1]:
        assert all(answer["same"].values())


def case_frozen_velocity(rank: int, size: int, **options: Any) -> dict[str, Any]:
    """With momentum correction what is applied is no sum of gradients; the velocity stays as well."""
    model = Chain(SIZES)
    with training(model, TopK(DENSITY), SMALL_BUCKETS, **options) as run:
        with run.ddp.join():
            for step in range(STEPS if rank == size - 1 else OWN_STEPS):
                run.step(lambda m, step=step: loss_of(m, rank, step))
            before = run.handle.state_dict()
        after = run.handle.state_dict()
    kinds = "residuals", "velocities"
    return {"same": {f"{kind} {n}": torch.equal(t, after[kind][n]) for kind in kinds for n, t in before[kind].items()}}


def case_adam(rank: int, size: int, joined: str) -> None:
    """A preconditioned training goes on after uneven inputs, the same on all ranks."""
    model = Chain(SIZES)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.01)
    handle = sparsync.attach(ddp, "topk", density=DENSITY, optimizer=optimizer, precondition=True, joined=joined)
    for epoch in range(2):
        with ddp.join():
            for step in range(STEPS if rank == size - 1 else OWN_STEPS):
                optimizer.zero_grad()
                loss_of(ddp, rank, 10 * epoch + step).backward()
                optimizer.step()
        weights = gathered(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert all(torch.equal(weights[0], other) for other in weights)
        assert weights[0].isfinite().all()
    handle.check()
    handle.detach()
    del ddp
    gc.collect()


@pytest.mark.parametrize("joined", ["drain", "freeze"])
def test_join_under_adam_keeps_replicas_equal(worlds: Any, joined: str) -> None:
    worlds[2].run(case_adam, joined=joined)


def case_divide(rank: int, size: int, initial: bool) -> float:
    """Every gradient is 1; rank 0 has run out of data at the second step."""
    model = nn.Linear(40, 40, bias=False)
    ddp = DistributedDataParallel(model)
    handle = sparsync.attach(ddp, TopK(1.0), dense_below=0)
    with ddp.join(divide_by_initial_world_size=initial):
        for _ in range(1 + rank):
            ddp.zero_grad()
            ddp(torch.ones(1, 40)).sum().backward()
    handle.detach()
    del ddp
    gc.collect()
    return float(model.weight.grad.unique())


@pytest.mark.parametrize("initial", [True, False])
def test_sums_are_divided_by_all_ranks_under_join(worlds: Any, initial: bool) -> None:
    """Hooks do not see ``divide_by_initial_world_size``: the joined ranks count, whatever it says."""
    assert worlds[2].run(case_divide, initial=initial) == [1.0, 0.5]


def test_other_words_for_joined_are_refused() -> None:
    with pytest.raises(ValueError, match="joined must be one of drain, freeze, got 'stop'"):
        sparsync.comm_hook(Chain(SIZES), "topk", joined="stop")
