"""The models that are trained here, by name."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from sparsync.experiments.data import Images

MODELS = ("mlp", "lenet5")
HIDDEN = {8: (256, 256), 28: (200, 200)}  # an MLP's hidden layers by the images' side; at 28 it is FNN-3
LENET_SIDE = 28


def make(name: str, images: Images) -> nn.Sequential:
    """A model for ``images``, with fresh weights from torch's random state.

    Args:
        name: ``"mlp"``: three fully connected layers (64-256-256-10 on digits; 784-200-200-10 on MNIST, 199,210
            parameters), or ``"lenet5"``: 61,706 parameters; images of another size than 28 x 28 are resized for it.
    """
    if name == "mlp":
        sizes = [images.side**2, *HIDDEN.get(images.side, (256, 256)), images.classes]
        return nn.Sequential(nn.Flatten(), *mlp(sizes))
    if name == "lenet5":
        resize = [] if images.side == LENET_SIDE else [nn.Upsample(size=LENET_SIDE, mode="bilinear")]
        return nn.Sequential(*resize, *_lenet5(images.classes))
    raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}")


def size(name: str, images: Images) -> int:
    """The number of a model's parameters."""
    with torch.device("meta"):  # nothing is drawn, nothing allocated
        return sum(parameter.numel() for parameter in make(name, images).parameters())


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """Fully connected layers with ReLU between them."""
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(sizes):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _lenet5(classes: int) -> list[nn.Module]:
    return [
        nn.Conv2d(1, 6, 5, padding=2),  # padded: 28 x 28 stays 28 x 28, and 16 x 5 x 5 = 400 features remain
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *mlp((400, 120, 84, classes)),
    ]
