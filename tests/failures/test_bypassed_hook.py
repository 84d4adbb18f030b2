"""A wrapper that gives the hook no buckets is refused, or noticed at once: nothing trains dense in silence."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import sparsync
from tests.failures.ddp_training import SIZES, Chain, digest, gathered, logged, loss_of, training
from tests.failures.reducers import error_of
from tests.world import World

NO_BUCKET = "DDP gave no bucket to the hook"


def case_python_reducer(rank: int, size: int, compiled: bool) -> dict[str, Any]:
    """Wrap a model for the Python reducer; attach to it, and register the hook by hand."""
    found: dict[str, Any] = {}
    torch._dynamo.config.optimize_ddp = "python_reducer"
    ddp = DistributedDataParallel(Chain(SIZES))
    found["attach"] = error_of(sparsync.attach, ddp, "topk", density=0.05)
    state, hook = sparsync.comm_hook(ddp.module, "topk", density=0.05)
    ddp.register_comm_hook(state, hook)
    model = torch.compile(ddp, backend="aot_eager") if compiled else ddp
    x = torch.randn(4, SIZES[0], generator=torch.Generator().manual_seed(rank))
    found["backward"] = error_of(lambda: model(x).square().sum().backward())
    state.detach()
    return found


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_the_python_reducer_of_a_compiled_model_is_refused(compiled: bool) -> None:
    """Its hooks are given gradients one by one, and what they return is ignored: every rank would train alone."""
    for finished, found in World.once(2, case_python_reducer, compiled=compiled):
        assert finished, found
        kind, text = found["attach"]
        assert kind == "ValueError"
        assert "python_reducer" in text
        assert "ddp_optimizer" in text  # what to do
        kind, text = found["backward"]
        assert kind != "none"
        assert "python_reducer" in text


def case_other_reducers(rank: int, size: int, mode: str, late: bool) -> dict[str, Any]:
    """Compile a model with DDP's own reducer; ``late``: the option is set when it is wrapped already."""
    if not late:
        torch._dynamo.config.optimize_ddp = mode
    model = Chain(SIZES)
    with logged() as messages, training(model, "topk", density=0.05, momentum="keep") as run:
        torch._dynamo.config.optimize_ddp = mode
        compiled = torch.compile(run.ddp, backend="aot_eager")
        for step in range(3):
            run.optimizer.zero_grad()
            x = torch.randn(4, SIZES[0], generator=torch.Generator().manual_seed(10 * step + rank))
            compiled(x).square().sum().backward()
            run.optimizer.step()
        share = (model.layer1.weight.grad != 0).float().mean().item()
        steps = run.handle._running().step
    return {"share": share, "steps": steps, "messages": messages}


@pytest.mark.parametrize(
    ("mode", "late"),
    [
        ("python_reducer", True),
        pytest.param("python_reducer_without_compiled_forward", False, marks=pytest.mark.slow),
    ],
    ids=["late", "off"],
)
def test_other_modes_of_a_compiled_model_stay_sparse(mode: str, late: bool) -> None:
    """What counts is how the model was wrapped."""
    for finished, found in World.once(2, case_other_reducers, mode=mode, late=late):
        assert finished, found
        assert found["share"] < 0.2
        assert found["steps"] == 3
        assert found["messages"] == []


def case_lost_hook(rank: int, size: int, known: bool, after: int) -> list[int]:
    """Train ``after`` steps, let DDP make its reducer anew, which has no hook then, and train on; return how often that
    was said after each step."""
    model = Chain(SIZES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp, said = DistributedDataParallel(model), []
    handle = sparsync.attach(ddp, "topk", density=0.05, momentum="keep", optimizer=optimizer if known else None)
    with logged() as messages:
        for step in range(after + 3):
            if step == after:
                ddp.__setstate__(ddp.__getstate__())
            optimizer.zero_grad()
            loss_of(ddp, rank, step).backward()
            optimizer.step()
            said.append(sum(NO_BUCKET in message for message in messages))
    assert handle._running().step == after
    handle.detach()
    del ddp
    gc.collect()
    return said


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("known", [True, False], ids=["optimizer", "forward"])
def test_a_step_without_any_bucket_is_noticed_on_every_rank(worlds: Any, known: bool, after: int, size: int) -> None:
    """At the optimizer's next step if it is known, otherwise before the next forward pass; once."""
    expected = after * [0] + ([1, 1, 1] if known else [0, 1, 1])
    assert worlds[size].run(case_lost_hook, known=known, after=after) == size * [expected]


def case_no_alarm(rank: int, size: int) -> list[str]:
    """Do all that brings no bucket, and need not: before the first bucket, and after it."""
    model = Chain(SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with logged() as messages, training(model, "topk", density=0.05, momentum="keep", optimizer=optimizer) as run:
        for start in (0, 10):
            loss_of(run.ddp, rank, start)  # a forward pass that nobody follows up
            for p in model.parameters():  # as distributed checkpoints make state
                p.grad = torch.zeros_like(p)
            optimizer.step()
            optimizer.zero_grad()
            x = torch.randn(4, SIZES[0], requires_grad=True)
            torch.autograd.grad(run.ddp(x).sum(), x)  # a penalty on a gradient, of which no parameter gets any
            with torch.no_grad():
                run.ddp(x)
            optimizer.step()
            with run.ddp.no_sync():
                for step in range(3):
                    loss_of(run.ddp, rank, start + step).backward()
                    run.ddp(x)
            loss_of(run.ddp, rank, start + 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert run.handle._running().step >= 2
    # DDP exchanges the first backward under no_sync after a forward pass that nobody followed up, which is told of.
    return [message for message in messages if NO_BUCKET in message]


def case_frozen(rank: int, size: int) -> list[str]:
    """Train a model of which one layer alone is not frozen, and not always used."""
    model = Chain(SIZES)
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("layer1"))
    with logged() as messages, training(model, "topk", {"find_unused_parameters": True}, density=0.05) as run:
        loss_of(run.ddp, rank, 0)
        run.step(lambda m: loss_of(m, rank, 1))
        run.step(lambda m: loss_of(m, rank, 2))
        same = gathered(torch.tensor([run.handle._running().step]))
    assert [int(steps) for steps in same] == size * [2]
    return [message for message in messages if NO_BUCKET in message]


@pytest.mark.parametrize("size", [2, 3])
def test_steps_that_need_no_bucket_raise_no_alarm(worlds: Any, size: int) -> None:
    for case in (case_no_alarm, case_frozen):
        assert worlds[size].run(case) == size * [[]]


def case_static_graph(rank: int, size: int) -> tuple[list[str], str]:
    model = Chain(SIZES)
    with logged() as messages, training(model, "topk", {"static_graph": True}, density=0.05, momentum="keep") as run:
        for step in range(3):
            run.step(lambda m, step=step: loss_of(m, rank, step))
    return messages, digest(model.parameters())


def test_a_static_graph_raises_no_alarm(worlds: Any) -> None:
    """Its first step brings all buckets after backward."""
    for messages, _ in worlds[2].run(case_static_graph):
        assert messages == []
