"""Trainings in which law 1 and law 2 are checked at every step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 20)).to(dtype)


def real(tensor: Tensor) -> Tensor:
    """Return the view that is compressed: of a complex tensor, its real and imaginary parts."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def bits(tensors: Sequence[Tensor]) -> bytes:
    """Return the bytes of the tensors, one after another."""
    return b"".join(real(t).contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes() for t in tensors)


def assert_same_on_all_ranks(tensors: Sequence[Tensor]) -> None:
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, bits(tensors))
    assert len(set(said)) == 1, "the replicas differ"


def mean_over_ranks(tensor: Tensor) -> Tensor:
    total = real(tensor).double().contiguous()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def kept(handle: sparsync.Handle, name: str, parameter: Tensor) -> Tensor:
    """Return a copy of the residual of a parameter; zeros where it has none."""
    residual = handle.residual(name)
    return torch.zeros_like(real(parameter)) if residual is None else residual.clone()


def checked_step(
    ddp: DistributedDataParallel, handle: sparsync.Handle, batches: Sequence[Tensor], loss: Callable[..., Tensor]
) -> None:
    """Run forward and backward over ``batches``, all but the last without exchange, and check law 1.

    For every parameter, mean applied + mean kept must be the mean that came in.
    """
    alone = copy.deepcopy(ddp.module)
    for batch in batches:
        loss(alone(batch)).backward()
    before = {name: kept(handle, name, p) for name, p in ddp.module.named_parameters()}
    ddp.zero_grad()
    with ddp.no_sync():
        for batch in batches[:-1]:
            loss(ddp(batch)).backward()
    loss(ddp(batches[-1])).backward()
    handle.check()
    for (name, p), own in zip(ddp.module.named_parameters(), alone.parameters(), strict=True):
        came, applied = real(own.grad).double(), real(p.grad).double()
        total = mean_over_ranks(came + before[name])
        bound = mean_over_ranks(came.abs() + before[name].abs())
        eps = torch.finfo(real(p).dtype).eps
        error = (applied + mean_over_ranks(kept(handle, name, p)) - total).abs()
        assert (error <= 4 * dist.get_world_size() * eps * bound).all(), (name, error.max())


def square(out: Tensor) -> Tensor:
    return out.abs().square().mean()


def train(
    ddp: DistributedDataParallel,
    handle: sparsync.Handle,
    batches: Sequence[Tensor],
    accumulate: int = 1,
    loss: Callable[..., Tensor] = square,
) -> None:
    """Train over ``batches``, ``accumulate`` of them a step; check law 1 and law 2 after every step."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for start in range(0, len(batches), accumulate):
        checked_step(ddp, handle, batches[start : start + accumulate], loss)
        optimizer.step()
        assert_same_on_all_ranks([p.grad for p in ddp.parameters()] + list(ddp.parameters()))


def inputs(rank: int, *shape: int, steps: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return this rank's batches."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(*shape, generator=generator, dtype=dtype) for _ in range(steps)]
