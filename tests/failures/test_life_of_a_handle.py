"""A handle ends when it is detached, wherever that is, and when nobody has it any more; what it cannot exchange is
refused."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.distributed.distributed_c10d import _world
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import sparsync
from tests.failures.ddp_training import SIZES, SMALL_BUCKETS, Chain, assert_replicas_equal, logged, loss_of, training
from tests.failures.reducers import error_of
from tests.world import World

ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD


def attached(kind: Any = ADAMW, **options: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer, Any]:
    """Return a model, its optimizer and its handle."""
    ddp = DistributedDataParallel(Chain(SIZES))
    optimizer = kind(ddp.parameters(), lr=0.01)
    return ddp, optimizer, sparsync.attach(ddp, optimizer=optimizer, **options)


def train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, rank: int, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()


def velocity(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return torch.cat([state["exp_avg"].flatten() for state in optimizer.state.values()])


# ---- detach ---------------------------------------------------------------------------------------------------------


def case_detach_in_backward(rank: int, size: int, elsewhere: bool) -> str:
    """Detach when the first buckets were sent and the last has not come; ``elsewhere``: on another thread."""
    options = {"scope": "global", "momentum": "keep", "deadline": 20}
    with training(Chain(SIZES), "topk", SMALL_BUCKETS, check=False, **options) as run:
        run.step(lambda m: loss_of(m, rank, 0))

        def stop(_: Any) -> None:
            if elsewhere:
                thread = threading.Thread(target=run.handle.detach)
                thread.start()
                thread.join()
            else:
                run.handle.detach()

        run.model.get_parameter("layer0.weight").register_hook(stop)
        return error_of(run.step, lambda m: loss_of(m, rank, 1))[1]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
def test_nobody_waits_for_ever_when_a_model_is_detached_in_backward(elsewhere: bool) -> None:
    """It is refused; where nobody can tell that backward runs, backward raises."""
    said = "the model was detached while backward ran" if elsewhere else "a step is under way: call this after backward"
    for finished, text in World.once(2, case_detach_in_backward, timeout=30.0, elsewhere=elsewhere):
        assert finished, text
        assert said in text


def case_detach_under_an_exception(rank: int, size: int) -> tuple[float, list[str], bool]:
    """One rank fails after a step, and detaches in ``finally``, where the others do not come to."""
    ddp, optimizer, sync = attached(deadline=8)
    train(ddp, optimizer, rank)
    began = time.monotonic()
    with logged() as messages:
        try:
            if rank == 0:
                raise ZeroDivisionError
        except ZeroDivisionError:
            sync.detach()
        else:
            dist.barrier()
            sync.abandon()
    if rank == 0:
        dist.barrier()
    return time.monotonic() - began, messages, bool(velocity(optimizer).any())


def test_detach_waits_for_nobody_while_an_exception_is_under_way(worlds: Any) -> None:
    for rank, (seconds, messages, handed_back) in enumerate(worlds[2].run(case_detach_under_an_exception)):
        assert seconds < 4
        assert [text for text in messages if text.startswith("ZeroDivisionError is under way")] == messages
        assert len(messages) == (rank == 0)
        assert handed_back


def case_detach_while_all_is_well(rank: int, size: int, how: str) -> list[float]:
    """Train where an exception is handled all the while; or detach when a generator is closed."""

    def losses() -> Iterator[None]:
        try:
            train(ddp, optimizer, rank)
            yield
        finally:
            sync.detach()

    if how == "generator":
        ddp, optimizer, sync = attached()
        for _ in losses():
            break
    else:
        try:
            raise ImportError
        except ImportError:
            ddp, optimizer, sync = attached()
            train(ddp, optimizer, rank)
            sync.detach()
    gc.collect()
    return velocity(optimizer).tolist()


@pytest.mark.parametrize("how", ["generator", "handled"])
def test_detach_hands_back_means_where_no_exception_is_under_way(worlds: Any, how: str) -> None:
    one, other = worlds[2].run(case_detach_while_all_is_well, how=how)
    assert one == other


# ---- nobody detaches ------------------------------------------------------------------------------------------------


def case_forgotten(rank: int, size: int, kind: Any) -> tuple[list[bool], int, list[str]]:
    """Drop a model that nobody has detached; return what is left of it, of process groups and of threads."""
    before, known = len(_world.pg_map), set(threading.enumerate())
    ddp, optimizer, sync = attached(kind)
    train(ddp, optimizer, rank)
    left = [weakref.ref(one) for one in (ddp, ddp.module, optimizer, sync)]
    del ddp, optimizer, sync
    until, threads = time.monotonic() + 10, set[threading.Thread]()
    while time.monotonic() < until:  # the last step's thread may be about to end
        gc.collect()
        threads = set(threading.enumerate()) - known
        if not threads and not any(one() for one in left):
            break
        time.sleep(0.05)
    return [one() is not None for one in left], len(_world.pg_map) - before, [thread.name for thread in threads]


@pytest.mark.parametrize("kind", [ADAMW, SGD])
def test_a_model_that_nobody_detached_is_freed_with_its_threads_and_its_group(worlds: Any, kind: Any) -> None:
    for alive, groups, threads in worlds[2].run(case_forgotten, kind=kind):
        assert alive == [False] * 4
        assert groups == 0
        assert threads == []


def case_failed_and_forgotten(rank: int, size: int, where: str) -> list[bool]:
    """Drop a model whose step has failed, on the last rank first, and whose error was seen; return what is left."""
    ddp, optimizer, sync = attached(SGD)
    train(ddp, optimizer, rank)
    with patch(where, side_effect=RuntimeError("no luck")) if rank == size - 1 else nullcontext():
        error_of(train, ddp, optimizer, rank)
        assert "no luck" in error_of(sync.check)[1]
    dist.barrier()  # nobody else sees a connection closed
    left = [weakref.ref(one) for one in (ddp, ddp.module, optimizer, sync)]
    del ddp, optimizer, sync
    until = time.monotonic() + 10
    while any(one() for one in left) and time.monotonic() < until:  # its threads may be about to end
        gc.collect()
        time.sleep(0.05)
    return [one() is not None for one in left]


@pytest.mark.parametrize("where", ["worker.WorkerState.begin_step", "completion.finish_unit"], ids=["hook", "thread"])
def test_a_model_whose_step_failed_is_freed(where: str) -> None:
    assert World.once(2, case_failed_and_forgotten, where=f"sparsync.engine.{where}") == [(True, [False] * 4)] * 2


# ---- what cannot be exchanged ---------------------------------------------------------------------------------------


def case_other_parameters(rank: int, size: int) -> dict[str, tuple[str, str]]:
    """Freeze and unfreeze a parameter after the model was wrapped: before ``attach``, and after it."""
    found = {}

    def wrapped(frozen: bool, **options: Any) -> tuple[DistributedDataParallel, nn.Parameter]:
        model = Chain(SIZES)
        weight = model.get_parameter("layer0.weight").requires_grad_(not frozen)
        return DistributedDataParallel(model, **options), weight

    ddp, weight = wrapped(frozen=True)
    sync = sparsync.attach(ddp, "topk", momentum="keep")
    weight.requires_grad_(True)
    with torch.no_grad():
        ddp(torch.randn(4, SIZES[0]))
    found["unfrozen later"] = error_of(loss_of, ddp, rank, 0)
    sync.detach()
    found["unfrozen"] = error_of(sparsync.attach, ddp, "topk")
    ddp, weight = wrapped(frozen=False, find_unused_parameters=True)
    weight.requires_grad_(False)
    found["frozen"] = error_of(sparsync.attach, ddp, "topk")
    ddp, weight = wrapped(frozen=True)
    weight.requires_grad_(True)
    found["hook"] = backward_of(ddp, rank)
    return found


def backward_of(
    ddp: DistributedDataParallel, rank: int, wrapper: Callable[[Any], Any] = lambda hook: hook, model: Any = None
) -> tuple[str, str]:
    """Register a hook by hand; return what ``check()`` raises after a backward pass that has failed."""
    state, hook = sparsync.comm_hook(model or ddp.module, "topk", momentum="keep", scope="global", deadline=20)
    ddp.register_comm_hook(state, wrapper(hook))
    assert error_of(loss_of(ddp, rank, 0).backward)[0] != "none"
    try:
        return error_of(state.check)
    finally:
        state.detach()


def test_parameters_that_changed_after_the_model_was_wrapped_are_refused(worlds: Any) -> None:
    for found in worlds[2].run(case_other_parameters):
        for when, kind in (("unfrozen later", "SparsyncError"), ("unfrozen", "ValueError"), ("hook", "SparsyncError")):
            assert found[when][0] == kind
            assert "'layer0.weight' is trained, and DDP does not exchange it" in found[when][1]
        kind, text = found["frozen"]
        assert kind == "ValueError"
        assert text.startswith("'layer0.weight' is frozen, and was trained when the model was wrapped")


def case_failed_before_the_reducer(rank: int, size: int) -> dict[str, tuple[str, str]]:
    """A hook that is wrapped, one of another model, and one that does not know what the last bucket brings."""
    found = {"cast": backward_of(DistributedDataParallel(Chain(SIZES)), rank, fp16_compress_wrapper)}
    found["other"] = backward_of(DistributedDataParallel(Chain(SIZES)), rank, model=Chain(SIZES))
    model = Chain(SIZES)
    ddp, weight = DistributedDataParallel(model, **SMALL_BUCKETS), model.get_parameter("layer0.weight")
    weight.requires_grad_(False)
    found["last bucket"] = backward_of(ddp, rank, lambda hook: weight.requires_grad_(True) is weight and hook)
    return found


def test_check_raises_what_failed_before_the_reducer_and_nobody_waits() -> None:
    for finished, found in World.once(2, case_failed_before_the_reducer, timeout=30.0):
        assert finished, found
        assert found["cast"][1].startswith("gradients of torch.float32 come as torch.float16")
        for which in ("other", "last bucket"):
            assert found[which][1].endswith("this hook state belongs to another model; make one for each model")


def case_step_in_backward(rank: int, size: int) -> tuple[str, str]:
    model = Chain(SIZES)
    _apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.1})
    return error_of(sparsync.attach, DistributedDataParallel(model))


def test_optimizers_that_step_inside_backward_are_refused(worlds: Any) -> None:
    for kind, text in worlds[2].run(case_step_in_backward):
        assert kind == "SparsyncError"
        assert "_apply_optimizer_in_backward" in text


# ---- inference mode -------------------------------------------------------------------------------------------------


def case_inference(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(Chain(SIZES))
    optimizer = ADAMW(ddp.parameters(), lr=0.01)
    with torch.inference_mode():
        sync = sparsync.attach(ddp, optimizer=optimizer)
    train(ddp, optimizer, rank)
    with torch.inference_mode():
        sync.load_state_dict(sync.state_dict())
    train(ddp, optimizer, rank)
    with torch.inference_mode():
        sync.detach()
    train(ddp, optimizer, rank)
    assert_replicas_equal(ddp.module)


def test_a_model_may_be_attached_and_detached_in_inference_mode(worlds: Any) -> None:
    worlds[2].run(case_inference)
