"""What users do to gradients between backward and step, with AdamW: one factor is undone, all else is told."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from tests.failures.ddp_training import logged
from tests.world import World

STEPS, MAX_NORM = 4, 0.05
TOLD = "not all by the same factor, as by clip_grad_value_ or by clip_grad_norm_ on some of the parameters"


class Net(nn.Module):
    """Matrices larger than what is looked at, one in another order of memory; norms and biases travel dense."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(64, 1200)
        self.up.weight = nn.Parameter(self.up.weight.detach().t().contiguous().t())
        self.mix = nn.Linear(1200, 32)
        self.norm = nn.LayerNorm(32)
        self.out = nn.Linear(32, 1000)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(self.mix(self.up(x).relu())))
        return logits


def few(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.dim() < 2]


def many(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.dim() > 1]


def cut_few(model: nn.Module) -> None:
    for parameter in few(model):
        assert parameter.grad is not None
        parameter.grad.mul_(0.1)


def cut_all(model: nn.Module) -> None:
    assert nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM) > 2 * MAX_NORM


def cut_all_but_one(model: nn.Module) -> None:
    parameter = many(model)[1]
    assert parameter.grad is not None
    parameter.grad.zero_()
    cut_all(model)


CUTS: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda model: None,
    "all": cut_all,
    "all but one that is zeroed": cut_all_but_one,
    "biases and norms": cut_few,
    "biases and norms apart": lambda model: [nn.utils.clip_grad_norm_(part(model), 0.01) for part in (few, many)],
    "matrices": lambda model: nn.utils.clip_grad_norm_(many(model), 0.01),
    "one matrix": lambda model: nn.utils.clip_grad_norm_(many(model)[:1], 1e-3),
    "values": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
}


def case_cut(rank: int, size: int, cut: str) -> tuple[list[str], list[float], float]:
    """Return what was told, how far matrices moved in each step, and the norm at which gradients are clipped."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    ddp = DistributedDataParallel(model)
    sync = sparsync.attach(ddp, optimizer=optimizer, density=0.05)
    moved = []
    rng = torch.Generator().manual_seed(rank)
    x, y = torch.randn(16, 64, generator=rng), torch.randint(1000, (16,), generator=rng)
    with logged() as told:
        for _ in range(STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x), y).backward()
            CUTS[cut](model)
            before = [p.detach().clone() for p in many(model)]
            optimizer.step()
            moved.append(
                float(torch.stack([(p.detach() - q).norm() for p, q in zip(many(model), before, strict=True)]).norm())
            )
    preconditioner = sync._running().worker.preconditioner
    assert preconditioner is not None
    learned = float(preconditioner.moment.max_norm)
    sync.detach()
    del ddp
    gc.collect()
    return told, moved, learned


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut != "nothing"])
def test_one_factor_is_undone_and_learned_and_everything_else_told_once(worlds: dict[int, World], cut: str) -> None:
    (_, whole, _), _ = worlds[2].run(case_cut, cut="nothing")
    (told, moved, learned), (others, *_) = worlds[2].run(case_cut, cut=cut)
    assert others == []
    if cut.startswith("all"):
        assert told == []
        assert MAX_NORM <= 1.01 * learned < (1.02 if cut == "all" else 4) * MAX_NORM  # of what is left, or of all
    else:
        assert len(told) == 1
        assert TOLD in told[0]
        assert "attach(..., clip=max_norm)" in told[0]
        assert learned == float("inf")
    assert max(moved) < 1.5 * max(whole)
    if cut in ("all", "biases and norms"):
        assert min(moved) > 0.5 * min(whole)


def test_untouched_gradients_are_not_told_of(worlds: dict[int, World]) -> None:
    assert [told for told, *_ in worlds[3].run(case_cut, cut="nothing")] == [[]] * 3
