"""Steps of the optimizer that raise while its update is ours."""

from __future__ import annotations

import copy
import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import sparsync
from tests.models import loss_of, net, weights

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def closure(ddp: DistributedDataParallel, rank: int, step: int) -> Tensor:
    ddp.zero_grad()
    loss = loss_of(ddp, rank, step)
    loss.backward()
    return loss


def raises() -> Tensor:
    raise RuntimeError("the data ended")


def case_raises(rank: int, size: int, name: str, momentum: str, fail: bool) -> Tensor:
    """Train for four steps by closures; before each, with ``fail``, three raise: in the closure, or in the update."""
    ddp = DistributedDataParallel(net())
    optimizer = OPTIMIZERS[name](ddp.parameters())
    held = copy.deepcopy(optimizer.state_dict()["param_groups"])
    handle = sparsync.attach(ddp, "topk", density=0.05, optimizer=optimizer, momentum=momentum)
    for step in range(4):
        for _ in range(3 if fail else 0):
            before = weights(ddp.module)
            with pytest.raises(RuntimeError, match="the data ended"):
                optimizer.step(raises)
            ddp.module[0].weight.grad = torch.sparse_coo_tensor(torch.zeros(2, 0), torch.zeros(0), (64, 20))
            with pytest.raises(RuntimeError):  # neither SGD with weight decay nor AdamW can use it
                optimizer.step()
            ddp.module[0].weight.grad = None
            assert torch.equal(weights(ddp.module), before)
            assert optimizer.state_dict()["param_groups"] == held
        assert optimizer.step(partial(closure, ddp, rank, step)) > 0
        assert optimizer.state_dict()["param_groups"] == held
    handle.detach()
    assert optimizer.state_dict()["param_groups"] == held
    result = weights(ddp.module)
    del ddp
    gc.collect()
    return result


@pytest.mark.parametrize(("name", "momentum"), [("sgd", "move"), ("sgd", "correct"), ("adamw", "move")])
def test_a_step_that_raises_leaves_nothing_changed(worlds: Any, name: str, momentum: str) -> None:
    wanted, got = (worlds[2].run(case_raises, name=name, momentum=momentum, fail=fail) for fail in (False, True))
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[0])
