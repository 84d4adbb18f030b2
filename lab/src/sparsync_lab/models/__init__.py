"""The models that are trained here, by name."""

from __future__ import annotations

from torch import nn

from sparsync_lab.data import Images
from sparsync_lab.models.catalogue import CATALOGUE, ModelSpec, build, count_parameters
from sparsync_lab.models.fnn_lenet import lenet5, mlp
from sparsync_lab.models.gpt import GPT, ViT
from sparsync_lab.models.imagenet import IMAGENET
from sparsync_lab.models.recurrent import LSTMAN4, LSTMPTB

__all__ = [
    "CATALOGUE",
    "GPT",
    "IMAGENET",
    "LSTMAN4",
    "LSTMPTB",
    "MODELS",
    "ModelSpec",
    "ViT",
    "build",
    "check_model",
    "count_parameters",
    "make_image_model",
    "mlp",
    "parameter_count",
]

MODELS = ("mlp", "lenet5", "fnn3", "resnet20", "vgg16", "resnet18")
HIDDEN = {28: (200, 200)}  # an MLP's hidden layers by the images' side; else 256 and 256
SHAPES = {"fnn3": (1, 28), "resnet20": (3, 32), "vgg16": (3, 32), "resnet18": (3, 32)}  # channels and side, as trained
LENET_SIDE = 28


def make_image_model(name: str, images: Images) -> nn.Sequential:
    """Build a model for ``images``, with fresh weights from torch's random state.

    Args:
        name: ``"mlp"``: three fully connected layers (64-256-256-10 on digits; 784-200-200-10 on MNIST, 199,210
            parameters), weights as torch draws them; ``"lenet5"``: 61,706 parameters on grey images, those of another
            size than 28 x 28 are resized for it; ``"fnn3"``: the mlp of MNIST with Xavier's weights; on CIFAR-10
            ``"resnet20"``, ``"vgg16"`` and ``"resnet18"``.
    """
    channels, side = images.channels, images.side
    check_model(name, channels, side, images.classes)
    if name == "mlp":
        sizes = [channels * side**2, *HIDDEN.get(side, (256, 256)), images.classes]
        return nn.Sequential(nn.Flatten(), *mlp(sizes))
    if name == "lenet5":
        resize = [] if side == LENET_SIDE else [nn.Upsample(size=LENET_SIDE, mode="bilinear")]
        return nn.Sequential(*resize, *lenet5(channels, images.classes))
    made = build(name)
    assert isinstance(made, nn.Sequential)
    return made


def check_model(name: str, channels: int, side: int, classes: int = 10) -> None:
    """Raise if the model called ``name`` cannot be built for such images."""
    if name not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}")
    if name in SHAPES and ((channels, side) != SHAPES[name] or classes != 10):
        wanted, size = SHAPES[name]
        raise ValueError(
            f"model {name} is for images of {wanted} x {size} x {size} in 10 classes, got {channels} x {side} x {side} "
            f"in {classes}"
        )


def parameter_count(name: str, images: Images) -> int:
    """Return the number of a model's parameters."""
    return count_parameters(lambda: make_image_model(name, images))
