"""The loop of a training on virtual workers, its batches and its measures."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from sparsync.experiments.data import Images, check_workers, moment, streams
from sparsync.experiments.training import batches as orders
from sparsync.experiments.virtual.passes import Batch, Carried, Loss
from sparsync.experiments.virtual.team import VirtualWorkers


@dataclass(frozen=True)
class Point:
    """Where a training stands after ``step`` steps.

    Args:
        loss: mean over the workers and the steps since the point before.
        score: what ``evaluate`` gave: an accuracy, a perplexity; nan without it.
        bytes: put on the network by one worker, since step 0.
        density: share of the entries that was sent, since step 0.
    """

    step: int
    loss: float
    score: float
    bytes: float
    density: float


def train(
    team: VirtualWorkers,
    batches: Iterable[list[Batch]],
    steps: int,
    *,
    rate: Callable[[int], float] | None = None,
    evaluate: Callable[[], float] = lambda: math.nan,
    every: int | None = None,
    seconds: float = math.inf,
    max_norm: float | None = None,
    forget_every: int | None = None,
    on_point: Callable[[Point], None] = lambda point: None,
) -> list[Point]:
    """Train until ``steps`` steps are made in all, or until the time is over; the points of this call.

    Args:
        batches: from the team's step on.
        rate: step -> learning rate, before each step; ``None`` leaves it to the optimizer.
        evaluate: measures the model.
        every: steps between points; a tenth of ``steps``. There is one after the last step, too.
        seconds: stop after the first step that ends later; ``team.step`` tells how many were made.
        max_norm: clip the norm of the exchanged mean. (``clip`` of the team clips each worker's own.)
        forget_every: steps after which the workers forget what they carry.
    """
    begun, curve = time.monotonic(), list[Point]()
    every = max(1, steps // 10) if every is None else every
    losses, counted = torch.zeros((), device=next(team.model.parameters()).device), 0
    for batch in islice(batches, max(0, steps - team.step)):
        if rate is not None:
            for group in team.optimizer.param_groups:
                group["lr"] = rate(team.step)
        if forget_every is not None and team.step % forget_every == 0:
            team.forget()
        losses = losses + team.backward(batch)
        counted += 1
        if max_norm is not None:
            nn.utils.clip_grad_norm_(team.model.parameters(), max_norm)
        team.optimizer.step()
        over = time.monotonic() - begun > seconds
        if team.step % every == 0 or team.step == steps or over:
            curve.append(Point(team.step, losses.item() / counted, evaluate(), team.tally.bytes, team.tally.density))
            losses, counted = torch.zeros_like(losses), 0
            on_point(curve[-1])
        if over:
            break
    return curve


def image_batches(
    images: Images, workers: int, batch: int, *, device: torch.device | str = "cpu", seed: int = 0, start: int = 0
) -> Iterator[list[Batch]]:
    """Batches for every step from ``start`` on, without end: shards, order and crops are those of real workers.

    Args:
        batch: images per worker and step.
        device: the model's; all training images are brought there.
    """
    check_workers(workers, len(images.train_x), batch)
    x, y = images.train_x.to(device), images.train_y.to(device)
    size = len(x) // workers
    generators = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(workers)]
    own = [islice(orders(size, batch, generator), start, None) for generator in generators]
    ranks = torch.arange(workers).unsqueeze(1)
    for step, chosen in enumerate(zip(*own, strict=False), start):
        places = (torch.stack(chosen) * workers + ranks).view(-1).to(device)
        crops = [moment(seed, rank, step) for rank in range(workers)]
        both = images.inputs(x.index_select(0, places), crops), y.index_select(0, places)
        yield list(zip(*(part.view(workers, batch, *part.shape[1:]).unbind() for part in both), strict=True))


def token_batches(text: Tensor, workers: int, batch: int, length: int, *, start: int = 0) -> Iterator[list[Batch]]:
    """Windows of a text from step ``start`` on, without end: ``(batch, length)`` words, and those that follow them.

    Every worker reads on in its own streams, those of ``Text.shard``, and all begin again after ``epoch_steps`` steps:
    there ``train(forget_every=)`` should forget. Windows are whole; what is left at the end is not read.

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


def epoch_steps(text: Tensor, workers: int, batch: int, length: int) -> int:
    """Steps in which the workers read a text once."""
    steps = (len(text) // (workers * batch) - 1) // length
    if steps < 1:
        least = workers * batch * (length + 1)
        raise ValueError(f"text must have {least} words or more for {workers} x {batch} streams, got {len(text)}")
    return steps


def accuracy(model: nn.Module, images: Images, batch: int = 1000) -> float:
    """Share of the test images that the model, in evaluation mode, classifies correctly."""
    device = next(model.parameters()).device
    right = torch.zeros((), dtype=torch.int64, device=device)
    with _evaluating(model):
        for at in range(0, len(images.test_y), batch):
            x, y = (part[at : at + batch].to(device) for part in (images.test_x, images.test_y))
            right += (model(images.inputs(x)).argmax(1) == y).sum()
    return right.item() / len(images.test_y)


def perplexity(model: nn.Module, loss_fn: Loss, batches: Iterable[Batch], carried: Carried = ()) -> float:
    """exp of the mean loss over all words, in evaluation mode.

    Args:
        loss_fn: as the team's; its loss is the mean over the words of a batch.
        batches: with the words to be foretold last, as ``data.windows`` makes them.
        carried: what the first batch starts from; the others carry on.
    """
    total, words = 0.0, 0
    with _evaluating(model):
        for batch in batches:
            loss, carried = loss_fn(model, batch, carried)
            total += loss.item() * batch[-1].numel()
            words += batch[-1].numel()
    mean = total / words
    return math.exp(mean) if not mean > 700 else math.inf  # what diverged may be more than a float holds


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
