"""Methods side by side: which trainings a comparison needs, and what is made of their outcomes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sparsync.experiments.methods import DENSE
from sparsync.experiments.training import Outcome, Point, Training

TOLERANCE = 0.01  # a method whose mean accuracy is further under dense's misses it


@dataclass(frozen=True)
class Line:
    """One method over its seeds.

    Args:
        label: the method, and its density where that was asked for.
        seeds: number of trainings.
        accuracy: mean share of the test images that are classified correctly.
        deviation: sample standard deviation of that over the seeds; ``None`` for one seed.
        gap: dense's mean accuracy less this one.
        bytes: put on the network by one worker in one step, mean.
        dense_bytes: the same for a dense ring all-reduce of fp32 entries.
        density: share of the entries that was sent, mean.
        step_s: median time of a step in seconds, median over the seeds.
        curves: of every seed.
    """

    label: str
    seeds: int
    accuracy: float
    deviation: float | None
    gap: float
    bytes: float
    dense_bytes: float
    density: float
    step_s: float
    curves: Sequence[Sequence[Point]]

    @property
    def misses(self) -> bool:
        """Whether it learns less than dense by more than the tolerance."""
        return self.gap > TOLERANCE

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than dense; 0 for a worker alone, which sends none."""
        return self.dense_bytes / self.bytes if self.bytes else 0.0


def plan(methods: Sequence[str], seeds: int, like: Training, density: float | None = None) -> list[Training]:
    """The trainings of a comparison: every method with every seed, dense first.

    Args:
        methods: names as ``Training`` takes them; ``name@density`` gives one of them a density of its own.
        seeds: trainings of each method.
        like: everything else, for all of them.
        density: of the sparse methods that are not given one of their own; ``None``: as each of them has it.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be 1 or more, got {seeds}")
    asked = [DENSE, *(method for method in methods if method != DENSE)]
    if repeated := {method for method in asked if asked.count(method) > 1}:
        raise ValueError(f"methods must differ, got {', '.join(sorted(repeated))} more than once")
    first = replace(like, method=DENSE)
    chosen = [first, *(_named(method, like, density) for method in asked[1:])]
    return [replace(training, seed=seed) for training in chosen for seed in range(seeds)]


def _named(method: str, like: Training, density: float | None) -> Training:
    name, at, share = method.partition("@")
    if at:
        try:
            density = float(share)
        except ValueError:
            raise ValueError(f"method {method!r}: after @ comes a density in (0, 1], got {share!r}") from None
    return replace(like, method=name, density=density)


def summarise(outcomes: Sequence[Outcome]) -> list[Line]:
    """A line for each method, in the order of the outcomes; the first method is the one the others are held against."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(label(outcome.training), []).append(outcome)
    against = statistics.fmean(outcome.accuracy for outcome in next(iter(groups.values())))
    return [_line(name, group, against) for name, group in groups.items()]


def label(training: Training) -> str:
    """The method, and its density where that was asked for."""
    return training.method if training.density is None else f"{training.method} {100 * training.density:g} %"


def _line(name: str, group: Sequence[Outcome], against: float) -> Line:
    mean = statistics.fmean
    accuracies = [outcome.accuracy for outcome in group]
    return Line(
        name,
        len(group),
        mean(accuracies),
        statistics.stdev(accuracies) if len(group) > 1 else None,
        against - mean(accuracies),
        mean(outcome.bytes for outcome in group),
        group[0].dense_bytes,
        mean(outcome.density for outcome in group),
        statistics.median(outcome.step_s for outcome in group),
        [outcome.curve for outcome in group],
    )
