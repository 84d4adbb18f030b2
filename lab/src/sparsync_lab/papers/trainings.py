"""Trainings of the papers on virtual workers: each with a file of its own, in pieces if there is little time."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsync.compressors import ThresholdK
from sparsync.config import ExchangePlan, registry, resolve
from sparsync.config.recipes import RECIPES
from sparsync.engine.traffic import bytes_per_step
from sparsync.schedule import FrontLoaded
from sparsync_lab import models
from sparsync_lab.baselines import BASELINES, BaselineWorkers, FactoredAdamW
from sparsync_lab.data.files import data_folder
from sparsync_lab.data.image_folder import SOURCE
from sparsync_lab.models import CATALOGUE, IMAGENET
from sparsync_lab.papers import store, tasks
from sparsync_lab.papers.density_stages import DensityStages
from sparsync_lab.papers.imagenet import image_folder_task
from sparsync_lab.papers.item import RunContext
from sparsync_lab.papers.observers import CountObserver, StepObserver, lose_residuals
from sparsync_lab.papers.run import History, Run, file_of, rate_factor, write
from sparsync_lab.papers.tasks import Task
from sparsync_lab.training.checkpoints import load_verified, one_line
from sparsync_lab.training.durable import replace_file
from sparsync_lab.training.methods import DENSE, method_options
from sparsync_lab.virtual import BatchedPasses, SequentialPasses, VirtualWorkers, can_be_batched
from sparsync_lab.virtual.feedback_variants import FeedbackVariant, VariantExchange
from sparsync_lab.virtual.outer_workers import OuterWorkers

POINTS, FEW = 12, 2  # of a curve of scores, about; and in a tiny setting
STREAMS = 8  # of a GPU: as many workers run side by side
OUTER = "outer-loop"  # the method of ``OuterLoop``
LOCAL = ("sparse-loco", OUTER)
MARGIN = 10.0  # seconds that a checkpoint and the result's files may take
SAVE_EVERY = 120.0  # seconds between checkpoints
SIGNED_GTOPK = "signed-gtopk"  # as trainings call gTop-k with signs that were made before the library took these
# What the recipe "default" was until it had a budget. Stored trainings are called so, and stay what they were; a run
# with a budget among its options is today's.
FIRST_DEFAULT: Mapping[str, Any] = {
    "compressor": ThresholdK(0.00625), "scope": "global", "values": "sign", "indices": "ef", "momentum": "move",
}  # fmt: skip


def train_run(run: Run, context: RunContext, task: Task | None = None) -> History | None:
    """Train a run, from its last checkpoint if there is one; return ``None`` if the time was over before it was done.

    Where several processes are at work, only the one that has locked the run may call this.
    """
    with _tf32_matmul(context.device):
        try:
            return _train(run, context, task or _task(run, context))
        except DamagedCheckpoint as error:
            context.log(f"{error}; it begins anew")
            return _train(run, context, _task(run, context))  # the model may hold half of what was loaded


class DamagedCheckpoint(ValueError):
    """A checkpoint cannot be resumed from."""


@contextmanager
def _tf32_matmul(device: torch.device) -> Iterator[None]:
    """Compute matrix products on a GPU in TF32, as convolutions are anyway."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _train(run: Run, context: RunContext, task: Task) -> History | None:
    steps = run.steps or max(1, round(run.epochs * task.epoch))
    session = VirtualSession(run, task, steps)
    saved = context.scratch / f"{run.name}.pt"
    if context.uses(saved):
        _resume(session, saved, context.device)
    where = store.hardware(context)
    session.commits = list(dict.fromkeys([*session.commits, where["commit"]]))
    begun = time.monotonic()
    last_saved, last_said = begun, 0.0
    every = max(1, steps // (POINTS if run.limit is None else FEW))
    stream = task.batches(session.virtual_workers.step)
    while session.virtual_workers.step < steps:
        session.advance(next(stream))
        now, step = time.monotonic(), session.virtual_workers.step
        if step % every == 0 or step == steps:
            session.point()
        if now - last_said > 15 or step == steps:
            last_said = now
            shown = f", {task.score} {session.scores[-1]:.4g}" if session.scores else ""
            context.log(f"{run.name}: step {step:,} of {steps:,}{shown}")
        over = now > context.deadline - MARGIN
        if (over and step < steps) or now - last_saved > SAVE_EVERY:
            session.seconds += now - begun
            begun = last_saved = now
            context.scratch.mkdir(parents=True, exist_ok=True)
            state = session.state()
            replace_file(saved, partial(torch.save, state))
        if over and step < steps:
            return None
    session.seconds += time.monotonic() - begun
    own = {"commit": ", ".join(session.commits), "passes": session.passes, "precision": session.precision}
    history = replace(session.history(), where={**where, **own})
    write(file_of(context, run), history)
    saved.unlink(missing_ok=True)
    return history


def _resume(session: VirtualSession, saved: Path, device: torch.device) -> None:
    """Resume from a checkpoint; one that does not fit is put aside."""
    try:
        session.load(load_verified(saved, device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # what is in the file may be anything
        aside = saved.with_suffix(".damaged")
        saved.replace(aside)
        raise DamagedCheckpoint(f"{aside}, as it is called now, cannot be resumed from: {one_line(error)}") from None


def _task(run: Run, context: RunContext) -> Task:
    how: dict[str, Any] = {"workers": run.workers, "batch": run.batch, "seed": run.seed}
    if run.autocast and (run.model in IMAGENET or CATALOGUE[run.model].data not in ("mnist", "cifar10")):
        raise ValueError(f"autocast is for models of MNIST and CIFAR-10, got {run.model!r}")
    if run.resized and run.model != "lenet5":
        raise ValueError(f"resized is for LeNet-5, got {run.model!r}")
    if run.model in IMAGENET:
        folder = data_folder(context.data, "ImageNet", SOURCE)
        return image_folder_task(
            folder, models.build(run.model).to(context.device), context.device, limit=run.limit, **how
        )
    how = {**how, "limit": run.limit, "autocast": run.autocast, "windows": run.windows, "resized": run.resized}
    return tasks.make_task(run.model, context.data, context.device, **how)


CARRIED = ("known", "sent", "points", "scores", "bytes", "snapshots", "seconds", "commits")


class VirtualSession:
    """A training under way, and all of it that a checkpoint must hold."""

    def __init__(self, run: Run, task: Task, steps: int) -> None:
        self.run, self.task, self.steps = run, task, steps
        on_gpu = next(task.model.parameters()).is_cuda
        shared = run.method not in LOCAL  # whose workers have weights of their own
        batched = on_gpu and shared and task.mean and not run.autocast and can_be_batched(task.model)
        self.passes = "together" if batched else "one worker after another"  # as stored results call them
        self.precision = "bf16 autocast" if run.autocast else "tf32" if on_gpu else "fp32"
        how = {
            "graph": task.graph,
            "streams": STREAMS if task.graph else 1,
            "passes": BatchedPasses if batched else SequentialPasses,
        }
        self.virtual_workers = _workers(replace(run, steps=steps), task, how)
        density = run.options.get("density") or run.settings.get("density", 0.001)
        self.watch: StepObserver | None = None
        self.counts: CountObserver | None = None
        if run.watch == "count":
            assert isinstance(self.virtual_workers, VirtualWorkers)
            self.counts = CountObserver(self.virtual_workers, run.watch_every)
        elif run.watch:
            assert isinstance(self.virtual_workers, VirtualWorkers)
            self.watch = StepObserver(self.virtual_workers, run.watch, run.clip, density)
        self.rates = [float(group["lr"]) for group in self.virtual_workers.optimizer.param_groups]
        self.losses: list[torch.Tensor] = []  # stay on the device until a point
        self.known: list[float] = []
        self.sent: list[float] = []
        self.points: list[int] = []
        self.scores: list[float] = []
        self.bytes: list[float] = []
        self.snapshots: list[dict[str, Any]] = []
        self.seconds = 0.0
        self.commits: list[str] = []  # with which it was begun and resumed

    def advance(self, batch: list[tuple[torch.Tensor, ...]]) -> None:
        """Train one step."""
        step = self.virtual_workers.step
        factor = rate_factor(self.run, step / self.steps)
        for group, rate in zip(self.virtual_workers.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = factor * rate
        if self.task.resets_carried and step % self.task.epoch == 0:
            self.virtual_workers.forget()
        watched = self.watch if self.watch and (step + 1) % self.run.watch_every == 0 else None
        if watched:
            watched.before()
        before = self.virtual_workers.tally.bytes
        self.losses.append(self.virtual_workers.backward(batch).detach().clone())
        if watched:
            self.snapshots.append(watched.after())
        if self.counts:
            self.snapshots += self.counts.after()
        if not self.run.feedback:
            assert isinstance(self.virtual_workers, VirtualWorkers)
            lose_residuals(self.virtual_workers)
        self.virtual_workers.optimizer.step()
        self.sent.append(self.virtual_workers.tally.bytes - before)

    def point(self) -> None:
        """Measure, and fetch the losses from the device."""
        self._fetch()
        self.points.append(self.virtual_workers.step)
        self.scores.append(self.task.evaluate())
        self.bytes.append(self.virtual_workers.tally.bytes)

    def state(self) -> dict[str, Any]:
        self._fetch()
        own = {name: getattr(self, name) for name in CARRIED}
        return {"virtual_workers": self.virtual_workers.state_dict(), "data": self.task.checksum, **own}

    def load(self, state: Mapping[str, Any]) -> None:
        if state["data"] != self.task.checksum:
            raise ValueError("it was begun with other data")
        self.virtual_workers.load_state_dict(state["virtual_workers"])
        for name in CARRIED:
            setattr(self, name, state[name])

    def history(self) -> History:
        self._fetch()
        self.virtual_workers.detach()
        task = self.task
        about = {"name": task.name, "size": task.size, "sha256": task.checksum}
        density = self.virtual_workers.tally.density
        return History(
            self.run, task.score, self.points, self.scores, self.bytes, self.known, self.sent, density, self.seconds,
            task.epoch, self.snapshots, about,
        )  # fmt: skip

    def _fetch(self) -> None:
        if self.losses:
            self.known += torch.stack(self.losses).tolist()
            self.losses = []


def _workers(run: Run, task: Task, how: Mapping[str, Any]) -> VirtualWorkers | BaselineWorkers:
    """Return the workers of the library, or of a baseline."""
    if run.method in BASELINES or run.method == OUTER:
        if task.carried:
            raise ValueError(f"method {run.method!r} carries nothing on from step to step, as {run.model} must")
        own: dict[str, Any] = {"rate": run.rate, "weight_decay": run.weight_decay, "clip": run.clip}
        if run.method == OUTER:
            steps = run.steps if "budget" in run.options else None
            own |= {"betas": (run.beta1, run.beta2), "total_steps": steps}
            return OuterWorkers(task.model, task.loss, run.workers, **own, **how, **run.options)
        return BASELINES[run.method](task.model, task.loss, run.workers, **own, **how, **run.options)
    options = run_options(run)
    if run.variant:
        options["exchange"] = partial(VariantExchange, FeedbackVariant(**run.variant))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what a paper does is done, whatever we think of it
        return VirtualWorkers(
            task.model, task.loss, run_optimizer(run, task), run.workers, carried=task.carried, **how, **options
        )


def run_optimizer(run: Run, task: Task) -> torch.optim.Optimizer:
    """Return SGD with momentum, or AdamW, or the same with a row x column second moment."""
    if run.decays_weights_only and run.optimizer != "sgd":
        raise ValueError(f"decays_weights_only is for sgd, got {run.optimizer!r}")
    if run.optimizer != "sgd":
        kind = torch.optim.AdamW if run.optimizer == "adamw" else FactoredAdamW
        return kind(task.model.parameters(), run.rate, (run.beta1, run.beta2), weight_decay=run.weight_decay)
    if run.decays_weights_only:
        parts = [[p for p in task.model.parameters() if (p.dim() > 1) == weights] for weights in (True, False)]
        decays: list[dict[str, Any]] = [{"params": parts[0]}, {"params": parts[1], "weight_decay": 0.0}]
        return torch.optim.SGD(decays, run.rate, run.momentum, weight_decay=run.weight_decay)
    return torch.optim.SGD(task.model.parameters(), run.rate, run.momentum, weight_decay=run.weight_decay)


def run_options(run: Run) -> dict[str, Any]:
    """Return the options of ``VirtualWorkers``."""
    extra = {} if run.clip is None else {"clip": run.clip}
    if run.method == DENSE:
        return {"compressor": "none", **extra}
    options = method_options(run.method.replace(SIGNED_GTOPK, "gtopk"), **run.options)
    assert options is not None
    if "budget" in run.options:
        options["total_steps"] = run.steps
    elif run.method == "default":
        options = {**FIRST_DEFAULT, **run.options}
    elif run.method == "balanced" and run.optimizer == "adamw" and "precondition" not in run.options:
        options.setdefault("momentum", "move")  # likewise: it lowered Adam's betas
    if run.front != 1:
        assert run.steps is not None
        options["density"] = FrontLoaded(run.options["density"], run.steps, run.front)
    if run.densities:
        assert run.steps is not None
        options["density"] = DensityStages(run.densities, run.steps, run.options["density"])
    if run.settings:
        name = run.method.partition("+")[0]
        if name in RECIPES:
            raise ValueError(f"settings must be of a compressor, and {name!r} is a recipe, got {dict(run.settings)}")
        options["compressor"] = registry.compressors()[name](**run.settings)
    return {**options, "seed": run.seed, **extra}


def plan_of(run: Run) -> tuple[ExchangePlan, dict[str, Tensor]]:
    """Return what decides about a training's bytes: its plan, and the parameters without their memory."""
    with torch.device("meta"):
        model = CATALOGUE[run.model].make()
    # What the optimizer does changes no bytes, and it is not there.
    options = run_options(replace(run, front=1.0)) | {"momentum": "keep", "follow_lr": False}
    needless = ("clip", "beta", "masking")
    plan = resolve(**{name: value for name, value in options.items() if name not in needless})
    return plan, {name: p for name, p in model.named_parameters() if p.requires_grad}


def traffic_per_step(run: Run) -> Callable[[float], float]:
    """Return the bytes that a worker sends in a step, as a function of the density of what is compressed; on average if
    the density changes."""
    at = bytes_per_step(*plan_of(run), run.workers, whole=True)

    def mean(density: float) -> float:
        if run.front == 1:
            return at(density)
        assert run.steps is not None
        stages = FrontLoaded(density, run.steps, run.front).stages()
        return sum(count * at(now) for now, count in stages) / run.steps

    return mean
