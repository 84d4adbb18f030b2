"""What goes wrong on one rank ends the step on all of them, with the same error."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import Constant, PeerFailed, SparsyncError, StepFailed, TopK
from sparsync.engine.bucketing import Bucket
from tests.failures.ddp_training import (
    ALL_SPARSE,
    SIZES,
    SMALL_BUCKETS,
    Chain,
    assert_replicas_equal,
    digest,
    loss_of,
    training,
)
from tests.failures.reducers import error_of, make_reducer, push_all
from tests.models import loss_of as simple_loss
from tests.models import net
from tests.world import World


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("tripped")


def case_half_a_backward(rank: int, size: int) -> tuple[str, float]:
    model = Chain(SIZES)
    with training(model, TopK(0.05), SMALL_BUCKETS, check=False, deadline=60, **ALL_SPARSE) as run:
        for step in range(2):
            run.step(lambda m, step=step: loss_of(m, rank, step))
        assert len(run.buckets()) > 2
        assert_replicas_equal(model)
        if rank == 1:  # layers 3 and 2 have sent their gradients when backward breaks off
            model.get_submodule("layer1").register_forward_hook(lambda module, x, y: FailingBackward.apply(y))
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            loss_of(run.ddp, rank, 2).backward()
        if rank == 1:
            with pytest.raises(StepFailed) as caught:
                loss_of(run.ddp, rank, 3)
        else:
            with pytest.raises(SparsyncError) as caught:
                run.handle.check()
        return str(caught.value), time.monotonic() - start


def test_a_backward_that_breaks_off_on_one_rank_ends_all() -> None:
    outcomes = World.once(3, case_half_a_backward)
    assert all(ok for ok, _ in outcomes), outcomes
    (peer, _), (own, _), (other, _) = (result for _, result in outcomes)
    assert "the last backward did not finish" in own
    assert peer == other == f"rank 1: {own}"
    assert max(seconds for _, (_, seconds) in outcomes) < 40  # the deadline is 60


def case_begins_again(rank: int, size: int) -> tuple[str, tuple[str, str]]:
    """Rank 1 begins a step though the one before has not ended: a bucket of that never came."""
    gradients = {"a": torch.arange(100.0), "b": torch.arange(100.0)}
    reducer = make_reducer({name: gradient.view(-1, 1) for name, gradient in gradients.items()}, deadline=60.0)
    push_all(reducer, list(gradients.items()))
    reducer.push(Bucket(0, gradients["a"].clone(), ("a",), last=False))
    if rank == 1:
        again = reducer.push(Bucket(0, gradients["a"].clone(), ("a",), last=False))
    else:
        again = reducer.push(Bucket(1, gradients["b"].clone(), ("b",), last=True))
    raised = error_of(again.wait)[1].splitlines()[0]
    answer = error_of(reducer.check)
    reducer.close()
    return raised, answer


def test_a_step_that_begins_in_the_middle_of_another_is_refused() -> None:
    outcomes = World.once(2, case_begins_again)
    assert all(ok for ok, _ in outcomes), outcomes
    for _, (raised, (kind, text)) in outcomes:
        assert kind == "StepFailed"
        assert text.startswith("rank 1: the last backward did not finish")
        assert "the last backward did not finish" in raised


@dataclass(frozen=True)
class FailsOnB(TopK):
    """Fails on rank 1 in step 2, in the unit of parameter b."""

    def compress(self, grad: Any, memory: Any, layout: Any, ctx: Any, state: Any) -> Any:
        if (ctx.rank, ctx.step) == (1, 2) and layout.spans[0].name == "b":
            raise ValueError("out of luck")
        return super().compress(grad, memory, layout, ctx, state)


def case_comes_home(rank: int, size: int) -> tuple[str, str]:
    """Of buckets a, b and c the exchange of b fails: a has been exchanged by then, and c waits to be sent."""
    data = torch.Generator().manual_seed(rank)
    parameters = {name: torch.zeros(200, 1) for name in "abc"}

    def gradient() -> Tensor:  # whole numbers: sums are exact in any order
        return torch.randint(-9, 10, (200,), generator=data).float()

    reducer = make_reducer(parameters, FailsOnB(), density=Constant(0.1))
    for _ in range(2):
        push_all(reducer, [(name, gradient()) for name in parameters])
    before = reducer.state_dict()["residuals"]
    came, gate = {name: gradient() for name in parameters}, threading.Event()
    reducer.path.submit([partial(gate.wait, 60)])  # type: ignore[list-item]  # all buckets are there before the first is sent
    futures = [reducer.push(Bucket(i, came[n].clone(), (n,), n == "c")) for i, n in enumerate(parameters)]
    gate.set()
    for future in futures:
        error_of(future.wait)
    answer, after = error_of(reducer.check), reducer.state_dict()["residuals"]
    for name in parameters:
        added = 0 if (rank, name) == (1, "b") else came[name].view(-1, 1)  # which that rank failed to add
        assert torch.equal(after[name], before[name] + added), name
    reducer.close()
    return answer


def test_what_was_sent_comes_home_after_a_failed_exchange(worlds: Any) -> None:
    """Nothing of a failed step is applied, so all of it is kept: what was exchanged, and what was never sent."""
    answers = worlds[3].run(case_comes_home)
    assert answers == [("PeerFailed", "rank 1: failed to compress bucket 1: ValueError: out of luck")] * 3


@dataclass(frozen=True)
class FailsOnRank1(TopK):
    """Fails on rank 1 in step 2."""

    def compress(self, grad: Any, memory: Any, layout: Any, ctx: Any, state: Any) -> Any:
        if (ctx.rank, ctx.step) == (1, 2):
            raise ValueError("out of luck")
        return super().compress(grad, memory, layout, ctx, state)


def case_failing_compressor(rank: int, size: int) -> dict[str, Any]:
    model, said = Chain(SIZES), {}
    with training(model, FailsOnRank1(0.05), SMALL_BUCKETS, check=False, **ALL_SPARSE) as run:
        for step in range(2):
            run.step(lambda m, step=step: loss_of(m, rank, step))
        before = digest(model.parameters())
        start = time.monotonic()
        with pytest.raises(RuntimeError) as raised:
            run.step(lambda m: loss_of(m, rank, 2))
        said["seconds"] = time.monotonic() - start
        said["backward"] = str(raised.value)
        for _ in range(2):  # the error stays
            with pytest.raises(PeerFailed) as failed:
                run.handle.check()
        said["check"] = str(failed.value)
        with pytest.raises(StepFailed) as again:
            run.ddp(torch.zeros(1, SIZES[0]))
        said["again"] = str(again.value)
        assert digest(model.parameters()) == before
    del raised, failed, again  # their tracebacks hold the old model
    gc.collect()
    with training(model, TopK(0.05), **ALL_SPARSE) as run:  # built anew, it trains on
        for step in range(2):
            run.step(lambda m, step=step: loss_of(m, rank, step))
    assert digest(model.parameters()) != before
    return said


@pytest.fixture(scope="module")
def failure(worlds: Any) -> list[dict[str, Any]]:
    """What every rank said when compression failed on rank 1 of 3, and when the model was used again."""
    return worlds[3].run(case_failing_compressor)


CAUSE = "rank 1: failed to compress bucket 0: ValueError: out of luck"


def test_one_rank_fails_to_compress_and_all_raise_the_same(failure: list[dict[str, Any]]) -> None:
    assert [said["check"] for said in failure] == [CAUSE] * 3
    assert max(said["seconds"] for said in failure) < 40


def test_backward_raises_and_check_gives_the_clean_error(failure: list[dict[str, Any]]) -> None:
    for said in failure:
        assert CAUSE in said["backward"]
        assert said["check"] == CAUSE


def test_a_model_used_again_after_a_failed_step_says_to_build_it_anew(failure: list[dict[str, Any]]) -> None:
    for said in failure:
        assert "build the model anew" in said["again"]
        assert said["again"].endswith(CAUSE)


def case_no_memory(rank: int, size: int) -> tuple[str, str]:
    """The first residual cannot be allocated on one rank."""
    ddp = DistributedDataParallel(net())
    handle = sparsync.attach(ddp, "topk", density=0.05, deadline=10)
    if rank == 1:
        handle._running().worker.feedback.memory = lambda *_: (_ for _ in ()).throw(MemoryError("no room"))  # type: ignore
    with contextlib.suppress(RuntimeError):
        simple_loss(ddp, rank, 0).backward()
    try:
        handle.check()
        return "", ""
    except sparsync.SparsyncError as error:
        return type(error).__name__, str(error)
    finally:
        handle.detach()
        del ddp
        gc.collect()


def test_out_of_memory_on_one_rank_ends_all() -> None:
    outcomes = World.once(2, case_no_memory)
    assert all(ok for ok, _ in outcomes), outcomes
    assert outcomes[0] == outcomes[1]
    kind, text = outcomes[0][1]
    assert kind == "PeerFailed"
    assert text.startswith("rank 1: failed to compress")
    assert "no room" in text


def case_communication_thread_fails(rank: int, size: int, where: str) -> tuple[str, str, float]:
    """Messages arrive on all ranks; on rank 1 they cannot be read, or there is no memory for their sum."""
    model = Chain(SIZES)
    options: dict[str, Any] = ALL_SPARSE
    if where == "sum of sketches":
        options = {"optimizer": torch.optim.AdamW(model.parameters(), 1e-3), "precondition": True}
    ddp = DistributedDataParallel(model, **SMALL_BUCKETS)
    handle = sparsync.attach(ddp, TopK(0.05), deadline=60, **options)
    for step in range(2):
        loss_of(ddp, rank, step).backward()
    if rank == 1:
        fails = mock.Mock(side_effect=MemoryError("no room"))
        if where == "reading":
            fails = mock.Mock(side_effect=ValueError("torn"))
            mock.patch("sparsync.wire.Wire.decode", fails).start()
        else:
            handle._running().completion.finish = fails  # type: ignore
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        loss_of(ddp, rank, 2).backward()
    with pytest.raises(SparsyncError) as caught:
        handle.check()
    seconds = time.monotonic() - start
    kind, text = type(caught.value).__name__, str(caught.value)
    torch.distributed.barrier()  # no rank learns anything from a connection that another one closes
    handle.detach()
    del ddp, caught
    gc.collect()
    return kind, text, seconds


@pytest.mark.parametrize(
    ("where", "cause"),
    [
        ("reading", "rank 1: bucket 0: ValueError: torn"),
        ("sum", "rank 1: bucket 0: MemoryError: no room"),
        ("sum of sketches", "rank 1: sketch 0: MemoryError: no room"),
    ],
)
def test_a_communication_thread_that_fails_ends_all_at_once(where: str, cause: str) -> None:
    outcomes = World.once(3, case_communication_thread_fails, timeout=90, where=where)
    assert all(ok for ok, _ in outcomes), outcomes
    assert [(kind, text) for _, (kind, text, _) in outcomes] == [("SparsyncError", cause)] * 3
    assert max(seconds for _, (_, _, seconds) in outcomes) < 15  # the deadline is 60
