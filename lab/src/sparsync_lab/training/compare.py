"""Compare methods: which trainings a comparison needs, and the summary of their outcomes."""

from __future__ import annotations

import logging
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparsync.config.budget import share_text
from sparsync.config.recipes import OURS, RECIPES
from sparsync_lab.data import load
from sparsync_lab.training.local_workers import PRELOAD, Worker, run_jobs
from sparsync_lab.training.loop import train
from sparsync_lab.training.methods import DENSE, check_options
from sparsync_lab.training.settings import ADAMW, Outcome, Point, Training, attach_options

MOVE = "move"  # momentum behind a low density delays every entry a second time
WORKER_MODULES = [*PRELOAD, __name__, "sklearn.datasets"]  # by the workers
POINTS = 25  # of a curve, about
TOLERANCE = 0.01  # a method whose mean accuracy is further under dense's misses it


@dataclass(frozen=True)
class MethodSummary:
    """One method over its seeds.

    Args:
        training: of the first seed.
        seeds: number of trainings.
        accuracy: mean share of the test images that are classified correctly.
        deviation: sample standard deviation of that over the seeds; ``None`` for one seed.
        gap: dense's mean accuracy less this one.
        bytes: put on the network by one worker in one step, mean.
        dense_bytes: the same for a dense ring all-reduce of fp32 entries.
        density: share of the entries that was sent, mean.
        step_s: median time of a step in seconds, median over the seeds.
        curves: of every seed.
        diverged: seeds whose training ended in NaN.
    """

    training: Training
    seeds: int
    accuracy: float
    deviation: float | None
    gap: float
    bytes: float
    dense_bytes: float
    density: float
    step_s: float
    curves: Sequence[Sequence[Point]]
    diverged: int = 0

    @property
    def label(self) -> str:
        return label(self.training)

    @property
    def misses(self) -> bool:
        """Return whether it learns less than dense by more than the tolerance, or nothing."""
        return self.gap > TOLERANCE or self.diverged > 0

    @property
    def ratio(self) -> float:
        """Return how many times fewer bytes than dense it sends; 0 for a worker alone, which sends none."""
        return self.dense_bytes / self.bytes if self.bytes else 0.0


def plan_trainings(
    methods: Sequence[str],
    seeds: int,
    like: Training,
    density: float | None = None,
    momentum_mode: str = MOVE,
) -> list[Training]:
    """Return the trainings of a comparison: every method with every seed, dense first.

    Args:
        methods: names as ``Training`` takes them; ``name@density`` gives one of them a density of its own.
        seeds: trainings of each method.
        like: everything else, for all of them.
        density: of the sparse methods that are not given one of their own; ``None``: as each of them has it.
        momentum_mode: of the sparse methods that are no recipes; ``attach``'s ``momentum``.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be 1 or more, got {seeds}")
    asked = [DENSE, *(method for method in methods if method != DENSE)]
    chosen = [_method_training(method, like, density, momentum_mode) for method in asked]
    labels = [label(training) for training in chosen]
    if repeated := {name for name in labels if labels.count(name) > 1}:
        raise ValueError(f"methods must differ, got {', '.join(sorted(repeated))} more than once")
    return [replace(training, seed=seed) for training in chosen for seed in range(seeds)]


def _method_training(method: str, like: Training, density: float | None, momentum_mode: str) -> Training:
    if method == DENSE:
        return replace(like, method=method)
    name, at, share = method.partition("@")
    if at and name == DENSE:
        raise ValueError(f"method {method!r}: dense sends every entry, and takes no density")
    if at:
        try:
            density = float(share)
        except ValueError:
            raise ValueError(f"method {method!r}: after @ comes a density in (0, 1], got {share!r}") from None
    mode = None if name in RECIPES or like.optimizer == ADAMW else momentum_mode  # which is SGD's
    return replace(like, method=name, density=density, momentum_mode=mode)


def train_all(
    trainings: Sequence[Training], data_folder: Path | None, workers: int, progress: Callable[[int], None]
) -> list[Outcome]:
    """Run the trainings one after another on the same ``workers`` processes.

    Args:
        data_folder: where images lie that are not bundled.
        progress: is called with the number of steps done since the last call.
    """
    return run_jobs(_train, workers, [(training, data_folder) for training in trainings], progress, WORKER_MODULES)


def _train(worker: Worker, job: tuple[Training, Path | None]) -> Outcome | None:
    training, data_folder = job
    done = 0

    def on_step(step: int) -> None:
        nonlocal done
        worker.report(step - done)
        done = step

    # What a method may do wrong is what is being found out: it shows in the outcome.
    warnings.simplefilter("ignore", UserWarning)
    logging.getLogger("sparsync").setLevel(logging.ERROR)
    return train(worker.rank, worker.count, training, load(training.data, data_folder), points=POINTS, on_step=on_step)


def summarize(outcomes: Sequence[Outcome]) -> list[MethodSummary]:
    """Return a summary of each method, in the order of the outcomes; the others are compared with the first."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(label(outcome.training), []).append(outcome)
    against = statistics.fmean(outcome.accuracy for outcome in next(iter(groups.values())))
    return [_summary(group, against) for group in groups.values()]


def label(training: Training) -> str:
    """Return the method, and its density where that was asked for."""
    return training.method if training.density is None else f"{training.method} {100 * training.density:g} %"


def options(training: Training) -> dict[str, str]:
    """Return the options of ``attach`` that a method stands for, by their names."""
    given = attach_options(training)
    names = ("compressor", "density", "collective", "scope", "values", "indices", "momentum")
    if given is None:
        return dict.fromkeys(names, "–") | {"momentum": "keep"}
    made = check_options(given)
    recipe: Mapping[str, Any] = RECIPES[given["recipe"]].options if "recipe" in given else {}
    momentum = given.get("momentum", recipe.get("momentum", "keep"))
    if training.optimizer == ADAMW:
        momentum = "preconditioned" if given.get("recipe") in OURS else "keep"
    kinds = type(made.compressor).__name__, f"{made.density(0):g}", type(made.collective).__name__
    how = made.scope, made.values, made.indices, momentum
    if made.budget is not None:  # the rest is known when the workers have started
        by_budget = f"by a budget of {share_text(made.budget.share)}"
        kinds, how = (kinds[0], by_budget, by_budget), (made.scope, by_budget, made.indices, momentum)
    return dict(zip(names, (*kinds, *how), strict=True))


def _summary(group: Sequence[Outcome], against: float) -> MethodSummary:
    mean = statistics.fmean
    accuracies = [outcome.accuracy for outcome in group]
    return MethodSummary(
        group[0].training,
        len(group),
        mean(accuracies),
        statistics.stdev(accuracies) if len(group) > 1 else None,
        against - mean(accuracies),
        mean(outcome.bytes for outcome in group),
        group[0].dense_bytes,
        mean(outcome.density for outcome in group),
        statistics.median(outcome.step_s for outcome in group),
        [outcome.curve for outcome in group],
        sum(outcome.diverged for outcome in group),
    )
