"""Fully connected networks and LeNet-5."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """Build fully connected layers with ReLU between them, weights as torch draws them."""
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(sizes):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def fnn3(classes: int = 10) -> nn.Sequential:
    """Build FNN-3 for MNIST: 784-200-200-10, 199,210 parameters; Xavier, ReLU."""
    return nn.Sequential(nn.Flatten(), *mlp((784, 200, 200, classes))).apply(xavier)


def lenet5(channels: int = 1, classes: int = 10) -> nn.Sequential:
    """Build LeNet-5 for images of 28 x 28, 61,706 parameters on MNIST; Xavier, ReLU."""
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=2),  # padded: 28 x 28 stays 28 x 28, and 16 x 5 x 5 = 400 features remain
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *mlp((400, 120, 84, classes)),
    ).apply(xavier)


def xavier(layer: nn.Module) -> None:
    """Draw the weights of a convolution or linear layer uniformly in ±√(6 / (fan in + fan out)), its bias 0; to
    ``apply``."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Linear):
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def kaiming(layer: nn.Module) -> None:
    """Draw the weights of a convolution or linear layer from a normal distribution of variance 2 / fan in, its bias 0;
    to ``apply``."""
    if isinstance(layer, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
