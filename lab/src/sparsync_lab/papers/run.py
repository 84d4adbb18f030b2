"""A training of the papers, its history, and the file that holds both."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sparsync_lab.models import CATALOGUE
from sparsync_lab.papers import store, tasks
from sparsync_lab.papers.item import RunContext
from sparsync_lab.training.methods import DENSE

OPTIMIZERS = ("sgd", "adamw", "factored-adamw")
WINDOWS = ("streams", "random")
SUFFIX = ".json.gz"
SEEDS = (0, 1, 2)  # of trainings that are made more than once
MOST_ENTRIES = 3 * 10**8  # of the gradients of all workers; with more, a training has a GPU's memory to itself
# Came later: where they are left alone, names are what they were.
LATER = {"optimizer": "sgd", "front": 1.0, "autocast": False, "beta1": 0.9, "beta2": 0.999, "variant": {},
         "windows": "streams", "densities": None, "feedback": True, "decays_weights_only": False,
         "resized": None}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A training of a paper: plain values.

    Args:
        label: what it is called beside others.
        model: a name of ``CATALOGUE``.
        method: as ``method_options`` takes it: ``"dense"``, a recipe, ``"topk"``, ``"random+shared"``, ...; or a name
            of ``BASELINES``.
        options: of ``attach``, or of the baseline, beside the method's own.
        settings: of the compressor.
        workers: virtual ones.
        batch: of each.
        rate: learning rate, after a linear warm-up.
        epochs: in all; ``steps`` instead, if that is given.
        warmup: share of the training in which the rate grows to its full size.
        decay: shares of the training after which the rate is divided by 10; ``None``: it falls as a cosine.
        seed: the context's is added to it.
        optimizer: ``"sgd"``, or ``"adamw"`` with ``beta1`` and ``beta2`` for ``momentum``, or ``"factored-adamw"``, the
            same with a row x column second moment.
        front: how many times the density begins with; above 1 it falls over the first tenth of ``steps``.
        densities: pairs of a share of the training and the density until then, before that of ``options``.
        feedback: what is not sent is kept for the next step; else it is lost.
        variant: what is changed of preconditioned feedback, as ``FeedbackVariant`` takes it.
        windows: of a transformer's text: ``"streams"``, which are read on, alike in every epoch, or ``"random"`` ones.
        autocast: passes compute in bfloat16 where torch takes that to be safe; images only. Weights and gradients are
            fp32 as ever.
        watch: snapshots: ``"shape"``, ``"gtopk"`` or ``"count"``, every ``watch_every`` steps; none if it is empty.
        decays_weights_only: ``weight_decay`` leaves biases and the parameters of norms alone.
        resized: pixels of a side that LeNet-5's images are brought to, instead of zeros round them.
        limit: of a tiny setting: examples that are used.
        seconds: on a large GPU, about, for those who plan; not part of what the training is.
    """

    label: str
    model: str
    method: str = DENSE
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 16
    batch: int = 32
    rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip: float | None = None
    epochs: float = 120
    steps: int | None = None
    warmup: float = 5 / 120
    decay: Sequence[float] | None = (81 / 120,)
    seed: int = 0
    watch: str = ""
    watch_every: int = 200
    limit: int | None = None
    optimizer: str = "sgd"
    front: float = 1.0
    autocast: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    variant: Mapping[str, Any] = field(default_factory=dict)
    windows: str = "streams"
    densities: Sequence[Sequence[float]] | None = None
    feedback: bool = True
    decays_weights_only: bool = False
    resized: int | None = None
    seconds: float = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if self.windows not in WINDOWS:
            raise ValueError(f"windows must be one of {', '.join(WINDOWS)}, got {self.windows!r}")
        if self.densities and (self.front != 1 or "density" not in self.options):
            raise ValueError(
                f"densities must be left out with front, and without options['density'], got {self.densities!r}"
            )
        if self.front != 1 and (self.steps is None or "density" not in self.options):
            raise ValueError(f"front must be 1 without steps and options['density'], got {self.front!r}")

    @property
    def large(self) -> bool:
        """Whether a GPU's memory may not hold two of it at a time."""
        return self.model in CATALOGUE and CATALOGUE[self.model].parameters * self.workers > MOST_ENTRIES

    @cached_property
    def name(self) -> str:
        """Return the name of its file: what it is, and a checksum of all that makes it so."""
        plain = {k: v for k, v in asdict(self).items() if k not in ("label", "seconds") and v != LATER.get(k)}
        digest = zlib.crc32(json.dumps(plain, sort_keys=True).encode())
        title = model_title(self.model)  # some labels begin with it
        words = f"{self.model} {self.label.removeprefix(title)} w{self.workers}".lower()
        return "-".join("".join(c if c.isalnum() else " " for c in words).split()) + f"-{digest:08x}"

    def made(self, context: RunContext) -> Run:
        """Return the run with the seed and the length that were asked for."""
        asked = replace(self, seed=self.seed + context.seed) if context.seed else self
        return asked if context.epochs is None or self.steps is not None else replace(asked, epochs=context.epochs)


@dataclass(frozen=True)
class History:
    """The history of a training, as it is stored.

    Args:
        run: what was trained.
        score: what ``scores`` are.
        points: steps at which they were taken.
        scores: at these.
        bytes: put on the network by one worker until each of them.
        losses: mean over the workers, of every step.
        sent: bytes put on the network by one worker, in every step.
        density: share of the entries that was sent.
        seconds: of training.
        epoch: steps.
        snapshots: what the watch saw.
        data: name of the data set, how much of it was used, and its SHA-256.
        where: machine, versions, commit, date.
    """

    run: Run
    score: str
    points: Sequence[int]
    scores: Sequence[float]
    bytes: Sequence[float]
    losses: Sequence[float]
    sent: Sequence[float]
    density: float
    seconds: float
    epoch: int
    snapshots: Sequence[Mapping[str, Any]]
    data: Mapping[str, str]
    where: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> float:
        return tasks.best_score(self.scores, self.score)

    @property
    def last(self) -> float:
        return self.scores[-1] if self.scores else math.nan


def model_title(model: str) -> str:
    """Return the name that the papers give a model."""
    return CATALOGUE[model].title if model in CATALOGUE else {"resnet50": "ResNet-50"}[model]


def rate_factor(run: Run, share: float) -> float:
    """Return the factor of the learning rate after a share of the training."""
    if share < run.warmup:
        return max(share / run.warmup, 0.02)
    if run.decay is None:
        return 0.5 * (1 + math.cos(math.pi * (share - run.warmup) / (1 - run.warmup)))
    return float(0.1 ** sum(share >= mark for mark in run.decay))


def file_of(context: RunContext, run: Run) -> Path:
    """Return where a training's file lies: JSON, compressed by gzip."""
    return context.output / "runs" / f"{run.name}{SUFFIX}"


def write(path: Path, history: History) -> None:
    """Write a training's file: commit, hardware, data, seed and a row for every step, as columns.

    The learning rate of a step is not among them: ``rate_factor`` gives it from what the training is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "environment": dict(history.where),
        "data": dict(history.data),
        "seconds": history.seconds,
        "density": history.density,
        "epoch_steps": history.epoch,
        "score": history.score,
        "points": {"step": history.points, "score": history.scores, "bytes": _exact(history.bytes)},
        "steps": {"loss": history.losses, "bytes": store.runs_of(_exact(history.sent))},
        "snapshots": history.snapshots,
    }
    store.write_json(path, content, run=asdict(history.run))


def _exact(counts: Sequence[float]) -> list[float]:
    """Convert whole numbers to integers, which are stored with all their digits."""
    return [int(count) if float(count).is_integer() else count for count in counts]


def read(path: Path, run: Run) -> History:
    """Read a training's history from its file."""
    plain = store.read_json(path)
    with store.whole(path):
        points, steps = plain["points"], plain["steps"]
        sent = [value for value, count in steps["bytes"] for _ in range(count)]
        return History(
            run, plain["score"], points["step"], _numbers(points["score"]), points["bytes"], _numbers(steps["loss"]),
            sent, plain["density"], plain["seconds"], plain["epoch_steps"], plain["snapshots"], plain["data"],
            plain["environment"],
        )  # fmt: skip


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def merged_where(histories: Sequence[History]) -> dict[str, str]:
    """Return where trainings ran: what differs between them stands side by side."""
    names = dict.fromkeys(name for history in histories for name in history.where)
    parts = {name: [part for h in histories for part in h.where.get(name, "").split(", ") if part] for name in names}
    return {name: ", ".join(dict.fromkeys(own)) for name, own in parts.items()}


def merged_data(histories: Sequence[History]) -> dict[str, str]:
    """Return the checksums of the data sets that were trained on, by name and size."""

    def name(history: History) -> str:
        resized = f", resized to {history.run.resized}" if history.run.resized else ""
        return f"{history.data['name']} ({history.data['size']}{resized})"

    return {name(history): history.data["sha256"] for history in histories}
