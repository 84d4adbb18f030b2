"""Batches for virtual workers: shards, order and crops are those of real ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from sparsync.simulate.sequential import Batch
from sparsync_lab.data import Images, check_workers, step_generator, streams
from sparsync_lab.training.loop import batch_indices


def image_batches(
    images: Images, workers: int, batch: int, *, device: torch.device | str = "cpu", seed: int = 0, start: int = 0
) -> Iterator[list[Batch]]:
    """Yield batches for every step from ``start`` on, without end: shards, order and crops are those of real workers.

    Args:
        batch: images per worker and step.
        device: the model's; all training images are brought there.
    """
    check_workers(workers, len(images.train_x), batch)
    x, y = images.train_x.to(device), images.train_y.to(device)
    ranks = torch.arange(workers).unsqueeze(1)
    for step, chosen in enumerate(worker_indices([len(x) // workers] * workers, batch, seed, start), start):
        places = (torch.stack(chosen) * workers + ranks).view(-1).to(device)
        crops = [step_generator(seed, rank, step) for rank in range(workers)]
        both = images.inputs(x.index_select(0, places), crops), y.index_select(0, places)
        yield list(zip(*(part.view(workers, batch, *part.shape[1:]).unbind() for part in both), strict=True))


def worker_indices(sizes: Sequence[int], batch: int, seed: int, start: int) -> Iterator[tuple[Tensor, ...]]:
    """Return what every worker takes of its shard, for every step from ``start`` on, without end: the order of real
    workers.

    Args:
        sizes: of the shards.
    """
    generators = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(len(sizes))]
    own = (batch_indices(size, batch, generator) for size, generator in zip(sizes, generators, strict=True))
    return zip(*(islice(order, start, None) for order in own), strict=False)


def token_batches(text: Tensor, workers: int, batch: int, length: int, *, start: int = 0) -> Iterator[list[Batch]]:
    """Yield windows of a text from step ``start`` on, without end: ``(batch, length)`` words, and those that follow
    them.

    Every worker reads on in its own streams, those of ``Text.shard``, and all begin again after ``epoch_steps`` steps:
    there ``VirtualWorkers.forget`` is due. Windows are whole; what is left at the end is not read.

    Args:
        text: ``(words,)``, on the model's device.
        batch: streams per worker.
        length: of a window.
    """
    epoch = epoch_steps(text, workers, batch, length)
    everyone = streams(text, workers * batch).view(workers, batch, -1)
    for step in itertools.count(start):
        at = step % epoch * length
        here, after = everyone[..., at : at + length], everyone[..., at + 1 : at + 1 + length]
        yield list(zip(here.unbind(), after.unbind(), strict=True))


def random_windows(
    text: Tensor, workers: int, batch: int, length: int, *, seed: int = 0, start: int = 0
) -> Iterator[list[Batch]]:
    """Yield windows as ``token_batches`` does, but from random places of the text, others in every step: no epoch cuts
    it alike. All workers together draw the same ones, however many they are.

    Args:
        seed: of the places.
    """
    epoch_steps(text, workers, batch, length)  # which refuses a text that is too short
    within = torch.arange(length + 1, device=text.device)
    for step in itertools.count(start):
        generator = step_generator(seed, 0, step)
        places = torch.randint(len(text) - length, (workers * batch, 1), generator=generator).to(text.device)
        drawn = text[places + within].view(workers, batch, -1)
        yield list(zip(drawn[..., :-1].unbind(), drawn[..., 1:].unbind(), strict=True))


def epoch_steps(text: Tensor, workers: int, batch: int, length: int) -> int:
    """Return the number of steps in which the workers read a text once."""
    steps = (len(text) // (workers * batch) - 1) // length
    if steps < 1:
        least = workers * batch * (length + 1)
        raise ValueError(f"text must have {least} words or more for {workers} x {batch} streams, got {len(text)}")
    return steps
