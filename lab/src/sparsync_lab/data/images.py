"""Images to train on, sharding and augmentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

PADDING = 4  # pixels round an image before a piece of its size is cut out


@dataclass(frozen=True)
class Images:
    """Images ``(n, channels, side, side)`` and labels ``(n,)`` below ``classes``.

    They are standardised by the training images, or, to save memory, bytes that ``inputs`` standardises.

    Args:
        mean, deviation: of bytes, by channel: ``(channels, 1, 1)``.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    mean: Tensor | None = None
    std: Tensor | None = None

    @property
    def side(self) -> int:
        return self.train_x.shape[-1]

    @property
    def channels(self) -> int:
        return self.train_x.shape[1]

    def shard(self, rank: int, workers: int) -> tuple[Tensor, Tensor]:
        """Return the training images of one worker: every ``workers``-th, all shards of the same size."""
        size = len(self.train_x) // workers
        return self.train_x[rank::workers][:size], self.train_y[rank::workers][:size]

    def inputs(self, x: Tensor, generator: torch.Generator | Sequence[torch.Generator] | None = None) -> Tensor:
        """Return some of the images as a model takes them, on the device they are on.

        Args:
            generator: for training: images that are bytes are cut and flipped at random first. Digits never are. Of
                several, each draws for its share of the images, one after another.
        """
        if self.mean is None or self.std is None:
            return x
        if generator is not None:
            x = augment(x, generator)
        return (x.float() - self.mean.to(x.device)) / self.std.to(x.device)


def augment(x: Tensor, generator: torch.Generator | Sequence[torch.Generator], padding: int = PADDING) -> Tensor:
    """Shift each image of ``(n, channels, height, width)`` by up to ``padding`` pixels either way, black coming in at
    the edges, and mirror half of them.

    Args:
        generator: where the choices are drawn; one of the CPU chooses the same for images on any device. Of several,
            each draws for its share of the images, one after another.
    """
    n, channels, height, width = x.shape
    several = [generator] if isinstance(generator, torch.Generator) else generator
    drawn = [_draw(n // len(several), padding, one) for one in several]
    top, left, mirrored = torch.cat(drawn, 1).to(x.device).unbind()
    rows = top + torch.arange(height, device=x.device)
    across = torch.arange(width, device=x.device)
    columns = left + torch.where(mirrored > 0, across.flip(0), across)
    image = torch.arange(n, device=x.device).view(n, 1, 1, 1)
    channel = torch.arange(channels, device=x.device).view(1, channels, 1, 1)
    padded = nn.functional.pad(x, (padding,) * 4)
    return padded[image, channel, rows.view(n, 1, height, 1), columns.view(n, 1, 1, width)]


def _draw(n: int, padding: int, rng: torch.Generator) -> Tensor:
    """Draw how far down and across ``n`` images are cut, and whether they are mirrored: ``(3, n, 1)``."""
    limits = (2 * padding + 1, 2 * padding + 1, 2)
    return torch.stack([torch.randint(below, (n, 1), generator=rng, device=rng.device) for below in limits])


def step_generator(seed: int, rank: int, step: int) -> torch.Generator:
    """Return a generator for one worker's step: a training that is resumed there draws the same again."""
    return torch.Generator().manual_seed(((seed * 1_000_003 + rank) * 1_000_003 + step) % 2**63)


def check_workers(workers: int, images: int, batch: int) -> None:
    """Raise unless every worker has a batch of its own among the training images."""
    most = images // batch
    if most < 1:
        raise ValueError(f"batch must be at most {images}, the number of training images, got {batch}")
    if not 1 <= workers <= most:
        raise ValueError(f"workers must be from 1 to {most}, so that each has {batch} images, got {workers}")
