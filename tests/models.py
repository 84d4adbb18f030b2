"""Small models and data for trainings in tests."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def net(seed: int = 0, width: int = 64) -> nn.Sequential:
    """Four linear layers: several buckets at a small bucket size, biases that stay dense."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(20, width)]
    for _ in range(2):
        layers += [nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(width, 5))


def batch(rank: int, step: int, rows: int = 16) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(rows, 20, generator=rng)
    return x, x[:, :5].argmax(1)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)), y)


def local_gradients(ddp: DistributedDataParallel, rank: int, step: int) -> dict[str, Tensor]:
    """What this rank's gradients are before any exchange."""
    twin = copy.deepcopy(ddp.module)
    twin.zero_grad()
    loss_of(twin, rank, step).backward()
    return {name: p.grad.clone() for name, p in twin.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
