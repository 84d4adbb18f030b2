"""Time to accuracy: scores of stored trainings, after every step, over the seconds that such steps take on a network.

A stored training (virtual workers) says what a step sends and which scores were reached; the lab says how long a step
is, with compute that is waited for. Where a training sends more in some steps than in others, its smallest and its
largest step are measured, and the others lie between them as their bytes do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparsync.config import ExchangePlan, resolve
from sparsync.config.recipes import AUTO
from sparsync.engine.auto import DENSE as DENSE_WAY
from sparsync.engine.budget import within_budget
from sparsync_lab.baselines import BASELINES
from sparsync_lab.network.auto_comparison import SettledMethod
from sparsync_lab.network.emulated_model import shapes_of
from sparsync_lab.network.methods import NetworkMethod, plan_at
from sparsync_lab.network.steps import StepCell
from sparsync_lab.network.sweep import SweepFile, key_of
from sparsync_lab.papers import run as runs
from sparsync_lab.papers import store
from sparsync_lab.papers.run import History, Run
from sparsync_lab.papers.trainings import run_options
from sparsync_lab.training.methods import DENSE

FLOAT, BF16 = NetworkMethod(DENSE), NetworkMethod("bf16")
NEAR = 0.01  # of the dense training's best score: that near is near enough


@dataclass(frozen=True)
class RunStage(NetworkMethod):
    """Steps of a stored training at one of its densities; ``name``, ``optimizer`` and ``run`` are the training's."""

    run: Run | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Check nothing: the training was made."""

    @property
    def label(self) -> str:
        assert self.run is not None
        return f"{self.run.label} at {self.density:.4g}"

    @property
    def own_density(self) -> float | None:
        return self.density

    def plan(self, module: nn.Module, workers: int) -> ExchangePlan | None:
        assert self.run is not None
        return plan_at(run_plan(self.run, module), self.density)


def run_plan(run: Run, module: nn.Module) -> ExchangePlan:
    """Return how a stored training exchanges the gradients of a model."""
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), run.rate, run.momentum)
    if run.optimizer == "adamw":
        optimizer = torch.optim.AdamW(module.parameters(), run.rate, (run.beta1, run.beta2))
    plan = resolve(optimizer=optimizer, **run_options(run))
    return within_budget(plan, dict(module.named_parameters()), run.workers)


def method_name(label: str) -> str:
    """Return what a training is called, without its length, rate and seed."""
    return re.sub(r", rate [\d.]+, seed \d+", "", re.sub(r"^[\d,]+ ", "", label))


def read_training(path: Path) -> History:
    """Read a training that ``sparsync papers run`` stored."""
    plain = store.read_json(path)
    with store.whole(path):
        history = runs.read(path, Run(**plain["run"]))
    run = history.run
    if run.method in BASELINES or run.optimizer == "factored-adamw":
        raise ValueError(f"{path} is of {run.method} with {run.optimizer}, which real processes do not train")
    if run.variant:
        raise ValueError(f"{path} is of a variant for ablations, which real processes do not train")
    shapes_of(run.model)
    return history


def methods_of(history: History) -> list[NetworkMethod]:
    """Return what is timed for a training: its steps with the fewest and with the most bytes; a dense one's with DDP's
    own hooks."""
    run = history.run
    if run.method == DENSE:
        return [FLOAT, BF16]
    with torch.device("meta"):
        module = nn.ParameterList([torch.empty(shape) for shape in shapes_of(run.model)])
    plan = run_plan(run, module)
    densities = {plan.density_at(step) for step in range(len(history.losses))}
    return [RunStage(run.name, density, run.optimizer, run) for density in sorted({min(densities), max(densities)})]


@dataclass(frozen=True)
class TimedTraining:
    """A training over time on a network.

    Args:
        label: what it is called.
        minutes: of compute and exchange until each of the history's points.
    """

    history: History
    label: str
    cell: StepCell
    minutes: Sequence[float]

    def minutes_to(self, target: float) -> float | None:
        """Return the minutes after which a score was first as good as ``target``, if it ever was."""
        sign = 1 if self.history.score == "accuracy" else -1
        scored = zip(self.minutes, self.history.scores, strict=True)
        return next((minutes for minutes, score in scored if sign * score >= sign * target), None)

    def to_csv(self) -> list[dict[str, Any]]:
        """Return a row for every point, without machine and date."""
        run = self.history.run
        fixed = {
            "model": run.model,
            "workers": run.workers,
            "rate_mbit": f"{self.cell.rate.mbit:g}",
            "compute_ms": f"{1e3 * self.cell.compute:g}",
            "label": self.label,
            "training": run.name,
            "seconds": "steps measured with compute waited for, scores of virtual workers",
            "score": self.history.score,
        }
        rows = zip(self.history.points, self.minutes, self.history.scores, strict=True)
        return [{**fixed, "step": step, "minutes": f"{m:.3f}", "value": f"{value:.5g}"} for step, m, value in rows]


def timed(history: History, cell: StepCell, file: SweepFile) -> list[TimedTraining]:
    """Return a training over time from measured steps; a dense one twice, in fp32 and in bf16."""
    run = history.run
    seconds = [file.median(key_of(run.workers, cell, method)) for method in methods_of(history)]
    if run.method == DENSE:
        labels = (run.label, f"{run.label}, bf16 (scores of fp32)")
        return [_timed(history, label, cell, [own, own]) for label, own in zip(labels, seconds, strict=True)]
    return [_timed(history, run.label, cell, [seconds[0], seconds[-1]])]


def auto_of(histories: Sequence[History]) -> SettledMethod:
    """Return 'auto' as it would train what stored trainings of one model have trained."""
    return SettledMethod(AUTO, optimizer=histories[0].run.optimizer)


def timed_auto(histories: Sequence[History], cell: StepCell, file: SweepFile) -> list[TimedTraining]:
    """Return 'auto' over time, from its measured steps: with the scores of the dense trainings where it has settled on
    dense steps, of those with the way that it has settled on elsewhere, of all sparse ones if there are none."""
    key = key_of(histories[0].run.workers, cell, auto_of(histories))
    seconds, way = file.median(key), file.decided(key)
    dense = [history for history in histories if history.run.method == DENSE]
    sparse = [history for history in histories if history.run.method != DENSE]
    own = [history for history in sparse if history.run.method == way.split()[0]]
    chosen = dense if way == DENSE_WAY else own or sparse
    labels = [history.run.label.replace(method_name(history.run.label), AUTO) for history in chosen]
    return [_timed(history, label, cell, [seconds] * 2) for history, label in zip(chosen, labels, strict=True)]


def _timed(history: History, label: str, cell: StepCell, ends: Sequence[float]) -> TimedTraining:
    least, most = min(history.sent), max(history.sent)
    shares = [(sent - least) / (most - least) if most > least else 0.0 for sent in history.sent]
    passed = list(accumulate(ends[0] + share * (ends[1] - ends[0]) for share in shares))
    return TimedTraining(history, label, cell, [passed[step - 1] / 60 for step in history.points])


def near_dense(histories: Sequence[History]) -> Mapping[str, float]:
    """Return, by model, the score that counts as reached: a hundredth worse than the best of the dense trainings."""
    found = dict[str, float]()
    for history in histories:
        if history.run.method == DENSE:
            best = history.best * (1 - NEAR if history.score == "accuracy" else 1 + NEAR)
            known = found.get(history.run.model, best)
            found[history.run.model] = max(known, best) if history.score == "accuracy" else min(known, best)
    return found
