"""Trainings that go on: after an elastic restart, or over another process group."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import TopK
from tests.failures.ddp_training import (
    SIZES,
    SMALL_BUCKETS,
    Chain,
    assert_same_tensors,
    digest,
    logged,
    loss_of,
    training,
)
from tests.failures.reducers import error_of
from tests.world import World


def case_restarted(rank: int, size: int, restarts: str, load: bool) -> list[str]:
    """Workers that torchrun has started again; ``load``: they find a checkpoint."""
    with training(Chain(SIZES), TopK(0.05)) as run:
        run.step(lambda m: loss_of(m, rank, 0))
        state = run.handle.state_dict()
    elastic = patch.dict("os.environ", {"TORCHELASTIC_RESTART_COUNT": restarts})
    with elastic, logged() as said, training(Chain(SIZES), TopK(0.05)) as run:
        if load:
            run.handle.load_state_dict(state)
            assert_same_tensors(run.residuals(), state["residuals"])
        for step in range(2):
            run.step(lambda m, step=step: loss_of(m, rank, step))
    return [text for text in said if "restart" in text]


@pytest.mark.parametrize(("restarts", "load", "told"), [("2", False, 1), ("2", True, 0), ("0", False, 0)])
def test_a_restart_without_a_checkpoint_is_told_once(worlds: Any, restarts: str, load: bool, told: int) -> None:
    answers = worlds[2].run(case_restarted, restarts=restarts, load=load)
    assert [len(said) for said in answers] == [told, 0]
    if told:
        assert "residuals start from zero" in answers[0][0]


def make(model: Any, group: Any, **options: Any) -> tuple[Any, Any, Any]:
    ddp = DistributedDataParallel(model, process_group=group, **SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if options.get("precondition"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compressor = "topk" if "budget" in options else TopK(0.05)
    return ddp, optimizer, sparsync.attach(ddp, compressor, optimizer=optimizer, **options)


def case_group_replaced(rank: int, size: int, replace: bool, **options: Any) -> str:
    """The same ranks in a new group: not a bit of the training changes."""
    model, groups = Chain(SIZES), [dist.new_group(list(range(size))) for _ in range(2)]
    ddp, optimizer, handle = make(model, groups[0], **options)
    with logged() as said:
        for step in range(6):
            if replace and step == 3:
                ddp._update_process_group(groups[1])
                handle.set_process_group(groups[1])
                assert handle.describe().startswith(f"sparsync {sparsync.__version__} on {size} workers")
                dist.destroy_process_group(groups[0])
            optimizer.zero_grad()
            loss_of(ddp, rank, step).backward()
            optimizer.step()
    assert not said  # nothing of it is told twice
    result = digest([*model.parameters(), *handle.state_dict()["residuals"].values()])
    handle.detach()
    optimizer.zero_grad()
    loss_of(ddp, rank, 6).backward()  # detached: dense, over the new group
    del ddp
    gc.collect()
    return result


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": "keep"},
        pytest.param({"momentum": "correct"}, marks=pytest.mark.slow),
        {"precondition": True},
        pytest.param({"transactional": True}, marks=pytest.mark.slow),
    ],
    ids=["keep", "correct", "adam", "transactional"],
)
def test_a_process_group_may_be_replaced(options: dict[str, Any]) -> None:
    """Residuals, velocities, moments and the number of the step are carried over."""
    replaced = World.once(3, case_group_replaced, replace=True, **options)
    assert all(finished for finished, _ in replaced), replaced
    assert replaced == World.once(3, case_group_replaced, replace=False, **options)


def case_group_shrinks(rank: int, size: int, **options: Any) -> None:
    """One rank leaves: the others keep the mean of what they had, and train on."""
    model, fewer = Chain(SIZES), dist.new_group([0, 1])
    ddp, optimizer, handle = make(model, dist.group.WORLD, **options)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()
    before = handle.state_dict()["residuals"]
    if rank == 2:
        handle.detach()
    else:
        ddp._update_process_group(fewer)
        handle.set_process_group(fewer)
        assert_same_tensors(handle.state_dict()["residuals"], {n: r * (2 / 3) for n, r in before.items()})
        for step in range(3, 5):
            optimizer.zero_grad()
            loss_of(ddp, rank, step).backward()
            optimizer.step()
        weights = [torch.empty(sum(p.numel() for p in model.parameters())) for _ in range(2)]
        dist.all_gather(weights, torch.cat([p.detach().flatten() for p in model.parameters()]), group=fewer)
        assert torch.equal(*weights)
        about = handle.describe()
        handle.detach()
        handle = make(Chain(SIZES), fewer, **options)[2]  # the plan is that of a training of two from the start
        assert [line for line in about.splitlines() if "kernels" not in line] == handle.describe().splitlines()[:-1]
        handle.detach()
    dist.barrier()
    del ddp
    gc.collect()


@pytest.mark.parametrize("options", [{"momentum": "keep"}, {"budget": 1 / 10, "momentum": "keep"}], ids=["", "budget"])
def test_a_process_group_may_shrink(options: dict[str, Any]) -> None:
    for finished, answer in World.once(3, case_group_shrinks, **options):
        assert finished, answer


def case_mid_step(rank: int, size: int) -> list[tuple[str, str]]:
    model, answers = Chain(SIZES), []
    with training(model, TopK(0.05), SMALL_BUCKETS) as run:
        run.step(lambda m: loss_of(m, rank, 0))
        # The first layer's gradient is the last to come: buckets of the others are on their way by then.
        late = model.get_parameter("layer0.weight").register_hook(
            lambda _: answers.append(error_of(run.handle.set_process_group, dist.group.WORLD))
        )
        run.step(lambda m: loss_of(m, rank, 1))
        late.remove()
        run.step(lambda m: loss_of(m, rank, 2))  # it goes on as it was
    return answers


def test_a_process_group_is_not_replaced_within_a_step(worlds: Any) -> None:
    for answers in worlds[2].run(case_mid_step):
        assert answers == [("SparsyncError", "a step is under way: call this after backward")]
