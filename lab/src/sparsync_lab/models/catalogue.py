"""The models of the papers: how they are made, and what they are trained with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from sparsync_lab.models.convolutional import resnet18, resnet20, vgg16
from sparsync_lab.models.fnn_lenet import fnn3, lenet5
from sparsync_lab.models.gpt import GPT, ViT, gpt2_small, gpt_with_dropout
from sparsync_lab.models.imagenet import IMAGENET, imagenet
from sparsync_lab.models.recurrent import LSTMAN4, LSTMPTB


@dataclass(frozen=True)
class ModelSpec:
    """A model and the settings it is published with.

    Args:
        title: as the papers call it.
        make: a fresh one, from torch's random state.
        parameters: how many it has.
        data: the set it is trained on.
        batch: of each worker.
        rate: learning rate of SGD; of AdamW for transformers.
        clip: largest norm of a worker's gradient.
        momentum: of SGD.
    """

    title: str
    make: Callable[[], nn.Module]
    parameters: int
    data: str
    batch: int
    rate: float
    clip: float | None = None
    momentum: float = 0.9


# The first six: Shi et al., Understanding Top-k Sparsification, Table 1. Its authors' code, not the paper, clips two of
# them, and trains LSTM-PTB without momentum: with 0.9 a rate of 22 would act as 220.
# ResNet-18: Foroutan Eghlidi and Jaggi, Sparse Communication; its rate is for entries chosen layer by layer, and a
# tenth of that for entries chosen in the whole model, each times the workers. The transformers are our own.
CATALOGUE = {
    "fnn3": ModelSpec("FNN-3", fnn3, 199_210, "mnist", 128, 0.01),
    "lenet5": ModelSpec("LeNet-5", lenet5, 61_706, "mnist", 128, 0.01),
    "resnet20": ModelSpec("ResNet-20", resnet20, 269_722, "cifar10", 32, 0.1),
    "vgg16": ModelSpec("VGG-16", vgg16, 14_728_266, "cifar10", 128, 0.1),
    "lstm-ptb": ModelSpec("LSTM-PTB", LSTMPTB, 66_034_000, "ptb", 20, 22.0, clip=0.25, momentum=0.0),
    "lstm-an4": ModelSpec("LSTM-AN4", LSTMAN4, 27_569_568, "an4", 4, 0.0002, clip=400.0),
    "resnet18": ModelSpec("ResNet-18", resnet18, 11_173_962, "cifar10", 128, 0.1),
    "gpt": ModelSpec("GPT, 4 layers of 256", GPT, 5_752_320, "ptb", 32, 0.001, clip=1.0),
    "gpt-dropout": ModelSpec(
        "GPT, 4 layers of 256, dropout 0.2", gpt_with_dropout, 5_752_320, "ptb", 32, 0.001, clip=1.0
    ),
    "gpt2": ModelSpec("GPT-2 small", gpt2_small, 124_439_808, "ptb", 4, 0.0006, clip=1.0),
    "vit": ModelSpec("ViT, 6 layers of 192", ViT, 2_693_194, "cifar10", 32, 0.001, clip=1.0),
}


def build(name: str) -> nn.Module:
    """Build a model of the papers with fresh weights from torch's random state.

    Args:
        name: a key of ``CATALOGUE`` or of ``IMAGENET``.
    """
    if name in IMAGENET:
        return imagenet(name)
    if name not in CATALOGUE:
        raise ValueError(f"name must be one of {', '.join([*CATALOGUE, *IMAGENET])}, got {name!r}")
    return CATALOGUE[name].make()


def count_parameters(make: Callable[[], nn.Module]) -> int:
    """Return the number of parameters of the model that ``make`` makes; nothing is drawn, nothing allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())
