"""Images in folders, one for each class, as ImageNet is unpacked: read when they are asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparsync_lab.packages import require

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp")
SOURCE = "ImageNet is at https://image-net.org; unpack it into train/<class>/ and val/<class>/"
# By channel, of ImageNet.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SMALLEST, ASPECT = 0.08, 4 / 3  # of a random piece: its share of the area, and its sides' ratio at most
TRIES = 10


@dataclass(frozen=True)
class ImageFolder:
    """The images of one split.

    Args:
        paths: sorted by class, then by name: the same on every machine.
        labels: the number of each one's class, ``(n,)``.
        classes: their names, sorted.
        side: of the square pieces that ``batch`` cuts.
    """

    paths: tuple[Path, ...]
    labels: Tensor
    classes: tuple[str, ...]
    side: int = 224

    def shard(self, rank: int, workers: int) -> Tensor:
        """Return the numbers of one worker's images: every ``workers``-th, all shards of the same size."""
        return torch.arange(rank, len(self.paths), workers)[: len(self.paths) // workers]

    def batch(self, picked: Sequence[int] | Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Read images ``(n, 3, side, side)`` as bytes, and their labels.

        Args:
            picked: their numbers.
            generator: for training: pieces of random place, size and shape, half of them mirrored. Without, the middle
                of the image, whose shorter side is 8/7 of the piece's.
        """
        numbers = [int(i) for i in picked]
        # Every image's own draws, so that it does not matter which one is read first.
        seeds = [None] * len(numbers) if generator is None else _seeds(len(numbers), generator)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            cut = list(pool.map(self._crop, [self.paths[i] for i in numbers], seeds))
        return torch.stack(cut), self.labels[numbers]

    def _crop(self, path: Path, seed: int | None) -> Tensor:
        from PIL import Image

        generator = None if seed is None else torch.Generator().manual_seed(seed)
        try:
            with Image.open(path) as image:
                whole = image.convert("RGB")
        except OSError as error:
            raise ValueError(f"{path} cannot be read as an image: {error}") from None
        width, height = whole.size
        box = _center_box(width, height, 7 / 8) if generator is None else _random_box(width, height, generator)
        cut = whole.resize((self.side, self.side), Image.Resampling.BILINEAR, box=box)
        pixels = torch.from_numpy(np.array(cut)).permute(2, 0, 1)
        mirrored = generator is not None and _draw(generator) < 0.5
        return pixels.flip(2) if mirrored else pixels.contiguous()


def read_image_folder(folder: Path, split: str = "train", side: int = 224) -> ImageFolder:
    """List the images in ``folder/split`` or ``folder/imagenet/split``; only their names are read yet.

    Such folders have no published checksums; an image that cannot be read is refused when its turn comes.
    """
    require("PIL")
    candidate_paths = [folder / "imagenet" / split, folder / split]
    root = next((place for place in candidate_paths if place.is_dir()), None)
    if root is None:
        raise ValueError(
            f"the folder {split} is missing: looked for {candidate_paths[0]} and {candidate_paths[1]}; {SOURCE}"
        )
    classes = tuple(sorted(entry.name for entry in root.iterdir() if entry.is_dir()))
    found = [sorted(p for p in (root / name).iterdir() if p.suffix.lower() in SUFFIXES) for name in classes]
    empty = [name for name, paths in zip(classes, found, strict=True) if not paths]
    if empty or not classes:
        raise ValueError(f"{root} has no images in {', '.join(empty[:5]) or 'any subfolder'}; {SOURCE}")
    labels = torch.tensor([label for label, paths in enumerate(found) for _ in paths])
    return ImageFolder(tuple(path for paths in found for path in paths), labels, classes, side)


def standardize(pixels: Tensor) -> Tensor:
    """Return bytes ``(n, 3, side, side)`` as models of ImageNet take them."""
    mean, std = (255 * torch.tensor(row, device=pixels.device).view(3, 1, 1) for row in (MEAN, STD))
    return (pixels.float() - mean) / std


def _center_box(width: int, height: int, share: float) -> tuple[float, float, float, float]:
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random_box(width: int, height: int, generator: torch.Generator) -> tuple[float, float, float, float]:
    for _ in range(TRIES):
        area = width * height * (SMALLEST + (1 - SMALLEST) * _draw(generator))
        aspect = math.exp(math.log(ASPECT) * (2 * _draw(generator) - 1))
        padded, high = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if padded <= width and high <= height:
            left, top = (width - padded) * _draw(generator), (height - high) * _draw(generator)
            return left, top, left + padded, top + high
    return _center_box(width, height, 1.0)


def _draw(generator: torch.Generator) -> float:
    return torch.rand((), generator=generator).item()


def _seeds(count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(2**62, (count,), generator=generator).tolist()
