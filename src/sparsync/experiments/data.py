"""Images to train on: scikit-learn's bundled digits, and MNIST from its four original files."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

DATA = ("digits", "mnist")
FOLDER_VARIABLE = "SPARSYNC_DATA"
DIGITS, DIGITS_TEST = 1797, 450

# The original files and their published MD5 sums, in the order: training images, labels, test images, labels.
MNIST: Mapping[str, str] = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
MNIST_TRAIN, MNIST_TEST = 60_000, 10_000
TEST_IMAGES = {"digits": DIGITS_TEST, "mnist": MNIST_TEST}
MNIST_SOURCE = "MNIST's four original files are at https://ossci-datasets.s3.amazonaws.com/mnist/"


@dataclass(frozen=True)
class Images:
    """Images ``(n, 1, side, side)``, standardised by the training images, and labels ``(n,)`` below ``classes``."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int

    @property
    def side(self) -> int:
        return self.train_x.shape[-1]

    def shard(self, rank: int, workers: int) -> tuple[Tensor, Tensor]:
        """The training images of one worker: every ``workers``-th, all shards of the same size."""
        size = len(self.train_x) // workers
        return self.train_x[rank::workers][:size], self.train_y[rank::workers][:size]


@lru_cache(maxsize=2)  # a worker trains several times on the same images
def load(name: str, folder: Path | None = None) -> Images:
    """The images called ``name`` (``"digits"`` or ``"mnist"``), the same and in the same order every time.

    Args:
        folder: for MNIST, where its files lie, in it or in its subfolder ``mnist``; ``None``: ``$SPARSYNC_DATA``.
    """
    if name == "mnist":
        return read_mnist(_folder(folder))
    count(name)
    return _digits()


def count(name: str, folder: Path | None = None) -> int:
    """How many training images there are; raises what ``load`` would, without the time to load them."""
    if name not in DATA:
        raise ValueError(f"data must be one of {', '.join(DATA)}, got {name!r}")
    if name == "digits":
        if find_spec("sklearn") is None:
            raise ValueError("the digits come with scikit-learn: pip install 'sparsync[lab]'")
        return DIGITS - DIGITS_TEST
    _files(_folder(folder), MNIST)
    return MNIST_TRAIN


def check_workers(workers: int, images: int, batch: int) -> None:
    """Every worker must have a batch of its own among the training images."""
    most = images // batch
    if most < 1:
        raise ValueError(f"batch must be at most {images}, the number of training images, got {batch}")
    if not 1 <= workers <= most:
        raise ValueError(f"workers must be from 1 to {most}, so that each has {batch} images, got {workers}")


def read_mnist(folder: Path, checksums: Mapping[str, str] = MNIST) -> Images:
    """MNIST from the files in ``folder`` or ``folder/mnist``; a file whose MD5 sum differs is refused."""
    train_x, train_y, test_x, test_y = (_read_idx(path) for path in _files(folder, checksums))
    for kind, x, y in (("train", train_x, train_y), ("t10k", test_x, test_y)):
        if x.dim() != 3 or y.shape != x.shape[:1]:
            raise ValueError(
                f"MNIST in {folder}: {kind} has images {tuple(x.shape)} and labels {tuple(y.shape)}, which do not match"
            )
    mean, deviation = train_x.double().mean().item(), train_x.double().std().item()

    def standardised(x: Tensor) -> Tensor:
        return x.to(torch.float32).sub_(mean).div_(deviation or 1.0).unsqueeze(1)

    return Images(standardised(train_x), train_y.long(), standardised(test_x), test_y.long(), 10)


def _digits() -> Images:
    """450 images for the test, 1,347 for training."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    assert len(images) == DIGITS
    order = np.random.default_rng(0).permutation(DIGITS)
    x = torch.tensor(images[order], dtype=torch.float32)
    y = torch.tensor(labels[order], dtype=torch.int64)
    mean, deviation = x[DIGITS_TEST:].mean(0), x[DIGITS_TEST:].std(0)
    x = (x - mean) / torch.where(deviation > 0, deviation, 1.0)  # some corner pixels are always 0
    x = x.view(-1, 1, 8, 8)
    return Images(x[DIGITS_TEST:], y[DIGITS_TEST:], x[:DIGITS_TEST], y[:DIGITS_TEST], 10)


def _folder(folder: Path | None) -> Path:
    if folder is None:
        given = os.environ.get(FOLDER_VARIABLE)
        if not given:
            raise ValueError(f"where is MNIST? Give --data-dir or set ${FOLDER_VARIABLE}; {MNIST_SOURCE}")
        folder = Path(given)
    if not folder.is_dir():
        raise ValueError(f"the data folder {folder} does not exist or is no folder; {MNIST_SOURCE}")
    return folder


def _files(folder: Path, checksums: Mapping[str, str]) -> list[Path]:
    """The files, all there and with the sums they should have."""
    found = []
    for name, expected in checksums.items():
        places = [folder / "mnist" / name, folder / name]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            raise ValueError(f"{name} is missing: looked for {places[0]} and {places[1]}; {MNIST_SOURCE}")
        actual = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
        if actual != expected:
            raise ValueError(f"{path} is not the original: its MD5 sum is {actual}, not {expected}; {MNIST_SOURCE}")
        found.append(path)
    return found


def _read_idx(path: Path) -> Tensor:
    """An idx file of bytes: two zeros, the type 8, the number of dimensions, their sizes (big-endian), the entries."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be unpacked: {error}; {MNIST_SOURCE}") from None
    dimensions = content[3] if len(content) > 3 else 0
    start = 4 + 4 * dimensions
    if content[:3] != b"\0\0\x08" or len(content) < start:
        raise ValueError(f"{path} is not an idx file of bytes; {MNIST_SOURCE}")
    shape = np.frombuffer(content, ">u4", dimensions, offset=4).astype(int).tolist()
    if len(content) - start != int(np.prod(shape)):
        raise ValueError(f"{path} says it has {shape} entries and holds {len(content) - start} bytes; {MNIST_SOURCE}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(shape)
