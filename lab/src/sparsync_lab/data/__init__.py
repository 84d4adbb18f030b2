"""The data sets: images, text, speech."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from sparsync_lab.data import an4, cifar10, mnist, ptb
from sparsync_lab.data.an4 import Speech, read_an4, spectrogram, speech_batch
from sparsync_lab.data.cifar10 import read_cifar10
from sparsync_lab.data.ctc import greedy_decode, text_to_labels, word_error_rate
from sparsync_lab.data.files import FOLDER_VARIABLE, data_folder
from sparsync_lab.data.image_folder import ImageFolder, read_image_folder
from sparsync_lab.data.images import Images, augment, check_workers, step_generator
from sparsync_lab.data.mnist import MNIST, read_mnist
from sparsync_lab.data.ptb import PennTreebank, read_ptb, streams, windows

__all__ = [
    "DATA",
    "FOLDER_VARIABLE",
    "MNIST",
    "SHAPES",
    "TEST_IMAGES",
    "ImageFolder",
    "Images",
    "PennTreebank",
    "Speech",
    "augment",
    "available_cifar10",
    "check_workers",
    "greedy_decode",
    "load",
    "load_an4",
    "load_ptb",
    "read_an4",
    "read_cifar10",
    "read_image_folder",
    "read_mnist",
    "read_ptb",
    "spectrogram",
    "speech_batch",
    "step_generator",
    "streams",
    "text_to_labels",
    "train_size",
    "windows",
    "word_error_rate",
]

DATA = ("digits", "mnist", "cifar10", "cifar10-half")
# Channels and side of the images.
SHAPES: Mapping[str, tuple[int, int]] = {
    "digits": (1, 8),
    "mnist": (1, 28),
    "cifar10": (3, cifar10.SIDE),
    "cifar10-half": (3, cifar10.SIDE),
}
TEST_IMAGES = {
    "digits": mnist.DIGITS_TEST,
    "mnist": mnist.MNIST_TEST,
    "cifar10": cifar10.TEST,
    "cifar10-half": cifar10.HALF_TEST * cifar10.CLASSES,
}


@lru_cache(maxsize=2)  # a worker trains several times on the same images
def load(name: str, folder: Path | None = None) -> Images:
    """Load the images called ``name``, the same and in the same order every time.

    Args:
        name: ``"digits"``, ``"mnist"``, ``"cifar10"``, or ``"cifar10-half"``: the first 2,500 training and 300 test
            images of every class.
        folder: where files lie, in it or in a subfolder ``mnist`` or ``cifar10``; ``None``: ``$SPARSYNC_DATA``.
    """
    if name == "mnist":
        return read_mnist(_mnist_folder(folder))
    if name.startswith("cifar10") and name in DATA:
        return read_cifar10(_cifar_folder(folder), half=name == "cifar10-half")
    train_size(name)
    return mnist.read_digits()


def train_size(name: str, folder: Path | None = None) -> int:
    """Return the number of training images; raise what ``load`` would, without the time to load them."""
    if name not in DATA:
        raise ValueError(f"data must be one of {', '.join(DATA)}, got {name!r}")
    if name == "digits":
        mnist.check_digits()
        return mnist.DIGITS - mnist.DIGITS_TEST
    if name == "mnist":
        mnist.check_mnist(_mnist_folder(folder))
        return mnist.MNIST_TRAIN
    half = name == "cifar10-half"
    cifar10.check_cifar10(_cifar_folder(folder), half)
    return cifar10.HALF_TRAIN * cifar10.CLASSES if half else cifar10.TRAIN


def available_cifar10(folder: Path | None = None) -> str:
    """Return ``"cifar10"``, or ``"cifar10-half"`` where only that is there."""
    return "cifar10-half" if cifar10.has_only_half(_cifar_folder(folder)) else "cifar10"


def load_ptb(folder: Path | None = None) -> PennTreebank:
    """Load the Penn Treebank; its files are in ``folder``, its subfolder ``ptb``, or ``$SPARSYNC_DATA``."""
    return read_ptb(data_folder(folder, "the Penn Treebank", ptb.SOURCE))


def load_an4(folder: Path | None = None) -> Speech:
    """Load AN4; its files are in ``folder``, its subfolder ``an4``, or ``$SPARSYNC_DATA``."""
    return read_an4(data_folder(folder, "AN4", an4.SOURCE))


def _mnist_folder(folder: Path | None) -> Path:
    return data_folder(folder, "MNIST", mnist.MNIST_SOURCE)


def _cifar_folder(folder: Path | None) -> Path:
    return data_folder(folder, "CIFAR-10", cifar10.SOURCE)
