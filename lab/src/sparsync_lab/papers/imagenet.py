"""The task for ImageNet: images are read from their folders as they are needed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from sparsync_lab import virtual
from sparsync_lab.data import ImageFolder, read_image_folder, step_generator
from sparsync_lab.data.image_folder import standardize
from sparsync_lab.papers.tasks import Batch, Task

TEST_BATCH = 100


def image_folder_task(
    folder: Path,
    model: nn.Module,
    device: torch.device,
    workers: int,
    batch: int,
    seed: int,
    limit: int | None = None,
    side: int = 224,
) -> Task:
    """Return the task to classify the images in ``folder/train`` and ``folder/val``.

    Args:
        limit: for a tiny setting: images that are trained on and tested with.
        side: of the pieces that are cut out of them.
    """
    train, test = (read_image_folder(folder, split, side) for split in ("train", "val"))
    if train.classes != test.classes:
        odd = sorted(set(train.classes) ^ set(test.classes))
        raise ValueError(f"train and val must hold the same classes, and only one of them has {', '.join(odd[:5])}")
    train, test = (_subset(split, limit) if limit is not None else split for split in (train, test))
    shards = [train.shard(rank, workers) for rank in range(workers)]

    def loss(model: nn.Module, batch: Batch, carried: Batch) -> tuple[Tensor, Batch]:
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels), carried

    def batches(start: int) -> Iterator[list[Batch]]:
        for step, chosen in enumerate(virtual.worker_indices([len(shards[0])] * workers, batch, seed, start), start):
            made: list[Batch] = []
            for rank, picked in enumerate(chosen):
                images, labels = train.batch(shards[rank][picked], step_generator(seed, rank, step))
                made.append((standardize(images.to(device)), labels.to(device)))
            yield made

    def evaluate() -> float:
        right = 0
        with virtual.evaluating(model):
            for at in range(0, len(test.paths), TEST_BATCH):
                images, labels = test.batch(range(at, min(at + TEST_BATCH, len(test.paths))))
                right += int((model(standardize(images.to(device))).argmax(1).cpu() == labels).sum())
        return right / len(test.paths)

    size = f"{len(train.paths):,} images, {len(test.paths):,} test images"
    return Task(
        model,
        loss,
        batches,
        epoch=max(1, len(shards[0]) // batch),
        evaluate=evaluate,
        score="accuracy",
        graph=device.type == "cuda",
        name="imagenet",
        size=size,
        checksum=_checksum([train, test]),
    )


def _subset(split: ImageFolder, limit: int) -> ImageFolder:
    """Return some of the images, from first to last, so that many classes are among them."""
    count = min(limit, len(split.paths))
    chosen = [i * len(split.paths) // count for i in range(count)]
    return replace(split, paths=tuple(split.paths[i] for i in chosen), labels=split.labels[chosen])


def _checksum(splits: list[ImageFolder]) -> str:
    """Return a checksum of names and sizes: to read all of ImageNet would take an hour."""
    digest = hashlib.sha256()
    for split in splits:
        for path in split.paths:
            digest.update(f"{path.parent.name}/{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()
