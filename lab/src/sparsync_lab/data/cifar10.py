"""CIFAR-10 from one of its original archives, or from three lossless packs in WebP that are half as large.

The packs are numpy archives: of ``train`` and ``test``, labels (``train_y``), places in the original order
(``train_index``), and WebP images that hold 100 of them one under another (``train_webp_000``, ...).
"""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsync_lab.data.files import candidate_paths, find_file, verified_files
from sparsync_lab.data.images import Images
from sparsync_lab.packages import require

CLASSES, SIDE = 10, 32
TRAIN, TEST = 50_000, 10_000
HALF_TRAIN, HALF_TEST = 2500, 300  # of every class, the first
# By channel, of all training images.
MEAN = (0.49139968, 0.48215841, 0.44653091)
STD = (0.24703223, 0.24348513, 0.26158784)
ARCHIVES: Mapping[str, str] = {  # with the published MD5 sums
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
}
PACKS: Mapping[str, str] = {
    "cifar10-device.npz": "8ef746f90504c9672acd7f02a409b3b2fd1347b15242b5da5894387c0fc42c52",
    "cifar10-rest-train.npz": "4bcff26d6421019e3767dd2d209e10722a6fda00a631c30f30c10ea2c105ff05",
    "cifar10-rest-test.npz": "82f0176200022f788ddbcd13e2fcbf37b963229dd6879f44ee18a38012b0a04a",
}
HALF_PACK = "cifar10-device.npz"  # holds exactly the half
SOURCE = (
    "CIFAR-10's archives cifar-10-binary.tar.gz and cifar-10-python.tar.gz are at "
    "https://www.cs.toronto.edu/~kriz/cifar.html; one of them is enough"
)
BATCHES = [f"data_batch_{i}" for i in range(1, 6)]

Bytes = NDArray[np.uint8]
Part = tuple[str, Bytes, Bytes, NDArray[Any]]  # train or test, images as rows, labels, places in the original order
Reader = Callable[[Path], Iterator[Part]]


def check_cifar10(
    folder: Path, half: bool, packs: Mapping[str, str] = PACKS, archives: Mapping[str, str] = ARCHIVES
) -> tuple[list[Path], Reader]:
    """Return the files to read, verified, and the function that reads each; looks into ``folder/cifar10`` and
    ``folder``."""
    wanted = {HALF_PACK: packs[HALF_PACK]} if half else packs
    if all(find_file(folder, "cifar10", name) for name in wanted):
        require("PIL")
        return verified_files(folder, "cifar10", wanted, SOURCE), _read_pack
    for name, checksum in archives.items():
        if find_file(folder, "cifar10", name):
            reader = _read_binary if "binary" in name else _read_pickled
            return verified_files(folder, "cifar10", {name: checksum}, SOURCE), reader
    looked = " and ".join(str(place.parent) for place in candidate_paths(folder, "cifar10", HALF_PACK))
    lacking = [name for name in wanted if not find_file(folder, "cifar10", name)]
    other = "; the half of it that is there is called cifar10-half" if HALF_PACK not in lacking else ""
    names = ", ".join([*lacking, *archives])
    raise ValueError(f"CIFAR-10 is missing: looked for {names} in {looked}{other}; {SOURCE}")


def has_only_half(folder: Path) -> bool:
    """Return whether the pack with half of CIFAR-10 is there, and nothing that holds all of it. Reads no file."""
    there = {name for name in (*PACKS, *ARCHIVES) if find_file(folder, "cifar10", name)}
    return HALF_PACK in there and not there >= PACKS.keys() and not there & ARCHIVES.keys()


def read_cifar10(
    folder: Path, half: bool = False, packs: Mapping[str, str] = PACKS, archives: Mapping[str, str] = ARCHIVES
) -> Images:
    """Read CIFAR-10 as bytes, in its original order.

    Args:
        folder: where its files lie, in it or in its subfolder ``cifar10``; a file whose checksum differs is refused.
        half: only the first 2,500 training and 300 test images of every class.
    """
    paths, read = check_cifar10(folder, half, packs, archives)
    parts = [part for path in paths for part in read(path)]
    train, test = (_in_order(parts, split) for split in ("train", "test"))
    if half:
        train, test = _first_of_class(*train, HALF_TRAIN), _first_of_class(*test, HALF_TEST)
    mean, std = (255 * torch.tensor(row).view(3, 1, 1) for row in (MEAN, STD))
    return Images(*train, *test, CLASSES, mean, std)


def _in_order(parts: list[Part], split: str) -> tuple[Tensor, Tensor]:
    """Return a split's images and labels in their original order; a part is freed once it has been copied."""
    own = [part for part in parts if part[0] == split]
    parts[:] = [part for part in parts if part[0] != split]
    index = np.concatenate([candidate_paths for _, _, _, candidate_paths in own]).astype(np.int64)
    order = np.empty_like(index)
    order[index.argsort()] = np.arange(len(index))  # the half keeps its order, without the gaps
    x = np.empty((len(index), 3, SIDE, SIDE), np.uint8)
    y = np.empty(len(index), np.int64)
    at = 0
    while own:
        _, images, labels, _ = own.pop(0)
        to = order[at : at + len(labels)]
        x[to] = images.reshape(-1, 3, SIDE, SIDE)
        y[to] = labels
        at += len(labels)
    return torch.from_numpy(x), torch.from_numpy(y)


def _first_of_class(x: Tensor, y: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the first ``most`` images of every class."""
    hot = torch.nn.functional.one_hot(y, CLASSES)
    number = hot.cumsum(0).gather(1, y.unsqueeze(1)).squeeze(1)  # of each image within its class, from 1
    keep = number <= most
    return (x, y) if bool(keep.all()) else (x[keep], y[keep])


def _read_pack(path: Path) -> Iterator[Part]:
    from PIL import Image

    with np.load(path, allow_pickle=False) as pack:
        for split in ("train", "test"):
            if f"{split}_y" not in pack.files:
                continue
            labels, at = pack[f"{split}_y"], 0
            images = np.empty((len(labels), 3, SIDE, SIDE), np.uint8)
            for name in (name for name in pack.files if name.startswith(f"{split}_webp")):
                with Image.open(io.BytesIO(pack[name].tobytes())) as image:
                    rows = np.asarray(image.convert("RGB")).reshape(-1, SIDE, SIDE, 3)
                images[at : at + len(rows)] = rows.transpose(0, 3, 1, 2)
                at += len(rows)
            yield split, images, labels, pack[f"{split}_index"]


def _read_binary(path: Path) -> Iterator[Part]:
    """Yield the batches of the binary archive: each image a label and 3,072 bytes, channel by channel."""
    for split, start, content in _members(path, ".bin"):
        rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * SIDE * SIDE)
        yield split, rows[:, 1:], rows[:, 0], start + np.arange(len(rows))


def _read_pickled(path: Path) -> Iterator[Part]:
    for split, start, content in _members(path, ""):
        batch = _SafeUnpickler(io.BytesIO(content), encoding="bytes").load()
        labels = np.array(batch[b"labels"], np.uint8)
        yield split, batch[b"data"], labels, start + np.arange(len(labels))


def _members(path: Path, suffix: str) -> Iterator[tuple[str, int, bytes]]:
    """Yield, of the batches in an archive: train or test, the place of their first image, and their content."""
    order = {f"{name}{suffix}": ("train", 10_000 * i) for i, name in enumerate(BATCHES)}
    order[f"test_batch{suffix}"] = ("test", 0)
    with tarfile.open(path) as archive:
        for member in archive:
            name = Path(member.name).name
            if name in order and (file := archive.extractfile(member)) is not None:
                yield *order.pop(name), file.read()
    if order:
        raise ValueError(f"{path} lacks {', '.join(order)}; {SOURCE}")


class _SafeUnpickler(pickle.Unpickler):
    """Unpickle arrays and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core", "numpy._core")
        allowed = {("numpy._core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")}
        if (module, name) not in {*allowed, ("_codecs", "encode")}:
            raise ValueError(f"a batch of CIFAR-10 holds {module}.{name}, which no original does; {SOURCE}")
        return super().find_class(module, name)
