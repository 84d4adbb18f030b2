"""The outer loop on real processes: nothing is lost over rounds, shared weights are equal bit for bit, no hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsync import OuterLoop, TopK
from tests.world import World

STEPS = 13
Tensors = dict[str, Tensor]


def make_model(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 40), nn.Tanh(), nn.Linear(40, 3)).to(dtype)


class Training:
    """Local AdamW steps on data of this rank's own, with an account of the pseudo-gradients that went in."""

    def __init__(self, rank: int, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.model = make_model(rank, dtype)
        self.outer = OuterLoop(self.model, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.random = torch.Generator().manual_seed(100 + rank)
        self.came = {name: torch.zeros_like(p) for name, p in self.outer.shared().items()}
        self.first = self.shared()

    def shared(self) -> Tensors:
        return {name: p.clone() for name, p in self.outer.shared().items()}

    def own(self) -> Tensors:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def residuals(self) -> Tensors:
        kept = {name: self.outer.residual(name) for name in self.came}
        return {name: kept[name] if kept[name] is not None else torch.zeros_like(p) for name, p in self.came.items()}

    def step(self, miss: bool = False) -> None:
        x = torch.randn(5, 7, generator=self.random).to(next(self.model.parameters()).dtype)
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        own = self.own()
        for part in self.outer.fragments:
            if (self.outer.steps + 1) % self.outer.every == part.offset and not miss:
                for name, shared in part.shared.by_name.items():
                    self.came[name] += shared.detach().to(own[name].dtype).float() - own[name].float()
        self.outer.step(miss)

    def result(self) -> dict[str, Tensors]:
        found = {"first": self.first, "own": self.own(), "residuals": self.residuals()}
        self.outer.detach()  # which applies what is on its way
        return {**found, "came": self.came, "shared": self.shared(), "left": self.own()}


def case_train(rank: int, size: int, misses: tuple[int, ...] = (), **options: Any) -> dict[str, Tensors]:
    training = Training(rank, **options)
    for step in range(STEPS):
        training.step(miss=rank == 1 and step + 1 in misses)
    return training.result()


def case_average(rank: int, size: int) -> tuple[Tensors, Tensors, Tensors]:
    training = Training(rank, compressor="none", every=4)
    for _ in range(3):
        training.step()
    mine = {name: p.clone() for name, p in training.own().items()}  # one local step before the round
    training.optimizer.param_groups[0]["lr"] = 0.0
    training.optimizer.param_groups[0]["weight_decay"] = 0.0
    training.step()
    return mine, training.own(), training.result()["shared"]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_density_1_and_rate_1_are_parameter_averaging(worlds: dict[int, World], size: int) -> None:
    answers = worlds[size].run(case_average)
    for name in answers[0][0]:
        mean = torch.stack([mine[name] for mine, _, _ in answers]).mean(0)
        for _, own, shared in answers:
            torch.testing.assert_close(own[name], mean, rtol=1e-5, atol=1e-6)
            assert torch.equal(own[name], answers[0][1][name])
            assert torch.equal(own[name], shared[name])


SPARSE = {"compressor": TopK(0.1), "scope": "global"}
WAYS = {
    "whole": {"every": 4, **SPARSE},
    "sign": {"every": 4, "compressor": "topk", "density": 0.2, "values": "sign", "indices": "ef", "dense_1d": False},
    "levels": {"every": 3, "compressor": "threshold", "density": 0.2, "values": "levels", "dense_below": 0},
    "budget": {"every": 4, "budget": 0.05, "dense_below": 0, "dense_1d": False},
    "balanced": {"every": 4, "collective": "balanced", **SPARSE},
    "streams": {"every": 6, "fragments": 3, "overlap": 2, **SPARSE},
    "bf16": {"every": 4, "dtype": torch.bfloat16, **SPARSE},
    "missed": {"every": 4, "misses": (4, 8), **SPARSE},
    "missed streams": {"every": 6, "fragments": 2, "overlap": 1, "misses": (3, 6, 12), **SPARSE},
}


@pytest.mark.parametrize(("size", "way"), [(2, way) for way in WAYS] + [(3, "streams"), (3, "missed"), (5, "whole")])
def test_nothing_is_lost_and_shared_weights_are_equal(worlds: dict[int, World], size: int, way: str) -> None:
    answers = worlds[size].run(case_train, **WAYS[way])
    whole = "fragments" not in WAYS[way]
    sparse = 0.0
    for name, first in answers[0]["first"].items():
        given = torch.stack([one["came"][name] - one["residuals"][name] for one in answers]).double().mean(0)
        torch.testing.assert_close((first - answers[0]["shared"][name]).double(), given, rtol=1e-4, atol=2e-6)
        assert not torch.equal(first, answers[0]["shared"][name])
        for one in answers:
            assert torch.equal(one["first"][name], first)
            assert torch.equal(one["shared"][name], answers[0]["shared"][name])
            assert torch.equal(one["left"][name], answers[0]["left"][name])
        sparse += sum(float(one["residuals"][name].abs().sum()) for one in answers)
    assert sparse > 0
    assert whole or not torch.equal(answers[0]["own"]["0.weight"], answers[1]["own"]["0.weight"])
