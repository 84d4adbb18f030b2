"""Scores of a model in evaluation mode."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from sparsync.simulate.sequential import Batch, Carried, Loss
from sparsync_lab.data import Images


def accuracy(model: nn.Module, images: Images, batch: int = 1000) -> float:
    """Return the share of the test images that the model, in evaluation mode, classifies correctly."""
    device = next(model.parameters()).device
    right = torch.zeros((), dtype=torch.int64, device=device)
    with evaluating(model):
        for at in range(0, len(images.test_y), batch):
            x, y = (part[at : at + batch].to(device) for part in (images.test_x, images.test_y))
            right += (model(images.inputs(x)).argmax(1) == y).sum()
    return right.item() / len(images.test_y)


def perplexity(model: nn.Module, loss_fn: Loss, batches: Iterable[Batch], carried: Carried = ()) -> float:
    """Return exp of the mean loss over all words, in evaluation mode.

    Args:
        loss_fn: as that of the virtual workers; its loss is the mean over the words of a batch.
        batches: with the words to be predicted last, as ``data.windows`` makes them.
        carried: what the first batch starts from; the others carry on.
    """
    total, words = 0.0, 0
    with evaluating(model):
        for batch in batches:
            loss, carried = loss_fn(model, batch, carried)
            total += loss.item() * batch[-1].numel()
            words += batch[-1].numel()
    mean = total / words
    return math.exp(mean) if not mean > 700 else math.inf  # what diverged may be more than a float holds


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, without gradients; afterwards in the mode it was in."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
