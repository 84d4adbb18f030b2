"""A model that waits instead of computing: its backward pass yields made-up gradients, layer after layer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from sparsync.planner.shapes import resnet50
from sparsync_lab.models import CATALOGUE, build

Shape = tuple[int, ...]

FORWARD = 1 / 3  # of the time that a step computes
TENSOR = 1024  # rows and columns of a matrix of a model that is known by its size alone
SLACK, STRIDE = 2**16, 9973  # gradients of different steps begin at different places of one random vector
OTHERS = {"resnet50": resnet50}  # without the package that builds it


def shapes_of(model: str) -> list[Shape]:
    """Return the shapes of a model's parameters, by its name or by the number of entries."""
    if model.isdigit() and int(model):
        matrices, rest = divmod(int(model), TENSOR * TENSOR)
        shapes: list[Shape] = [(TENSOR, TENSOR) for _ in range(matrices)]
        return [*shapes, (1, rest)] if rest else shapes
    if model in OTHERS:
        return [tensor.shape for tensor in OTHERS[model]()]
    if model not in CATALOGUE:
        known = ", ".join(sorted([*CATALOGUE, *OTHERS]))
        raise ValueError(f"a model is a number of entries or one of {known}, got {model!r}")
    with torch.device("meta"):
        return [tuple(parameter.shape) for parameter in build(model).parameters()]


class Stopwatch:
    """Waits; what one wait takes too long is taken off the next."""

    def __init__(self) -> None:
        self.owed = 0.0

    def wait(self, seconds: float) -> None:
        self.owed += seconds
        if self.owed > 0:
            begun = time.perf_counter()
            time.sleep(self.owed)
            self.owed -= time.perf_counter() - begun


class EmulatedModel(nn.Module):
    """Parameters of given shapes whose passes wait: a third of the time forward, the rest backward, in equal parts
    before the gradient of every matrix (or tensor of more dimensions) is ready.

    What a communication hook does on backward's thread adds to the time, as it would to a real pass.

    Args:
        shapes: of the parameters, first layer first.
        compute: seconds of a step.
        seed: of the gradients.
    """

    def __init__(self, shapes: Sequence[Shape], compute: float, seed: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(shape) for shape in shapes])
        self.forward_s, backward = FORWARD * compute, (1 - FORWARD) * compute
        layers = [len(shape) > 1 for shape in shapes]
        self.backward_s = [backward / sum(layers) if layer else 0.0 for layer in layers]
        self.starts = [sum(map(prod, shapes[:number])) for number in range(len(shapes))]
        self.numel = sum(map(prod, shapes))
        self.source = torch.randn(self.numel + SLACK, generator=torch.Generator().manual_seed(seed))
        self.stopwatch, self.step = Stopwatch(), 0

    def forward(self) -> Tensor:
        self.step += 1
        self.stopwatch.wait(self.forward_s)
        carried = torch.zeros((), requires_grad=True)
        for number, weight in enumerate(self.weights):
            carried = _Layer.apply(carried, weight, self, number)  # type: ignore[no-untyped-call]
        return carried

    def gradient(self, number: int) -> Tensor:
        """Wait as long as backward would compute it, and return the gradient of a parameter in this step."""
        self.stopwatch.wait(self.backward_s[number])
        weight = self.weights[number]
        start = self.starts[number] + self.step * STRIDE % SLACK
        return self.source[start : start + weight.numel()].view_as(weight)


class _Layer(torch.autograd.Function):
    """Passes a number on, so that backward goes from the last layer to the first."""

    @staticmethod
    def forward(ctx: Any, carried: Tensor, weight: Tensor, model: EmulatedModel, number: int) -> Tensor:
        ctx.model, ctx.number = model, number
        return carried.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return grad, ctx.model.gradient(ctx.number), None, None
