"""Preconditioned feedback with SGD: rows and columns are evened out, and a tensor's update has the size of SGD's."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.feedback.optimizer_rules import SgdRules
from sparsync.feedback.second_moment import Preconditioning, SecondMoment
from sparsync.kernels.memory import Update
from sparsync.kernels.precondition.reference import precondition
from sparsync.kernels.sketch.reference import sketch
from sparsync.layout import Parameter
from sparsync.simulate import VirtualWorkers
from tests.test_preconditioned import (
    EXACT,
    SOME,
    Zoo,
    assert_virtual,
    attached,
    batch,
    case_closure,
    case_law,
    case_loop,
    case_non_finite,
    case_real,
    case_resumed,
    case_scaled,
    dense,
    loss_of,
    sgd,
    train,
    weights,
)
from tests.world import World

ON = {"precondition": True, **SOME}


# ---- the oracle: where the second moment has nothing to even out ----------------------------------------------------


class Signs(nn.Module):
    """A loss whose mean gradient is of the same magnitude in all entries of a matrix, with signs of every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrices = nn.ParameterList(torch.randn(rows, 40) for rows in (30, 50))
        self.bias = nn.Parameter(torch.randn(40))

    def forward(self, rank: int, step: int) -> Tensor:
        rng = torch.Generator().manual_seed(step)
        signs = [torch.randn(m.shape, generator=rng).sign() for m in self.matrices]
        sizes = (1.0 + rank + step % 3) * torch.tensor([1.0, 0.01])
        loss = sum(size * (s * m).sum() for size, s, m in zip(sizes, signs, self.matrices, strict=True))
        return loss + (self.bias * torch.randn(40, generator=rng) * (rank + 1)).sum() + self.bias.square().sum()


def plain_sgd(model: Signs, decay: float = 0.1, **options: Any) -> torch.optim.SGD:
    """Weight decay of a matrix would make its gradient uneven."""
    groups = [{"params": list(model.matrices)}, {"params": [model.bias], "weight_decay": decay, "lr": 0.02}]
    return torch.optim.SGD(groups, **{"lr": 0.01, "momentum": 0.9, **options})


def steps_of(ddp: Any, optimizer: torch.optim.Optimizer, rank: int, steps: range, clip: float = 0.0) -> None:
    for step in steps:
        optimizer.zero_grad()
        ddp(rank, step).backward()
        if clip:
            nn.utils.clip_grad_norm_(ddp.parameters(), clip)
        optimizer.step()


def case_even(rank: int, size: int, options: dict[str, Any], clip: float = 0.0) -> float:
    expected = Signs()
    ddp = DistributedDataParallel(expected)
    steps_of(ddp, plain_sgd(expected, **options), rank, range(20), clip)
    del ddp
    gc.collect()
    model = Signs()
    optimizer = plain_sgd(model, **options)
    with attached(model, optimizer, **EXACT) as (ddp, handle):
        assert handle.dense_names == {"bias"}
        steps_of(ddp, optimizer, rank, range(20), clip)
    return float((weights(model) - weights(expected)).abs().max())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_even_second_moment_is_plain_sgd(worlds: dict[int, World], size: int) -> None:
    assert max(worlds[size].run(case_even, options={})) < 1e-4


@pytest.mark.parametrize("options", [{"momentum": 0.0}, {"foreach": True}, {"fused": True}], ids=str)
def test_plain_sgd_of_every_kind(worlds: dict[int, World], options: dict[str, Any]) -> None:
    assert max(worlds[2].run(case_even, options=options)) < 1e-4


def test_clipping_is_plain_sgds_from_the_first_step(worlds: dict[int, World]) -> None:
    """An update that was not cut would be many times as large. Weight decay would be cut with it."""
    assert max(worlds[2].run(case_even, options={"decay": 0.0}, clip=1.0)) < 1e-4


def case_all_dense(rank: int, size: int, second_moment: str) -> float:
    expected = dense(rank, size, 12, sgd)
    model = Zoo()
    optimizer = sgd(model)
    with attached(model, optimizer, dense_below=10**6, second_moment=second_moment, **ON) as (ddp, handle):
        assert len(handle.dense_names) == len(list(model.parameters()))
        train(model, ddp, optimizer, rank, range(12))
    return float((weights(model) - weights(expected)).abs().max())


@pytest.mark.parametrize(("second_moment", "rounding"), [("exact", 1e-4), ("sketch", 4e-4)])  # fp32 and bf16
def test_tensors_that_travel_dense_take_plain_sgd(
    worlds: dict[int, World], second_moment: str, rounding: float
) -> None:
    assert max(worlds[3].run(case_all_dense, second_moment=second_moment)) < rounding


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_rows_are_evened_out_and_the_tensor_keeps_its_size(scale: float) -> None:
    parameter = Parameter.of("p", torch.empty(48, 64))
    moment = SecondMoment([parameter], frozenset(), Preconditioning(sgd=True), torch.device("cpu"), 0, 4)
    tensors, rng = list(moment.tensors.values()), torch.Generator().manual_seed(0)
    uneven = scale * torch.logspace(0, 1.5, 48)[:, None]
    rules = {"p": SgdRules().hyperparameters({"lr": 0.1, "momentum": 0.0, "dampening": 0.0})}
    velocity, out = torch.zeros(48 * 64), torch.empty(48 * 64)
    for _ in range(100):
        grad = (uneven * torch.randn(48, 64, generator=rng)).flatten()
        signs = moment.begin_step(rules, 0.01)
        sketch(grad, tensors, signs, moment.sums)
        moment.update(1.0)
        precondition(grad, Update(velocity, velocity, tensors, moment.tables), out)
    assert 0.7 < out.norm() / (0.1 * grad).norm() < 1.4
    rows = out.view(48, 64).square().mean(1).sqrt()
    assert rows.max() / rows.min() < 3


# ---- the laws -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("options", [ON, {**ON, "recipe": "balanced"}, {**ON, "scope": "layer"}], ids=["", "b", "l"])
def test_nothing_is_lost(worlds: dict[int, World], size: int, options: dict[str, Any]) -> None:
    worlds[size].run(case_law, options=options, make=sgd)


@pytest.mark.parametrize("size", [2, 3])
def test_virtual_workers_are_real_ones(worlds: dict[int, World], size: int) -> None:
    assert_virtual(worlds[size].run(case_real, make=sgd), sgd)


@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
def test_a_scaler_and_steps_it_skips_change_nothing(worlds: dict[int, World], fused: bool) -> None:
    worlds[2].run(case_scaled, fused=fused, make=sgd)


def test_a_bad_gradient_poisons_nothing(worlds: dict[int, World]) -> None:
    worlds[2].run(case_non_finite, make=sgd)


def test_a_resumed_training_makes_the_same_bits(worlds: dict[int, World]) -> None:
    worlds[2].run(case_resumed, make=sgd)


def test_a_closure_makes_the_same_steps(worlds: dict[int, World]) -> None:
    assert torch.equal(worlds[2].run(case_closure, make=sgd)[0], worlds[2].run(case_loop, make=sgd)[0])


# ---- the optimizer stays the user's ---------------------------------------------------------------------------------


def case_handed_back(rank: int, size: int) -> None:
    """Momentum goes in at ``attach`` and comes out at ``detach``: plain SGD all the way."""
    expected, model = Signs(), Signs()
    own, optimizer = plain_sgd(expected), plain_sgd(model)
    reference, ddp = DistributedDataParallel(expected), DistributedDataParallel(model)
    steps_of(reference, own, rank, range(6))
    steps_of(ddp, optimizer, rank, range(3))
    groups = copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
    handle = sparsync.attach(ddp, optimizer=optimizer, **EXACT)
    assert not optimizer.state
    steps_of(ddp, optimizer, rank, range(3, 6))
    saved = optimizer.state_dict()
    assert groups == [{k: v for k, v in group.items() if k != "params"} for group in saved["param_groups"]]
    handle.detach()
    for number, theirs in own.state_dict()["state"].items():
        ours = optimizer.state_dict()["state"][number]
        assert set(ours) == set(theirs) == set(saved["state"][number]) == {"momentum_buffer"}
        torch.testing.assert_close(ours["momentum_buffer"], theirs["momentum_buffer"], rtol=1e-4, atol=1e-5)
    steps_of(reference, own, rank, range(6, 12))
    steps_of(ddp, optimizer, rank, range(6, 12))
    torch.testing.assert_close(weights(model), weights(expected), rtol=0, atol=1e-4)
    del ddp, reference
    gc.collect()


def test_momentum_is_taken_over_and_handed_back(worlds: dict[int, World]) -> None:
    worlds[2].run(case_handed_back)


def virtual(optimizer_options: dict[str, Any], **options: Any) -> VirtualWorkers:
    model = Zoo()
    return VirtualWorkers(model, _loss, torch.optim.SGD(model.parameters(), 0.02, **optimizer_options), 2, **options)


def _loss(model: nn.Module, data: tuple[Tensor, ...], carried: Any) -> tuple[Tensor, Any]:
    words = data[0]
    return nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()), ()


def test_without_momentum_there_is_no_state() -> None:
    training = virtual({}, **ON)
    training.advance([(batch(rank, 0),) for rank in range(2)])
    assert not training.optimizer.state_dict()["state"]
    training.detach()
    assert not training.optimizer.state


@pytest.mark.parametrize(
    ("options", "factor"), [({"nesterov": True}, 10.0), ({"dampening": 0.9}, 1.0), ({"dampening": 0.5}, 5.0)], ids=str
)
def test_nesterov_and_dampening_count_as_in_the_long_run(options: dict[str, Any], factor: float) -> None:
    training = virtual({"momentum": 0.9, **options}, **ON)
    taken: Any = training._taken
    assert all(rule.rate == pytest.approx(0.02 * factor) for rule in taken.rules().values())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"maximize": True}, "maximize"),
        ({"momentum": 0.9, "dampening": 1.0}, "dampening"),
        ({"momentum": 1.0}, "below"),
    ],
)
def test_what_has_no_such_step_is_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        virtual(options, **ON)


def test_it_is_off_unless_it_is_asked_for() -> None:
    assert virtual({"momentum": 0.9}, **SOME).plan.preconditioning is None
    preconditioning = virtual({"momentum": 0.9}, **ON).plan.preconditioning
    assert preconditioning is not None
    assert preconditioning.sgd


def test_it_learns() -> None:
    losses = []
    for options in (ON, {"compressor": "none"}):
        training = virtual({"momentum": 0.9}, **options)
        losses.append([float(training.advance([(batch(r, s),) for r in range(2)])) for s in range(60)])
    sparse, full = (sum(own[-10:]) / 10 for own in losses)
    assert sparse < 0.1 * losses[0][0]
    assert sparse < 1.2 * full


def test_the_loss_is_the_one_of_real_processes() -> None:
    model = Zoo()
    assert torch.equal(_loss(model, (batch(0, 1),), ())[0], loss_of(model, 0, 1))
