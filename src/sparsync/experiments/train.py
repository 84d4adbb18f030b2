"""One training on real processes: the demo's rows come from here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.experiments.digits import Digits
from sparsync.experiments.workers import run

PLAIN = "plain DDP"  # the method that is no method of ours
REPORT_EVERY = 10  # steps
WARM_UP = 5  # steps that are not timed: the first ones set up buckets and connections


@dataclass(frozen=True)
class Training:
    """What is trained, and how.

    Args:
        method: ``"plain DDP"``, or a compressor's name.
        density: share of the entries to send, in (0, 1]; not used by plain DDP.
        seed: of the initial weights and the order of the images.
        steps: of the optimizer.
        batch: images per worker and step.
        rate: learning rate of plain SGD, without momentum: behind sparse error feedback, which already delays
            gradients, momentum of 0.9 harms short trainings.
        sizes: widths of the layers.
    """

    method: str
    density: float = 0.01
    seed: int = 0
    steps: int = 300
    batch: int = 32
    rate: float = 0.2
    sizes: tuple[int, ...] = (64, 256, 256, 10)

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {self.density:g}")
        if self.steps < 1:
            raise ValueError(f"steps must be 1 or more, got {self.steps}")
        if self.batch < 1:
            raise ValueError(f"batch must be 1 or more, got {self.batch}")


@dataclass(frozen=True)
class Outcome:
    """What came of a training.

    Args:
        accuracy: share of the test images that are classified correctly.
        bytes: put on the network by one worker in one step.
        density: share of the entries that was sent, over all steps; small tensors, which travel dense, included.
        step_s: median time of a step, in seconds.
    """

    accuracy: float
    bytes: float
    density: float
    step_s: float


@dataclass(frozen=True)
class Job:
    """A training and its data, as they travel to the workers."""

    training: Training
    digits: Digits = field(repr=False)


def train_all(
    trainings: Sequence[Training], digits: Digits, workers: int, progress: Callable[[int], None]
) -> list[Outcome]:
    """Run the trainings one after another on the same ``workers`` processes."""
    check_workers(workers, digits, max(training.batch for training in trainings))
    return run(train, workers, [Job(training, digits) for training in trainings], progress)


def check_workers(workers: int, digits: Digits, batch: int) -> None:
    """Every worker must have a batch of its own."""
    most = len(digits.train_x) // batch
    if not 1 <= workers <= most:
        raise ValueError(f"workers must be from 1 to {most}, so that each has {batch} images, got {workers}")


def dense_bytes(numel: int, workers: int) -> float:
    """Bytes a worker puts on the network when plain DDP averages ``numel`` fp32 entries in a ring."""
    return 2 * (workers - 1) / workers * numel * 4


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """Fully connected layers with ReLU between them."""
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(sizes):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(rank: int, workers: int, job: Job, report: Callable[[int], None]) -> Outcome:
    """One training, on one of the workers."""
    config, (x, y) = job.training, job.digits.shard(rank, workers)
    torch.manual_seed(config.seed)
    model = mlp(config.sizes)
    ddp = DistributedDataParallel(model)
    sync = None if config.method == PLAIN else sparsync.attach(ddp, config.method, density=config.density)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=config.rate)
    order = torch.Generator().manual_seed(1000 * config.seed + rank)
    times = []
    for step, batch in enumerate(batches(len(x), config.batch, config.steps, order), 1):
        begun = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        times.append(time.perf_counter() - begun)
        if step % REPORT_EVERY == 0 or step == config.steps:
            report(step % REPORT_EVERY or REPORT_EVERY)
    with torch.no_grad():
        accuracy = (model(job.digits.test_x).argmax(1) == job.digits.test_y).float().mean().item()
    step_s = statistics.median(times[WARM_UP:] or times)
    if sync is None:
        numel = sum(parameter.numel() for parameter in model.parameters())
        return Outcome(accuracy, dense_bytes(numel, workers), 1.0, step_s)
    stats = sync.stats()
    outcome = Outcome(accuracy, stats.step.traffic, stats.total.density, step_s)
    sync.detach()
    return outcome


def batches(images: int, batch: int, steps: int, order: torch.Generator) -> list[torch.Tensor]:
    """Indices for every step: all images in a new order each epoch, whole batches only."""
    chosen: list[torch.Tensor] = []
    while len(chosen) < steps:
        shuffled = torch.randperm(images, generator=order)
        chosen += shuffled[: images // batch * batch].view(-1, batch)
    return chosen[:steps]
