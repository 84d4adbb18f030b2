"""Trainings of the papers on virtual workers: each with a file of its own, in pieces if there is little time."""

from __future__ import annotations

import json
import math
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sparsync import comm_hook, registry
from sparsync.experiments import models
from sparsync.experiments.data.files import data_folder
from sparsync.experiments.data.pictures import SOURCE
from sparsync.experiments.methods import DENSE, options_of
from sparsync.experiments.models import CATALOGUE, IMAGENET
from sparsync.experiments.papers import store, tasks
from sparsync.experiments.papers.item import Context
from sparsync.experiments.papers.photographs import of_pictures
from sparsync.experiments.papers.tasks import Task
from sparsync.experiments.papers.watch import Watch
from sparsync.experiments.virtual import VirtualWorkers, can_go_together
from sparsync.experiments.virtual.parts import units_of
from sparsync.recipes import RECIPES
from sparsync.schedule import FrontLoaded

POINTS, FEW = 12, 2  # of a curve of scores, about; and in a tiny setting
STREAMS = 8  # of a GPU: as many workers run side by side
MARGIN = 10.0  # seconds that a checkpoint and the result's files may take
SAVE_EVERY = 120.0  # seconds between checkpoints
OPTIMIZERS = ("sgd", "adamw")
# Came later: where they are left alone, names are what they were.
LATER = {"optimizer": "sgd", "front": 1.0, "autocast": False}


@dataclass(frozen=True)
class Run:
    """A training of a paper: plain values.

    Args:
        label: what it is called beside others.
        model: a name of ``CATALOGUE``.
        method: as ``options_of`` takes it: ``"dense"``, a recipe, ``"topk"``, ``"random+shared"``, ...
        options: of ``attach``, beside the method's own.
        settings: of the compressor.
        workers: virtual ones.
        batch: of each.
        rate: learning rate, after a linear warm-up.
        epochs: in all; ``steps`` instead, if that is given.
        warmup: share of the training in which the rate grows to its full size.
        decay: shares of the training after which the rate is divided by 10; ``None``: it falls as a cosine.
        seed: the context's is added to it.
        optimizer: ``"sgd"``, or ``"adamw"`` with its own betas for ``momentum``.
        front: how many times the density begins with; above 1 it falls over the first tenth of ``steps``.
        autocast: passes compute in bfloat16 where torch takes that to be safe; images only. Weights and gradients are
            fp32 as ever.
        watch: snapshots: ``"shape"`` or ``"gtopk"``, every ``watch_every`` steps; none if it is empty.
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
    seconds: float = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if self.front != 1 and (self.steps is None or "density" not in self.options):
            raise ValueError(f"front must be 1 without steps and options['density'], got {self.front!r}")

    @property
    def name(self) -> str:
        """Of its file: what it is, and a checksum of all that makes it so."""
        plain = {k: v for k, v in asdict(self).items() if k not in ("label", "seconds") and v != LATER.get(k)}
        digest = zlib.crc32(json.dumps(plain, sort_keys=True).encode())
        title = title_of(self.model)  # some labels begin with it
        words = f"{self.model} {self.label.removeprefix(title)} w{self.workers}".lower()
        return "-".join("".join(c if c.isalnum() else " " for c in words).split()) + f"-{digest:08x}"

    def made(self, context: Context) -> Run:
        """With the seed and the length that were asked for."""
        asked = replace(self, seed=self.seed + context.seed)
        return asked if context.epochs is None or self.steps is not None else replace(asked, epochs=context.epochs)


@dataclass(frozen=True)
class History:
    """What came of a training, as it is stored.

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
        return tasks.best(self.scores, self.score)

    @property
    def last(self) -> float:
        return self.scores[-1] if self.scores else math.nan


def train(run: Run, context: Context, task: Task | None = None) -> History | None:
    """One training, from its last checkpoint if there is one; ``None`` if the time was over before it was done.

    Where several processes are at work, only the one that has claimed the run may call this.
    """
    with _products(context.device):
        return _train(run, context, task or _task(run, context))


@contextmanager
def _products(device: torch.device) -> Iterator[None]:
    """On a GPU products are of TF32, as convolutions are anyway."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _train(run: Run, context: Context, task: Task) -> History | None:
    steps = run.steps or max(1, round(run.epochs * task.epoch))
    session = Session(run, task, steps)
    saved = context.scratch / f"{run.name}.pt"
    if context.uses(saved):
        session.load(torch.load(saved, map_location=context.device, weights_only=True))
    begun = time.monotonic()
    last_saved, last_said = begun, 0.0
    every = max(1, steps // (POINTS if run.limit is None else FEW))
    stream = task.batches(session.team.step)
    while session.team.step < steps:
        session.advance(next(stream))
        now, step = time.monotonic(), session.team.step
        if step % every == 0 or step == steps:
            session.point()
        if now - last_said > 15 or step == steps:
            last_said = now
            shown = f", {task.score} {session.scores[-1]:.4g}" if session.scores else ""
            context.say(f"{run.name}: step {step:,} of {steps:,}{shown}")
        over = now > context.deadline - MARGIN
        if (over and step < steps) or now - last_saved > SAVE_EVERY:
            session.seconds += now - begun
            begun = last_saved = now
            context.scratch.mkdir(parents=True, exist_ok=True)
            part = saved.with_suffix(".part")
            torch.save(session.state(), part)
            part.replace(saved)
        if over and step < steps:
            return None
    session.seconds += time.monotonic() - begun
    where = {**store.hardware(context), "passes": session.passes, "precision": session.precision}
    history = replace(session.history(), where=where)
    write(context.output / "runs" / f"{run.name}.json", history)
    saved.unlink(missing_ok=True)
    return history


def title_of(model: str) -> str:
    """A model as the papers call it."""
    return CATALOGUE[model].title if model in CATALOGUE else {"resnet50": "ResNet-50"}[model]


def _task(run: Run, context: Context) -> Task:
    how = {"workers": run.workers, "batch": run.batch, "seed": run.seed}
    if run.autocast and (run.model in IMAGENET or CATALOGUE[run.model].data not in ("mnist", "cifar10")):
        raise ValueError(f"autocast is for models of MNIST and CIFAR-10, got {run.model!r}")
    if run.model in IMAGENET:
        folder = data_folder(context.data, "ImageNet", SOURCE)
        return of_pictures(folder, models.build(run.model).to(context.device), context.device, **how)
    return tasks.make(run.model, context.data, context.device, limit=run.limit, autocast=run.autocast, **how)


CARRIED = ("known", "sent", "points", "scores", "bytes", "snapshots", "seconds")


class Session:
    """A training under way, and all of it that a checkpoint must hold."""

    def __init__(self, run: Run, task: Task, steps: int) -> None:
        self.run, self.task, self.steps = run, task, steps
        options = _options(run)
        optimizer = optimizer_of(run, task)
        on_gpu = next(task.model.parameters()).is_cuda
        together = on_gpu and task.mean and not run.autocast and can_go_together(task.model)
        self.passes = "together" if together else "one worker after another"
        self.precision = "bf16 autocast" if run.autocast else "tf32" if on_gpu else "fp32"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what a paper does is done, whatever we think of it
            self.team = VirtualWorkers(
                task.model,
                task.loss,
                optimizer,
                run.workers,
                carried=task.carried,
                graph=task.graph,
                streams=STREAMS if task.graph else 1,
                together=together,
                **options,
            )
        density = run.options.get("density") or run.settings.get("density", 0.001)
        self.watch = Watch(self.team, run.watch, run.clip, density) if run.watch else None
        # What is moved out of the optimizer changes its rate; schedules multiply what it is now.
        self.rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.losses: list[torch.Tensor] = []  # stay on the device until a point
        self.known: list[float] = []
        self.sent: list[float] = []
        self.points: list[int] = []
        self.scores: list[float] = []
        self.bytes: list[float] = []
        self.snapshots: list[dict[str, Any]] = []
        self.seconds = 0.0

    def advance(self, batch: list[tuple[torch.Tensor, ...]]) -> None:
        """One step."""
        step = self.team.step
        factor = rate_at(self.run, step / self.steps)
        for group, rate in zip(self.team.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = factor * rate
        if self.task.forgets and step % self.task.epoch == 0:
            self.team.forget()
        watched = self.watch if self.watch and (step + 1) % self.run.watch_every == 0 else None
        if watched:
            watched.before()
        before = self.team.tally.bytes
        self.losses.append(self.team.backward(batch).detach().clone())
        self.sent.append(self.team.tally.bytes - before)
        if watched:
            self.snapshots.append(watched.after())
        self.team.optimizer.step()

    def point(self) -> None:
        """Measure, and fetch the losses from the device."""
        self._fetch()
        self.points.append(self.team.step)
        self.scores.append(self.task.evaluate())
        self.bytes.append(self.team.tally.bytes)

    def state(self) -> dict[str, Any]:
        self._fetch()
        own = {name: getattr(self, name) for name in CARRIED}
        return {"team": self.team.state_dict(), **own}

    def load(self, state: Mapping[str, Any]) -> None:
        self.team.load_state_dict(state["team"])
        for name, value in state.items():
            if name != "team":
                setattr(self, name, value)

    def history(self) -> History:
        self._fetch()
        self.team.detach()
        task = self.task
        about = {"name": task.name, "size": task.size, "sha256": task.checksum}
        density = self.team.tally.density
        return History(
            self.run, task.score, self.points, self.scores, self.bytes, self.known, self.sent, density, self.seconds,
            task.epoch, self.snapshots, about,
        )  # fmt: skip

    def _fetch(self) -> None:
        if self.losses:
            self.known += torch.stack(self.losses).tolist()
            self.losses = []


def optimizer_of(run: Run, task: Task) -> torch.optim.Optimizer:
    """SGD with momentum, or AdamW."""
    if run.optimizer == "adamw":
        return torch.optim.AdamW(task.model.parameters(), run.rate, weight_decay=run.weight_decay)
    return torch.optim.SGD(task.model.parameters(), run.rate, run.momentum, weight_decay=run.weight_decay)


def rate_at(run: Run, share: float) -> float:
    """The factor of the learning rate after a share of the training."""
    if share < run.warmup:
        return max(share / run.warmup, 0.02)
    if run.decay is None:
        return 0.5 * (1 + math.cos(math.pi * (share - run.warmup) / (1 - run.warmup)))
    return float(0.1 ** sum(share >= mark for mark in run.decay))


def write(path: Path, history: History) -> None:
    """A training's file: commit, hardware, data, seed and a row for every step, as columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    each = max(1, len(history.losses))
    content = {
        "run": asdict(history.run),
        "environment": dict(history.where),
        "data": dict(history.data),
        "seconds": history.seconds,
        "density": history.density,
        "epoch_steps": history.epoch,
        "score": history.score,
        "points": {"step": history.points, "score": history.scores, "bytes": _exact(history.bytes)},
        "steps": {
            "loss": history.losses,
            "bytes": store.runs_of(_exact(history.sent)),
            "rate_factor": store.runs_of([rate_at(history.run, i / each) for i in range(len(history.losses))]),
        },
        "snapshots": history.snapshots,
    }
    store.write_json(path, content)


def _exact(counts: Sequence[float]) -> list[float]:
    """Whole numbers as such, which are stored with all their digits."""
    return [int(count) if float(count).is_integer() else count for count in counts]


def read(path: Path, run: Run) -> History:
    """A training's history from its file."""
    plain = json.loads(path.read_text(encoding="utf-8"))
    points = plain["points"]
    scores = [math.nan if value is None else value for value in points["score"]]
    losses = [math.nan if value is None else value for value in plain["steps"]["loss"]]
    sent = [value for value, count in plain["steps"]["bytes"] for _ in range(count)]
    return History(
        run, plain["score"], points["step"], scores, points["bytes"], losses, sent, plain["density"], plain["seconds"],
        plain["epoch_steps"], plain["snapshots"], plain["data"], plain["environment"],
    )  # fmt: skip


def _options(run: Run) -> dict[str, Any]:
    """The options of ``VirtualWorkers``."""
    extra = {} if run.clip is None else {"clip": run.clip}
    if run.method == DENSE:
        return {"compressor": "none", **extra}
    options = options_of(run.method, **run.options)
    assert options is not None
    if run.front != 1:
        assert run.steps is not None
        options["density"] = FrontLoaded(run.options["density"], run.steps, run.front)
    if run.settings:
        name = run.method.partition("+")[0]
        if name in RECIPES:
            raise ValueError(f"settings must be of a compressor, and {name!r} is a recipe, got {dict(run.settings)}")
        options["compressor"] = registry.compressors()[name](**run.settings)
    return {**options, "seed": run.seed, **extra}


def bytes_per_step(run: Run) -> float:
    """What a worker sends in a step, on average if the density changes."""
    return traffic_of(run)(None)


def traffic_of(run: Run) -> Callable[[float | None], float]:
    """The bytes that a worker sends in a step, from the density of what is compressed; ``None``: the run's own."""
    with torch.device("meta"):
        model = CATALOGUE[run.model].make()
    # What the optimizer does changes no bytes, and it is not there.
    options = _options(replace(run, front=1.0)) | {"momentum": "keep", "follow_lr": False}
    needless = ("clip", "beta", "masking")
    handle, _ = comm_hook(model, **{name: value for name, value in options.items() if name not in needless})
    units = units_of(handle, torch.device("meta"))

    def at(share: float) -> float:
        layouts = [unit.layout_at(1.0 if unit.compressor.dense else share)[0] for unit in units]
        costs = (u.collective.traffic(cut, handle.wire, run.workers) for u, cut in zip(units, layouts, strict=True))
        return sum(cost.mean_bytes for cost in costs)

    def mean(density: float | None) -> float:
        share = handle.density(10**9) if density is None else density
        if run.front == 1:
            return at(share)
        assert run.steps is not None
        stages = FrontLoaded(share, run.steps, run.front).stages()
        return sum(count * at(now) for now, count in stages) / run.steps

    return mean


def merged_where(histories: Sequence[History]) -> dict[str, str]:
    """Where trainings ran: what differs between them stands side by side."""
    names = dict.fromkeys(name for history in histories for name in history.where)
    return {name: ", ".join(dict.fromkeys(h.where[name] for h in histories if name in h.where)) for name in names}


def merged_data(histories: Sequence[History]) -> dict[str, str]:
    """Checksums of the data sets that were read, by what they are."""
    return {f"{h.data['name']} ({h.data['size']})": h.data["sha256"] for h in histories}
