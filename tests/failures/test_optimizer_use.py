"""An optimizer that applies what was exchanged, used as if it were not: steps beside the exchange, copies, detach()."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sparsync
from tests.failures.ddp_training import logged
from tests.test_preconditioned import SOME, Zoo, adam, attached, loss_of, train, weights
from tests.world import World


def by_the_bare_model(ddp: Any, rank: int, step: int) -> None:
    loss_of(ddp.module, rank, step).backward()


def by_a_functional_call(ddp: Any, rank: int, step: int) -> None:
    class Called(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.func.functional_call(ddp.module, dict(ddp.module.named_parameters()), (x,))

    loss_of(Called(), rank, step).backward()


def under_no_sync(ddp: Any, rank: int, step: int) -> None:
    with ddp.no_sync():
        loss_of(ddp, rank, step).backward()


def by_hand(ddp: Any, rank: int, step: int) -> None:
    own = list(ddp.module.parameters())
    for parameter, grad in zip(own, torch.autograd.grad(loss_of(ddp, rank, step), own), strict=True):
        parameter.grad = grad


BESIDE: dict[str, Callable[[Any, int, int], None]] = {
    made.__name__: made for made in (by_the_bare_model, by_a_functional_call, under_no_sync, by_hand)
}


def case_beside(rank: int, size: int, made: str, after: int, options: dict[str, Any]) -> None:
    """Make ``after`` steps, and one beside the exchange, which is refused; then go on as nothing had been."""
    model = Zoo()
    optimizer = adam(model)
    with attached(model, optimizer, **options) as (ddp, _):
        train(model, ddp, optimizer, rank, range(after), schedule=False)
        optimizer.zero_grad()
        before = weights(model)
        BESIDE[made](ddp, rank, after)
        grads = [p.grad for p in model.parameters()]
        with pytest.raises(sparsync.SparsyncError, match=r"its gradients were not exchanged: .*not ddp\.module\(x\)"):
            optimizer.step()
        assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
        assert torch.equal(weights(model), before)
        optimizer.zero_grad()
        train(model, ddp, optimizer, rank, range(after, after + 2), schedule=False)
        assert not torch.equal(weights(model), before)


@pytest.mark.parametrize("made", BESIDE)
def test_a_step_on_gradients_that_were_not_exchanged_is_refused(worlds: dict[int, World], made: str) -> None:
    worlds[2].run(case_beside, made=made, after=2, options=SOME)


def test_it_is_refused_before_the_first_exchange_and_with_auto(worlds: dict[int, World]) -> None:
    worlds[3].run(case_beside, made="by_the_bare_model", after=0, options={"recipe": "auto"})


def case_legitimate(rank: int, size: int) -> None:
    """Steps that need no exchange pass: without gradients, on zeros, and after a rollback; so does accumulation."""
    model = Zoo()
    optimizer = adam(model)
    with attached(model, optimizer, transactional=True, **SOME) as (ddp, handle):
        before = weights(model)
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        loss_of(ddp, rank, 0).backward()
        handle.rollback()
        optimizer.step()
        assert torch.equal(weights(model), before)
        optimizer.zero_grad()
        under_no_sync(ddp, rank, 1)
        loss_of(ddp, rank, 2).backward()
        optimizer.step()
        assert not torch.equal(weights(model), before)


def test_steps_that_need_no_exchange_pass(worlds: dict[int, World]) -> None:
    worlds[2].run(case_legitimate)


def case_detached(rank: int, size: int, zeroed: bool) -> list[str]:
    """Detach between backward and step; the step that follows changes nothing, and dense training goes on."""
    model = Zoo()
    optimizer = adam(model)
    with attached(model, optimizer, **SOME) as (ddp, handle), logged() as told:
        train(model, ddp, optimizer, rank, range(3), schedule=False)
        optimizer.zero_grad()
        loss_of(ddp, rank, 3).backward()
        if zeroed:
            optimizer.zero_grad()
        handle.detach()
        before = weights(model)
        optimizer.step()
        assert torch.equal(weights(model), before)
        train(model, ddp, optimizer, rank, range(4, 6), schedule=False)
    return told


def test_an_update_that_waits_at_detach_is_dropped_and_told(worlds: dict[int, World]) -> None:
    (told,), nothing = worlds[2].run(case_detached, zeroed=False)
    assert "detach() comes between backward and optimizer.step()" in told
    assert nothing == []
    assert worlds[2].run(case_detached, zeroed=True) == [[], []]


def case_copied(rank: int, size: int) -> None:
    """Copies and pickles of an attached optimizer have its state; the handle's are refused."""
    model = Zoo()
    optimizer = adam(model)
    with attached(model, optimizer, **SOME) as (ddp, handle):
        train(model, ddp, optimizer, rank, range(3), schedule=False)
        file = io.BytesIO()
        torch.save(optimizer, file)
        file.seek(0)
        expected = optimizer.state_dict()
        for other in (copy.deepcopy(optimizer), torch.load(file, weights_only=False)):
            found = other.state_dict()
            assert found["param_groups"] == expected["param_groups"]
            assert len(found["state"]) == len(expected["state"]) > 5
            for number, state in expected["state"].items():
                assert all(torch.equal(found["state"][number][key], kept) for key, kept in state.items())
            (first, *_), (own, *_) = other.param_groups[0]["params"], optimizer.param_groups[0]["params"]
            first.grad = torch.ones_like(first)
            other.step()  # by torch's own rule, on parameters of its own
            assert not torch.equal(first, own)
        for refused in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(TypeError, match=r"neither copied nor pickled: save its state_dict\(\)"):
                refused(handle)
        train(model, ddp, optimizer, rank, range(3, 5), schedule=False)
    assert len(copy.deepcopy(optimizer).state) == len(expected["state"])
    dist.barrier()


def test_copies_of_an_optimizer_have_its_state_and_a_handle_has_none(worlds: dict[int, World]) -> None:
    worlds[2].run(case_copied)
