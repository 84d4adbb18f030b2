"""Momentum moved out of the optimizer."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.momentum import MovedMomentum
from tests.models import loss_of, net, weights


def test_moved_momentum_is_a_larger_rate_and_schedulers_go_on():
    model = net()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.75, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  # made before, knows nothing of us
    moved = MovedMomentum(optimizer)
    plain = torch.optim.SGD(twin.parameters(), lr=0.08, weight_decay=0.01)
    plain_scheduler = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    before = copy.deepcopy(optimizer.state_dict())
    for step in range(6):
        for one, its, rate in ((model, optimizer, scheduler), (twin, plain, plain_scheduler)):
            its.zero_grad()
            loss_of(one, 0, step).backward()
            its.step()
            rate.step()
        if step == 3:  # a checkpoint from before brings the momentum back: it is taken out again
            saved = copy.deepcopy(before)
            saved["param_groups"][0].update(momentum=0.75, lr=optimizer.param_groups[0]["lr"])
            optimizer.load_state_dict(saved)
        assert torch.equal(weights(model), weights(twin))
    assert optimizer.param_groups[0]["lr"] == 0.02 * 0.5**3
    moved.undo()
    assert optimizer.param_groups[0]["momentum"] == 0.75
    loss_of(model, 0, 0).backward()
    optimizer.step()
    assert any("momentum_buffer" in state for state in optimizer.state.values())


def test_an_optimizer_without_momentum_is_refused():
    with pytest.raises(ValueError, match="needs an optimizer with momentum, got Adam"):
        MovedMomentum(torch.optim.Adam(net().parameters()))


def case_attach(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    with pytest.warns(UserWarning, match=r"momentum of 0.9 stays behind a density of 0.01"):
        sparsync.attach(ddp, "topk", density=0.01, optimizer=optimizer).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = sparsync.attach(ddp, "topk", density=0.01, optimizer=optimizer, momentum="move")
    assert "0.9 taken out of the optimizer" in handle.describe()
    loss_of(ddp, rank, 0).backward()
    optimizer.step()
    assert optimizer.param_groups[0]["momentum"] == 0
    handle.detach()
    assert optimizer.param_groups[0]["momentum"] == 0.9
    del ddp
    gc.collect()


def test_attach_moves_momentum_and_detach_brings_it_back(worlds):
    worlds[2].run(case_attach)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"momentum": "lose"}, "momentum must be one of keep, move, got 'lose'"),
        ({"momentum": "move"}, "needs optimizer="),
    ],
)
def test_bad_options_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        sparsync.comm_hook(net(), **options)
