"""Trainings under DDP and Sparsync; at the end of each the replicas are compared bit for bit."""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from tests.failures.checked_training import assert_same_on_all_ranks

SIZES = (32, 64, 48, 80, 32)  # layers of different sizes
SQUARE = (40, 40, 40, 40)  # three layers of equal size
ALL_SPARSE = {"dense_below": 0, "dense_1d": False}  # options of attach: nothing is too small to be compressed
SMALL_BUCKETS = {"bucket_cap_mb": 0.002}  # options of DDP
RATE = 0.1


class Chain(nn.Module):
    """Layers ``layer0``, ``layer1``, ..., used one after another; the same on every rank."""

    def __init__(self, sizes: tuple[int, ...], bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        for i, (inputs, outputs) in enumerate(pairwise(sizes)):
            self.add_module(f"layer{i}", nn.Linear(inputs, outputs, bias))

    def forward(self, x: Tensor, without: str = "") -> Tensor:
        for name, layer in self.named_children():
            x = x if name == without else torch.tanh(layer(x))
        return x


def loss_of(model: nn.Module, rank: int, step: int, without: str = "") -> Tensor:
    """Return the loss on this rank's batch of this step."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    data = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(4, module.get_submodule("layer0").in_features, generator=data)
    return model(x, without).square().sum()


@dataclass
class Training:
    model: nn.Module
    ddp: DistributedDataParallel
    handle: sparsync.Handle
    optimizer: torch.optim.Optimizer

    def step(self, loss: Callable[[nn.Module], Tensor], scaler: Any = None) -> None:
        """Make one step as everybody writes it."""
        self.optimizer.zero_grad()
        if scaler is None:
            loss(self.ddp).backward()
            self.optimizer.step()
        else:
            scaler.scale(loss(self.ddp)).backward()
            scaler.step(self.optimizer)
            scaler.update()

    def buckets(self) -> list[tuple[str, ...]]:
        """Return the names of the parameters in every bucket, without those that are gathered from all buckets."""
        units = self.handle._running().buckets._bucket_units
        return [tuple(span.name for span in units[index].spans) for index in sorted(units)]

    def residuals(self) -> dict[str, Tensor]:
        return self.handle.state_dict()["residuals"]


@contextmanager
def training(
    model: nn.Module, compressor: Any, ddp: dict[str, Any] | None = None, check: bool = True, **options: Any
) -> Iterator[Training]:
    """Yield a model under DDP and Sparsync; compare the replicas at the end, and leave nothing behind."""
    wrapped = DistributedDataParallel(model, **(ddp or {}))
    run = Training(
        model,
        wrapped,
        sparsync.attach(wrapped, compressor, **options),
        torch.optim.SGD(model.parameters(), lr=RATE),
    )
    del wrapped
    try:
        yield run
        if check:
            assert_replicas_equal(model)
    finally:
        run.handle.detach()
        del run.ddp
        gc.collect()


def local_gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """Return this rank's own gradients before any exchange; zero for parameters that are not used."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss(model), parameters, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, grads, strict=True)}


def gathered(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def digest(tensors: Any) -> str:
    """Return a text that differs when any bit differs."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def assert_replicas_equal(model: nn.Module) -> None:
    assert_same_on_all_ranks(list(model.parameters()))


def assert_same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@contextmanager
def bad_gradient(model: nn.Module, name: str, value: float, here: bool = True) -> Iterator[None]:
    """Make the third entry of the gradient of ``name`` be ``value``, on ranks where ``here`` holds."""

    def poison(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[2] = value
        return grad

    hook = model.get_parameter(name).register_hook(poison) if here else None
    yield
    if hook is not None:
        hook.remove()


@contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Yield the list of what Sparsync logs meanwhile, at ``level`` or above."""
    messages: list[str] = []
    handler, logger = logging.Handler(level), logging.getLogger("sparsync")
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    if level < logging.WARNING:
        logger.setLevel(level)
    try:
        yield messages
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


class ErrorFeedbackReference:
    """Plain error feedback with exact top-k in every parameter: no buckets, no hooks, no messages."""

    def __init__(self, model: nn.Module, density: float) -> None:
        self.model, self.density = deepcopy(model), density
        self.kept = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def step(self, loss: Callable[[nn.Module], Tensor]) -> None:
        for name, grad in local_gradients(self.model, loss).items():
            sent = torch.zeros_like(grad)
            if grad.any():  # a parameter this rank did not use is not sent from
                total = self.kept[name] + grad
                k = max(1, round(self.density * total.numel()))
                top = total.abs().flatten().topk(k).indices
                sent.view(-1)[top] = total.view(-1)[top]
                self.kept[name] = total - sent
            mean = sum(gathered(sent)) / dist.get_world_size()
            self.model.get_parameter(name).data.add_(mean, alpha=-RATE)

    def assert_same(self, run: Training) -> None:
        """Compare every residual and every weight, bit for bit."""
        for name, kept in self.kept.items():
            residual = run.handle.residual(name)
            assert residual is not None
            assert torch.equal(residual, kept), name
            assert torch.equal(run.model.get_parameter(name), self.model.get_parameter(name)), name


class MassBalance:
    """Checks that what was applied and what is kept is what came in, as means over the ranks, for every parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.balance = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def step(
        self, run: Training, loss: Callable[[nn.Module], Tensor], after: Callable[[], None] = lambda: None
    ) -> None:
        came_in = local_gradients(run.model, loss)
        run.optimizer.zero_grad()
        loss(run.ddp).backward()
        for name, p in run.model.named_parameters():
            self.balance[name] += came_in[name] - (0 if p.grad is None else p.grad)
        after()
        run.optimizer.step()

    def assert_balanced(self, run: Training) -> None:
        residuals = run.residuals()
        for name, balance in self.balance.items():
            kept = residuals.get(name, torch.zeros_like(balance))
            torch.testing.assert_close(sum(gathered(kept)), sum(gathered(balance)), rtol=1e-5, atol=1e-5)
