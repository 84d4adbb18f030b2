"""Trainings of one worker, step by step: each returns the loss of its next batch."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from sparsync_lab.data import Images, load, load_ptb, step_generator, streams, windows
from sparsync_lab.models import CATALOGUE, GPT, LSTMPTB, build
from sparsync_lab.training.loop import batch_indices

BPTT = 35  # words after which the LSTM's gradient is cut off
CONTEXT = 128  # words that the GPT sees
# CIFAR-10's first half is enough here, and the same whether all of it is there or not.
HALVES = {"cifar10": "cifar10-half"}


class Workload(Protocol):
    """A model and the batches it is trained with."""

    @property
    def model(self) -> nn.Module: ...

    def loss(self) -> Tensor:
        """Return the loss of the next batch."""
        ...


class ImageWorkload:
    """A classifier on images in random order, augmented where they are bytes.

    Args:
        model: on the device to train on.
        batch: images a step.
        seed: of the order and the augmentation.
    """

    def __init__(self, model: nn.Module, images: Images, batch: int, seed: int) -> None:
        self.model, self.images, self.seed, self.step = model, images, seed, 0
        device = next(model.parameters()).device
        self.x, self.y = images.train_x.to(device), images.train_y.to(device)
        self.picked = batch_indices(len(self.x), batch, torch.Generator().manual_seed(seed))

    def loss(self) -> Tensor:
        batch = next(self.picked).to(self.x.device)
        x = self.images.inputs(self.x[batch], step_generator(self.seed, 0, self.step))
        self.step += 1
        return nn.functional.cross_entropy(self.model(x), self.y[batch])


class TextWorkload:
    """A language model on contiguous streams of text; an LSTM's state goes on from window to window.

    Args:
        model: on the device to train on.
        text: the streams, ``(batch, length)``.
        length: words in a window.
    """

    def __init__(self, model: LSTMPTB | GPT, text: Tensor, length: int) -> None:
        self.model, self.length = model, length
        self.text = text.to(next(model.parameters()).device)
        self.windows = windows(self.text, length)
        self.state: tuple[Tensor, Tensor] | None = None

    def loss(self) -> Tensor:
        window = next(self.windows, None)
        if window is None:
            self.windows, self.state = windows(self.text, self.length), None
            window = next(self.windows)
        words, following = window
        if isinstance(self.model, GPT):
            scores = self.model(words)
        else:
            scores, state = self.model(words, self.state)
            self.state = (state[0].detach(), state[1].detach())
        return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def make_workload(name: str, folder: Path | None, device: torch.device, seed: int = 0) -> Workload:
    """Return the training of a model of the catalogue, with fresh weights.

    Args:
        name: of a model for images or for the Penn Treebank.
        folder: where data lie; ``None``: ``$SPARSYNC_DATA``.
    """
    spec = CATALOGUE[name]
    torch.manual_seed(seed)
    model = build(name).to(device)
    if isinstance(model, LSTMPTB | GPT):
        text = streams(load_ptb(folder).train, spec.batch)
        return TextWorkload(model, text, CONTEXT if isinstance(model, GPT) else BPTT)
    return ImageWorkload(model, load(HALVES.get(spec.data, spec.data), folder), spec.batch, seed)


def make_optimizer(name: str, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Return SGD with the model's published momentum, or AdamW for the GPT."""
    if name == "gpt":
        return torch.optim.AdamW(model.parameters(), lr=rate)
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=CATALOGUE[name].momentum)
