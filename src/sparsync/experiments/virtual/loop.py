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

from sparsync.experiments.data import check_workers
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
    x: Tensor, y: Tensor, workers: int, batch: int, *, seed: int = 0, start: int = 0
) -> Iterator[list[Batch]]:
    """Batches for every step from ``start`` on, without end: the shards and the order that real workers have.

    Args:
        x, y: all training images and labels, on the model's device.
        batch: images per worker and step.
    """
    check_workers(workers, len(x), batch)
    size = len(x) // workers
    generators = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(workers)]
    streams = [islice(orders(size, batch, generator), start, None) for generator in generators]
    ranks = torch.arange(workers).unsqueeze(1)
    for chosen in zip(*streams, strict=False):
        places = (torch.stack(chosen) * workers + ranks).view(-1).to(x.device, non_blocking=True)
        both = [data.index_select(0, places).view(workers, batch, *data.shape[1:]).unbind() for data in (x, y)]
        yield list(zip(*both, strict=True))


def token_batches(tokens: Tensor, workers: int, batch: int, length: int, *, start: int = 0) -> Iterator[list[Batch]]:
    """Windows of a text from step ``start`` on, without end: ``(batch, length)`` tokens, and those that follow them.

    The text is cut into workers x batch streams; a worker reads on in its own ones, and all begin again after
    ``windows(...)`` steps: ``train(forget_every=)`` should be that.

    Args:
        tokens: the whole text, 1-D, on the model's device.
        batch: streams per worker.
        length: of a window.
    """
    count = windows(tokens, workers, batch, length)
    streams = tokens[: len(tokens) // (workers * batch) * workers * batch].view(workers, batch, -1)
    for step in itertools.count(start):
        at = step % count * length
        here, after = streams[..., at : at + length], streams[..., at + 1 : at + 1 + length]
        yield list(zip(here.unbind(), after.unbind(), strict=True))


def windows(tokens: Tensor, workers: int, batch: int, length: int) -> int:
    """Steps in which the workers read a text once."""
    count = (len(tokens) // (workers * batch) - 1) // length
    if count < 1:
        least = workers * batch * (length + 1)
        raise ValueError(f"tokens must be {least} or more for {workers} x {batch} streams, got {len(tokens)}")
    return count


def accuracy(model: nn.Module, x: Tensor, y: Tensor, batch: int = 1000) -> float:
    """Share of the images that the model, in evaluation mode, classifies correctly."""
    with _evaluating(model):
        right = [
            (model(a).argmax(1) == b).sum() for a, b in zip(torch.split(x, batch), torch.split(y, batch), strict=True)
        ]
    return int(torch.stack(right).sum()) / len(y)


def perplexity(model: nn.Module, loss_fn: Loss, batches: Iterable[Batch], carried: Carried = ()) -> float:
    """exp of the mean loss over batches of equal size, in evaluation mode.

    Args:
        loss_fn: as the team's; its loss is the mean over a batch's tokens.
        carried: what the first batch starts from; the others carry on.
    """
    losses = []
    with _evaluating(model):
        for batch in batches:
            loss, carried = loss_fn(model, batch, carried)
            losses.append(loss)
    return math.exp(torch.stack(losses).double().mean().item())


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
