"""The communication hook: what it returns, the forms it is registered in, and whose it is."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import TopK
from tests.failures.checked_training import assert_same_on_all_ranks, inputs, mlp, square, train
from tests.failures.ddp_training import RATE, SIZES, Chain, assert_replicas_equal, digest, loss_of, training
from tests.failures.reducers import error_of
from tests.world import World


def case_always_a_future(rank: int, size: int) -> None:
    returned: list[Any] = []

    def noting(state, bucket):  # type: ignore[no-untyped-def]
        returned.append(hook(state, bucket))
        return returned[-1]

    model = Chain(SIZES)
    handle, hook = sparsync.comm_hook(model, TopK(0.05))
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(handle, noting)
    loss_of(ddp, rank, 0).backward()
    assert_replicas_equal(model)
    handle.detach()

    stranger = DistributedDataParallel(Chain(SIZES))
    other, hook = sparsync.comm_hook(model, TopK(0.05))  # made for another model
    stranger.register_comm_hook(other, noting)
    with pytest.raises(RuntimeError, match="belongs to another model"):
        loss_of(stranger, rank, 0).backward()
    other.detach()

    with training(Chain(SIZES), TopK(0.05)) as run:
        run.step(lambda m: loss_of(m, rank, 0))
        run.handle.detach()  # from here on: dense
        run.step(lambda m: loss_of(m, rank, 1))
    assert len(returned) >= 2
    assert all(isinstance(result, torch.futures.Future) for result in returned)
    returned.clear()
    del ddp, stranger
    gc.collect()


def test_the_hook_always_returns_a_future(worlds: Any) -> None:
    """When it works, when it cannot, and after ``detach()``: DDP would crash on anything else."""
    worlds[2].run(case_always_a_future)


def case_form(rank: int, size: int, form: str) -> str:
    model = Chain(SIZES)
    ddp = DistributedDataParallel(model)
    if form == "attach":
        handle = sparsync.attach(ddp, TopK(0.05))
    else:
        handle, hook = sparsync.comm_hook(model, TopK(0.05))

        def wrapper(state, bucket):  # type: ignore[no-untyped-def]
            return hook(state, bucket)

        forms = {"pair": hook, "lambda": lambda state, bucket: hook(state, bucket), "wrapper": wrapper}
        ddp.register_comm_hook(handle, forms[form])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()
    assert handle.residual("layer1.weight").any()
    assert_replicas_equal(model)
    handle.detach()
    del ddp
    gc.collect()
    return digest(model.parameters())


def test_every_form_of_the_hook_trains_the_same(worlds: Any) -> None:
    """A plain function with real types, which is what DDP's checks look at; all forms train the same."""
    hook = sparsync.comm_hook(Chain(SIZES))[1]
    assert inspect.isfunction(hook)
    assert hook.__annotations__["bucket"] is dist.GradBucket
    assert hook.__annotations__["return"] == torch.futures.Future[Tensor]
    results = {form: worlds[2].run(case_form, form=form) for form in ("attach", "pair", "lambda", "wrapper")}
    assert len({result for ranks in results.values() for result in ranks}) == 1, results


def case_subgroups(rank: int, size: int) -> list[float]:
    """Two models on two pairs of ranks, through the raw hook; every gradient is its rank."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    model = torch.nn.Linear(40, 40, bias=False)
    ddp = DistributedDataParallel(model, process_group=group)
    state, hook = sparsync.comm_hook(model, sparsync.TopK(1.0), process_group=group, dense_below=0)
    ddp.register_comm_hook(state, hook)
    for _ in range(2):
        ddp.zero_grad()
        (ddp(torch.eye(40)).sum() * rank).backward()
    answer = model.weight.grad.unique().tolist()
    state.detach()
    ddp.zero_grad()
    (ddp(torch.eye(40)).sum() * rank).backward()  # detached: dense, over the same ranks
    answer += model.weight.grad.unique().tolist()
    del ddp
    gc.collect()
    return answer


def test_the_raw_hook_keeps_to_its_process_group() -> None:
    outcomes = World.once(4, case_subgroups)
    assert outcomes == [(True, [0.5, 0.5])] * 2 + [(True, [2.5, 2.5])] * 2


def case_copies(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(mlp())
    handle = sparsync.attach(ddp, "topk", density=0.02)
    batches = inputs(rank, 8, 40)
    train(ddp, handle, batches)
    for duplicate in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        twin = duplicate(ddp)
        assert handle.is_attached()
        steps = handle.stats().total.steps
        square(twin(batches[0])).backward()  # dense: the copy has no hook
        assert handle.stats().total.steps == steps
        theirs = sparsync.attach(twin, "topk", density=0.02)
        assert theirs.is_attached()
        train(twin, theirs, batches)
        theirs.detach()
        assert not theirs.is_attached()
        del twin
        gc.collect()
    twin = copy.deepcopy(ddp)
    handle.detach()
    assert not handle.is_attached()
    square(twin(batches[0])).backward()  # a copy outlives what it was copied from
    del ddp, twin
    gc.collect()


def test_copies_of_a_model_are_not_attached(worlds):
    worlds[2].run(case_copies)


def case_reuse(rank: int, size: int) -> str:
    model, other = mlp(), mlp()
    first, second = DistributedDataParallel(model), DistributedDataParallel(other)
    handle, hook = sparsync.comm_hook(model, "topk", density=0.02)
    first.register_comm_hook(handle, hook)
    second.register_comm_hook(handle, hook)
    batch = inputs(rank, 8, 40)[0]
    square(first(batch)).backward()
    _, refused = error_of(square(second(batch)).backward)
    assert error_of(handle.check)[1] in refused
    first.zero_grad()
    square(first(batch)).backward()  # the model it belongs to goes on
    handle.check()
    assert_same_on_all_ranks([p.grad for p in first.parameters()])
    handle.detach()
    del first, second
    gc.collect()
    return refused


def test_one_state_for_two_models_is_refused():
    for finished, answer in World.once(2, case_reuse):
        assert finished, answer
        assert "belongs to another model" in answer
