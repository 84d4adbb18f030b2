"""Handwritten digits: scikit-learn's bundled ones, and MNIST from its four original files."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparsync_lab.data.files import verified_files
from sparsync_lab.data.images import Images
from sparsync_lab.packages import require

DIGITS, DIGITS_TEST = 1797, 450

# The original files and their published MD5 sums, in the order: training images, labels, test images, labels.
MNIST: Mapping[str, str] = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
MNIST_TRAIN, MNIST_TEST = 60_000, 10_000
MNIST_SOURCE = "MNIST's four original files are at https://ossci-datasets.s3.amazonaws.com/mnist/"


def check_digits() -> None:
    """Raise if scikit-learn, which the digits come with, is missing."""
    require("sklearn")


def check_mnist(folder: Path, checksums: Mapping[str, str] = MNIST) -> list[Path]:
    """Return the paths of MNIST's files in ``folder`` or ``folder/mnist``; one whose MD5 sum differs is refused."""
    return verified_files(folder, "mnist", checksums, MNIST_SOURCE)


def read_mnist(folder: Path, checksums: Mapping[str, str] = MNIST) -> Images:
    """Read MNIST from the files in ``folder`` or ``folder/mnist``; a file whose MD5 sum differs is refused."""
    train_x, train_y, test_x, test_y = (_read_idx(path) for path in check_mnist(folder, checksums))
    for kind, x, y in (("train", train_x, train_y), ("t10k", test_x, test_y)):
        if x.dim() != 3 or y.shape != x.shape[:1]:
            raise ValueError(
                f"MNIST in {folder}: {kind} has images {tuple(x.shape)} and labels {tuple(y.shape)}, which do not match"
            )
    mean, std = train_x.double().mean().item(), train_x.double().std().item()

    def standardized(x: Tensor) -> Tensor:
        return x.to(torch.float32).sub_(mean).div_(std or 1.0).unsqueeze(1)

    return Images(standardized(train_x), train_y.long(), standardized(test_x), test_y.long(), 10)


def read_digits() -> Images:
    """Read scikit-learn's digits: 450 images for the test, 1,347 for training."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    assert len(images) == DIGITS
    order = np.random.default_rng(0).permutation(DIGITS)
    x = torch.tensor(images[order], dtype=torch.float32)
    y = torch.tensor(labels[order], dtype=torch.int64)
    mean, std = x[DIGITS_TEST:].mean(0), x[DIGITS_TEST:].std(0)
    x = (x - mean) / torch.where(std > 0, std, 1.0)  # some corner pixels are always 0
    x = x.view(-1, 1, 8, 8)
    return Images(x[DIGITS_TEST:], y[DIGITS_TEST:], x[:DIGITS_TEST], y[:DIGITS_TEST], 10)


def _read_idx(path: Path) -> Tensor:
    """Read an idx file of bytes: two zeros, the type 8, the number of dimensions, their sizes (big-endian), the
    entries."""
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
