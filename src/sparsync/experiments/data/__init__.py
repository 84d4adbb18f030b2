"""What is trained on: images, text, speech."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from sparsync.experiments.data import cifar, handwriting, speech, text
from sparsync.experiments.data.cifar import read_cifar10
from sparsync.experiments.data.files import FOLDER_VARIABLE, data_folder
from sparsync.experiments.data.handwriting import MNIST, read_mnist
from sparsync.experiments.data.images import Images, augment, check_workers, moment
from sparsync.experiments.data.pictures import Pictures, read_pictures
from sparsync.experiments.data.speech import Speech, read_an4, spectrogram, speech_batch
from sparsync.experiments.data.spelling import greedy, labels_of, word_error_rate
from sparsync.experiments.data.text import Text, read_ptb, streams, windows

__all__ = [
    "DATA",
    "FOLDER_VARIABLE",
    "MNIST",
    "SHAPES",
    "TEST_IMAGES",
    "Images",
    "Pictures",
    "Speech",
    "Text",
    "augment",
    "check_workers",
    "cifar10_there",
    "count",
    "greedy",
    "labels_of",
    "load",
    "load_an4",
    "load_ptb",
    "moment",
    "read_an4",
    "read_cifar10",
    "read_mnist",
    "read_pictures",
    "read_ptb",
    "spectrogram",
    "speech_batch",
    "streams",
    "windows",
    "word_error_rate",
]

DATA = ("digits", "mnist", "cifar10", "cifar10-half")
# Channels and side of the images.
SHAPES: Mapping[str, tuple[int, int]] = {
    "digits": (1, 8),
    "mnist": (1, 28),
    "cifar10": (3, cifar.SIDE),
    "cifar10-half": (3, cifar.SIDE),
}
TEST_IMAGES = {
    "digits": handwriting.DIGITS_TEST,
    "mnist": handwriting.MNIST_TEST,
    "cifar10": cifar.TEST,
    "cifar10-half": cifar.HALF_TEST * cifar.CLASSES,
}


@lru_cache(maxsize=2)  # a worker trains several times on the same images
def load(name: str, folder: Path | None = None) -> Images:
    """The images called ``name``, the same and in the same order every time.

    Args:
        name: ``"digits"``, ``"mnist"``, ``"cifar10"``, or ``"cifar10-half"``: the first 2,500 training and 300 test
            images of every class.
        folder: where files lie, in it or in a subfolder ``mnist`` or ``cifar10``; ``None``: ``$SPARSYNC_DATA``.
    """
    if name == "mnist":
        return read_mnist(_mnist_folder(folder))
    if name.startswith("cifar10") and name in DATA:
        return read_cifar10(_cifar_folder(folder), half=name == "cifar10-half")
    count(name)
    return handwriting.read_digits()


def count(name: str, folder: Path | None = None) -> int:
    """How many training images there are; raises what ``load`` would, without the time to load them."""
    if name not in DATA:
        raise ValueError(f"data must be one of {', '.join(DATA)}, got {name!r}")
    if name == "digits":
        handwriting.check_digits()
        return handwriting.DIGITS - handwriting.DIGITS_TEST
    if name == "mnist":
        handwriting.check_mnist(_mnist_folder(folder))
        return handwriting.MNIST_TRAIN
    half = name == "cifar10-half"
    cifar.check_cifar10(_cifar_folder(folder), half)
    return cifar.HALF_TRAIN * cifar.CLASSES if half else cifar.TRAIN


def cifar10_there(folder: Path | None = None) -> str:
    """``"cifar10"``, or ``"cifar10-half"`` where only that is there."""
    return "cifar10-half" if cifar.only_half(_cifar_folder(folder)) else "cifar10"


def load_ptb(folder: Path | None = None) -> Text:
    """The Penn Treebank; its files are in ``folder``, its subfolder ``ptb``, or ``$SPARSYNC_DATA``."""
    return read_ptb(data_folder(folder, "the Penn Treebank", text.SOURCE))


def load_an4(folder: Path | None = None) -> Speech:
    """AN4; its files are in ``folder``, its subfolder ``an4``, or ``$SPARSYNC_DATA``."""
    return read_an4(data_folder(folder, "AN4", speech.SOURCE))


def _mnist_folder(folder: Path | None) -> Path:
    return data_folder(folder, "MNIST", handwriting.MNIST_SOURCE)


def _cifar_folder(folder: Path | None) -> Path:
    return data_folder(folder, "CIFAR-10", cifar.SOURCE)
