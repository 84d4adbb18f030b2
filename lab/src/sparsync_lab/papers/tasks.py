"""Tasks of the papers: a model, its data, its loss and its score, ready for virtual workers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from sparsync_lab import data, virtual
from sparsync_lab.bench.workloads import BPTT, CONTEXT
from sparsync_lab.data import Images, PennTreebank, Speech
from sparsync_lab.data.an4 import Utterance
from sparsync_lab.models import CATALOGUE, GPT, LSTMAN4, LSTMPTB, ViT
from sparsync_lab.models.gpt import DROPOUT
from sparsync_lab.packages import require

Batch = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Batch, Batch], tuple[Tensor, Batch]]
Read = Callable[..., Iterator[list[Batch]]]
TINY_WIDTH, TINY_LENGTH = 32, 8
EVALUATED_STREAMS, EVALUATED_WINDOWS = 4, 8  # of a transformer: the same words for all, and few waits for the device


@dataclass(frozen=True)
class Task:
    """All of a training but the method.

    Args:
        model: with fresh weights, on its device.
        loss: as ``VirtualWorkers`` takes it.
        batches: from a step on, one batch a worker.
        epoch: steps in which all data are seen once.
        evaluate: what the model has learnt by now ...
        score: ... and what that is called: ``"accuracy"``, ``"perplexity"``, ``"word error rate"``.
        graph: whether passes can be replayed from a CUDA graph.
        name: of the data set.
        size: how much is trained on, in words.
        checksum: SHA-256 of what was read.
        carried: what every worker starts from; with a row for each example if ``mean``.
        forgets: every epoch begins from ``carried`` again.
        mean: the loss is a mean over examples, so that those of all workers may be batched.
    """

    model: nn.Module
    loss: Loss
    batches: Callable[[int], Iterator[list[Batch]]]
    epoch: int
    evaluate: Callable[[], float]
    score: str
    graph: bool
    name: str
    size: str
    checksum: str
    carried: Batch = ()
    resets_carried: bool = False
    mean: bool = False


def make_task(
    name: str,
    folder: Path | None,
    device: torch.device,
    *,
    workers: int,
    batch: int,
    seed: int,
    limit: int | None,
    autocast: bool = False,
    windows: str = "streams",
    resized: int | None = None,
) -> Task:
    """Return the task of a model of ``CATALOGUE``.

    Args:
        folder: of the data sets; ``None``: ``$SPARSYNC_DATA``.
        batch: of each worker.
        seed: of weights and order.
        limit: for a tiny setting: examples that are trained on and tested with; recurrent layers are narrow then, too.
        windows: of a transformer's text: ``"streams"`` or ``"random"``.
        autocast: of a model of images, passes compute in bfloat16 where torch takes that to be safe.
        resized: of LeNet-5: its images have so many pixels a side, and there are no zeros round them.
    """
    kind = CATALOGUE[name].data
    torch.manual_seed(seed)
    if name in ("gpt", "gpt-dropout", "gpt2"):
        read: Read = virtual.token_batches if windows == "streams" else partial(virtual.random_windows, seed=seed)
        return _transformer_task(name, data.load_ptb(folder), device, workers, batch, limit, read)
    if windows != "streams":
        raise ValueError(f"windows must be 'streams' but for transformers of text, got {windows!r} for {name}")
    if kind == "ptb":
        return _lstm_task(data.load_ptb(folder), device, workers, batch, limit)
    if kind == "an4":
        return _speech_task(data.load_an4(folder), device, workers, batch, seed, limit)
    model = (ViT(layers=1, width=TINY_WIDTH, heads=4) if name == "vit" and limit else CATALOGUE[name].make()).to(device)
    known_as, images = load_images(kind, folder)
    if resized:
        images = replace(images, train_x=_resize(images.train_x, resized), test_x=_resize(images.test_x, resized))
        first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
        first.padding = (0, 0)
    return image_task(known_as, images, model, device, workers, batch, seed, limit, autocast)


def load_images(kind: str, folder: Path | None) -> tuple[str, Images]:
    """Load the images and return their name with them: CIFAR-10 whole if it is there, else the half of it that is.

    What is there but damaged is refused: half would be trained on without a word.
    """
    known_as = data.available_cifar10(folder) if kind == "cifar10" else kind
    return known_as, data.load(known_as, folder)


def _resize(images: Tensor, side: int) -> Tensor:
    return nn.functional.interpolate(images, (side, side), mode="bilinear")


def image_task(
    name: str,
    images: Images,
    model: nn.Module,
    device: torch.device,
    workers: int,
    batch: int,
    seed: int,
    limit: int | None,
    autocast: bool = False,
) -> Task:
    """Return the task to classify images."""
    channels_last = autocast or device.type == "cpu"  # what bfloat16 convolutions take; those of a CPU are faster so
    order = torch.channels_last if channels_last else torch.contiguous_format
    model = model.to(memory_format=order)  # type: ignore[call-overload]
    parts = {name: getattr(images, name)[:limit] for name in ("train_x", "train_y", "test_x", "test_y")}
    checksum = _checksum(list(parts.values()))
    own = replace(images, **{name: part.to(device) for name, part in parts.items()})

    def loss(model: nn.Module, batch: Batch, carried: Batch) -> tuple[Tensor, Batch]:
        images, labels = batch
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            scores = model(images.contiguous(memory_format=order))
        return nn.functional.cross_entropy(scores.float(), labels), carried

    def batches(start: int) -> Iterator[list[Batch]]:
        return virtual.image_batches(own, workers, batch, device=device, seed=seed, start=start)

    return Task(
        model,
        loss,
        batches,
        epoch=max(1, len(own.train_x) // workers // batch),
        evaluate=lambda: virtual.accuracy(model, own),
        score="accuracy",
        graph=device.type == "cuda",
        name=name,
        size=f"{len(own.train_x):,} images, {len(own.test_x):,} test images",
        checksum=checksum,
        mean=True,
    )


def _lstm_task(text: PennTreebank, device: torch.device, workers: int, batch: int, limit: int | None) -> Task:
    """Return the task of a recurrent language model, which carries its state from window to window."""
    model = (LSTMPTB() if limit is None else LSTMPTB(width=TINY_WIDTH)).to(device)
    shape = batch, model.lstm.num_layers, model.lstm.hidden_size
    carried = (torch.zeros(shape, device=device), torch.zeros(shape, device=device))

    def loss(model: nn.Module, batch: Batch, carried: Batch) -> tuple[Tensor, Batch]:
        here, after = batch
        scores, state = model(here, tuple(tensor.transpose(0, 1).contiguous() for tensor in carried))
        lost = nn.functional.cross_entropy(scores.flatten(0, 1), after.flatten())
        return lost, tuple(tensor.detach().transpose(0, 1) for tensor in state)

    return replace(_language_task(text, model, loss, BPTT, device, workers, batch, limit, carried), resets_carried=True)


def _transformer_task(
    name: str, text: PennTreebank, device: torch.device, workers: int, batch: int, limit: int | None, read: Read
) -> Task:
    """Return the task of a transformer: every window stands for itself, and several are evaluated at once."""
    if limit is None:
        model = CATALOGUE[name].make().to(device)
    else:
        dropout = DROPOUT if name == "gpt-dropout" else 0.0
        model = GPT(layers=1, width=TINY_WIDTH, context=TINY_LENGTH, dropout=dropout).to(device)

    def loss(model: nn.Module, batch: Batch, carried: Batch) -> tuple[Tensor, Batch]:
        here, after = batch
        return nn.functional.cross_entropy(model(here).flatten(0, 1), after.flatten()), carried

    task = _language_task(text, model, loss, CONTEXT, device, workers, batch, limit, read=read)
    if limit is not None:
        return task
    valid = text.valid.to(device)
    steps = virtual.epoch_steps(valid, 1, EVALUATED_STREAMS, CONTEXT)

    def evaluate() -> float:
        stream = islice(virtual.token_batches(valid, 1, EVALUATED_STREAMS, CONTEXT), steps)
        few = iter(lambda: list(islice(stream, EVALUATED_WINDOWS)), [])
        together = (tuple(map(torch.cat, zip(*(one[0] for one in windows), strict=True))) for windows in few)
        return virtual.perplexity(model, loss, together)

    return replace(task, evaluate=evaluate)


def _language_task(
    text: PennTreebank,
    model: nn.Module,
    loss: Loss,
    length: int,
    device: torch.device,
    workers: int,
    batch: int,
    limit: int | None,
    carried: Batch = (),
    read: Read = virtual.token_batches,
) -> Task:
    """Return the task of a language model.

    Args:
        length: of a window, in words.
        carried: as ``Task`` has it.
        read: yields windows of the text.
    """
    length = length if limit is None else TINY_LENGTH
    words = text.train[: None if limit is None else limit * workers * batch].to(device)
    valid = text.valid[: None if limit is None else limit * batch].to(device)

    def evaluate() -> float:
        steps = virtual.epoch_steps(valid, 1, batch, length)
        stream = islice(virtual.token_batches(valid, 1, batch, length), steps)
        return virtual.perplexity(model, loss, (one[0] for one in stream), carried)

    return Task(
        model,
        loss,
        lambda start: read(words, workers, batch, length, start=start),
        epoch=virtual.epoch_steps(words, workers, batch, length),
        evaluate=evaluate,
        score="perplexity",
        graph=device.type == "cuda",
        name="ptb",
        size=f"{len(words):,} words",
        checksum=_checksum((text.train, text.valid)),
        carried=carried,
        mean=True,
    )


def _speech_task(speech: Speech, device: torch.device, workers: int, batch: int, seed: int, limit: int | None) -> Task:
    require("jiwer")
    model = (LSTMAN4() if limit is None else LSTMAN4(width=TINY_WIDTH)).to(device)
    shards = [speech.shard(rank, workers)[:limit] for rank in range(workers)]
    test = speech.test[: None if limit is None else limit // 4]

    def tensors(utterances: Sequence[Utterance]) -> Batch:
        made = data.speech_batch(utterances, device)
        return made.spectrograms, made.frames, made.labels, made.label_counts

    def loss(model: nn.Module, batch: Batch, carried: Batch) -> tuple[Tensor, Batch]:
        spectrograms, frames, labels, counts = batch
        scores, lengths = model(spectrograms, frames)
        logs = scores.log_softmax(2).transpose(0, 1)
        total = nn.functional.ctc_loss(logs, labels, lengths, counts, reduction="sum", zero_infinity=True)
        return total / len(frames), carried

    def batches(start: int) -> Iterator[list[Batch]]:
        for chosen in virtual.worker_indices([len(shard) for shard in shards], batch, seed, start):
            # All are padded alike, which changes nothing, so that they may be batched.
            everyone = tensors([s[i] for s, picked in zip(shards, chosen, strict=True) for i in picked.tolist()])
            yield list(zip(*(part.view(workers, batch, *part.shape[1:]).unbind() for part in everyone), strict=True))

    def evaluate() -> float:
        decoded: list[str] = []
        with virtual.evaluating(model):
            for at in range(0, len(test), 10):
                spectrograms, frames, _, _ = tensors(test[at : at + 10])
                decoded += data.greedy_decode(*model(spectrograms, frames))
        return data.word_error_rate(decoded, [utterance.text for utterance in test])

    return Task(
        model,
        loss,
        batches,
        epoch=max(1, len(shards[0]) // batch),
        evaluate=evaluate,
        score="word error rate",
        graph=False,
        name="an4",
        size=f"{sum(map(len, shards)):,} utterances",
        checksum=_checksum([utterance.samples for utterance in (*speech.train, *speech.test)]),
        mean=True,
    )


def _checksum(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def best_score(scores: Sequence[float], score: str) -> float:
    """Return the best of a training's scores: the highest accuracy, the lowest of others."""
    known = [value for value in scores if value is not None and not math.isnan(value)]
    if not known:
        return math.nan
    return max(known) if score == "accuracy" else min(known)
