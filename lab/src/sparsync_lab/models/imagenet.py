"""The models that are trained on ImageNet: torchvision's, and timm's Inception-v4."""

from __future__ import annotations

import importlib

from torch import nn

# Package, its name there, and the number of parameters.
IMAGENET = {
    "alexnet": ("torchvision", "alexnet", 61_100_840),
    "vgg16-imagenet": ("torchvision", "vgg16", 138_357_544),
    "resnet50": ("torchvision", "resnet50", 25_557_032),
    "inception4": ("timm", "inception_v4", 42_679_816),
}


def imagenet(name: str) -> nn.Module:
    """Build a model for ImageNet's 1,000 classes with fresh weights, initialised as its package does.

    Args:
        name: ``"alexnet"``, ``"vgg16-imagenet"``, ``"resnet50"`` (of torchvision) or ``"inception4"`` (of timm).
    """
    if name not in IMAGENET:
        raise ValueError(f"name must be one of {', '.join(IMAGENET)}, got {name!r}")
    package, known_as, parameters = IMAGENET[name]
    try:
        importlib.import_module(package)
    except ImportError:
        raise ValueError(f"{name} comes with {package}: pip install {package}") from None
    if package == "timm":
        made = importlib.import_module("timm").create_model(known_as, pretrained=False)
    else:
        made = getattr(importlib.import_module("torchvision.models"), known_as)(weights=None)
    assert isinstance(made, nn.Module)
    assert sum(parameter.numel() for parameter in made.parameters()) == parameters, name
    return made
