"""Trainings as charts and tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparsync_lab.papers.differences import DIVERGED, NO_PAIR, SEED, stated_gap
from sparsync_lab.papers.item import Result, RunContext
from sparsync_lab.papers.run import SEEDS, History, Run, merged_data, merged_where, model_title
from sparsync_lab.papers.run_queue import train_missing
from sparsync_lab.report import Curve, Figure, LineChart, Row, Table
from sparsync_lab.training.methods import DENSE

HALF = (
    "Where the data folder holds only half of CIFAR-10 (25,000 training images, 3,000 test images), that is what is "
    "trained on: an epoch has half the steps, and accuracies are lower than with all of it."
)
OVER_SEEDS = "Differences are over the seeds that both rows have, and so not always those of the means."
VIRTUAL = (
    "The workers are virtual: one process computes the gradients of all of them, with the library's own compressors, "
    "residuals and sums, which gives the weights that as many processes would get. On a GPU the workers' batches may "
    "pass through a network together, which differs from that by rounding, and by the draws of dropout; elsewhere each "
    "worker has a pass of its own. The file of a training says how it was (passes, precision); where it does not, "
    "networks for MNIST and CIFAR-10 went together on a GPU, others apart, and only convolutions were of TF32, in "
    "later ones products too (docs/papers-provenance.md)."
)


def train_runs(context: RunContext, runs: Sequence[Run]) -> tuple[dict[str, History], Result]:
    """Train what is missing; return the runs' histories by label, and a result that holds what all such items have in
    common."""
    done, missing = train_missing(context, runs)
    return done, base_result(context, list(done.values()), missing)


def base_result(context: RunContext, histories: Sequence[History], missing: Sequence[str]) -> Result:
    """Return a result that holds what all items that train have in common.

    Args:
        missing: what is not done yet, in words.
    """
    notes = [VIRTUAL]
    if any(history.data["name"] == "cifar10-half" for history in histories):
        notes.append(HALF)
    for model in dict.fromkeys(history.run.model for history in histories):
        own = [history for history in histories if history.run.model == model and not history.run.resized]
        sets = {h.data["sha256"]: f"{h.data['name']} ({h.data['size']})" for h in own}
        if len(sets) > 1:
            those = " or ".join(sets.values())
            notes.append(f"{model_title(model)} was not always trained with the same data, but with {those}.")
    # Trainings of so many steps have them whatever is asked for.
    lengths = sorted({len(history.losses) for history in histories if history.run.steps is None})
    if context.epochs is not None and lengths:
        steps = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"
        notes.append(f"Trained for {context.epochs:g} epochs ({steps} steps), the schedule shortened in proportion.")
    return Result(
        notes=notes,
        runs=[history.run.name for history in histories],
        missing=missing,
        data=merged_data(histories),
        where=merged_where(histories),
        seconds=sum(history.seconds for history in histories),
    )


def by_epoch(
    title: str, histories: Mapping[str, History], caption: str, looks: Mapping[str, int] | None = None
) -> Figure:
    """Draw scores over epochs; accuracies in %. Of several seeds their mean, and the band from the lowest to the
    highest.

    Args:
        looks: as in ``Curve``, by label.
    """
    curves = []
    for label, seeds in by_seed(histories).items():
        first = seeds[0]
        alike = [history for history in seeds if history.points == first.points]
        epochs = [step / first.epoch for step in first.points]
        own = [[display_score(score, history.score) for score in history.scores] for history in alike]
        values = [statistics.mean(at) for at in zip(*own, strict=True)]
        band = {} if len(own) == 1 else {"low": [min(at) for at in zip(*own, strict=True)],
                                         "high": [max(at) for at in zip(*own, strict=True)]}  # fmt: skip
        curves.append(Curve(label, epochs, values, look=(looks or {}).get(label), **band))
    kinds = {history.score for history in histories.values()}
    unit = "%" if "accuracy" in kinds else ""
    return Figure(LineChart(title, "epochs", curves, y_unit=unit, log_y=kinds == {"perplexity"}), caption)


def loss_by_step(title: str, histories: Mapping[str, History], caption: str) -> Figure:
    """Draw training losses, each point the mean of a fortieth of the training. Of several seeds their mean, and the
    band from the lowest to the highest."""
    curves = []
    for label, seeds in by_seed(histories).items():
        alike = [history.losses for history in seeds if len(history.losses) == len(seeds[0].losses)]
        width = max(1, len(alike[0]) // 40)
        starts = range(0, len(alike[0]) - width + 1, width)
        means = [[sum(losses[i : i + width]) / width for losses in alike] for i in starts]
        low, high = ([*map(end, means)] if len(alike) > 1 else [] for end in (min, max))
        curves.append(Curve(label, [i + width for i in starts], [*map(statistics.mean, means)], low=low, high=high))
    return Figure(LineChart(title, "steps", curves, log_y=True), caption)


def scores(caption: str, histories: Mapping[str, History]) -> Table:
    """Return a table of best and last score, bytes and density of every training; of several seeds the mean and
    deviation."""
    rows = []
    groups = by_seed(histories)
    base = groups.get(DENSE, [])
    for label, own in groups.items():
        rows.append(
            Row(
                [
                    label,
                    mean_and_std(own),
                    f"{statistics.mean(display_score(h.best, h.score) for h in own):.2f}",
                    "–" if label == DENSE else shown_difference(own, base),
                    str(len(own)),
                    f"{statistics.mean(h.bytes[-1] if h.bytes else 0 for h in own) / 1e6:,.2f} MB",
                    f"{100 * statistics.mean(h.density for h in own):.3g} %",
                    f"{len(own[0].losses):,}",
                    f"{statistics.mean(h.seconds for h in own):,.0f} s",
                ]
            )
        )
    kinds = {history.score for history in histories.values()}
    kind = f"{next(iter(kinds))}{', %' if kinds == {'accuracy'} else ''}" if len(kinds) == 1 else "score"
    headings = [
        "training", f"{kind}, last", "best", "to dense", "seeds", "sent by a worker", "density", "steps", "time"
    ]  # fmt: skip
    return Table(caption, headings, rows, seeds_notes(groups.values(), base))


def with_seeds(context: RunContext, run: Run, **changes: Any) -> list[Run]:
    """Return a training with all seeds; alone in a tiny setting, and where a seed is asked for.

    Args:
        changes: of those with another seed than the first.
    """
    if context.seed:
        return [replace(run, label=f"{run.label}{SEED}{context.seed}")]  # called as it is among the others
    if context.quick:
        return [run]
    others = [replace(run, label=f"{run.label}{SEED}{seed}", seed=seed, **changes) for seed in SEEDS[1:]]
    return [run, *others]


def by_seed(histories: Mapping[str, History]) -> dict[str, list[History]]:
    """Group trainings by label, those together that differ by the seed."""
    found: dict[str, list[History]] = {}
    for label, history in histories.items():
        found.setdefault(label.partition(SEED)[0], []).append(history)
    return found


def with_their_seeds(rows: Mapping[str, Sequence[History]]) -> dict[str, History]:
    """Return trainings by labels that tell the seed, as ``by_seed`` reads them."""
    return {
        f"{label}{SEED}{history.run.seed}" if number else label: history
        for label, histories in rows.items()
        for number, history in enumerate(histories)
    }


def spread_caption(histories: Mapping[str, History]) -> str:
    """Return how seeds are drawn, in words."""
    most = max((len(own) for own in by_seed(histories).values()), default=1)
    return (
        f"the mean of up to {most} seeds, in a band from the lowest to the highest" if most > 1 else "one seed of each"
    )


def first_seed(histories: Mapping[str, History]) -> dict[str, History]:
    """Return one training of each label, that with the first seed if it is there."""
    return {label: own[0] for label, own in by_seed(histories).items()}


def difference(histories: Sequence[History], others: Sequence[History]) -> float | None:
    """Return the difference between the means of two rows, over the seeds that both have; ``None`` if there is none, or
    if one diverged."""
    pairs = common_seeds(histories, others)
    gap = statistics.mean(own - other for own, other in pairs) if pairs else math.nan
    return gap if math.isfinite(gap) else None


def common_seeds(histories: Sequence[History], others: Sequence[History]) -> list[tuple[float, float]]:
    """Return the last scores of two rows, of every seed that both have."""
    both = [{h.run.seed: display_score(h.last, h.score) for h in row} for row in (histories, others)]
    return [(both[0][seed], both[1][seed]) for seed in sorted(both[0].keys() & both[1].keys())]


def seeds_notes(rows: Iterable[Sequence[History]], others: Sequence[History]) -> list[str]:
    """Return over what differences are, if rows do not all have the seeds of what they are compared with."""
    seeds = {history.run.seed for history in others}
    partly = any(own and {history.run.seed for history in own} != seeds for own in rows)
    return [OVER_SEEDS] if seeds and partly else []


def shown_difference(histories: Sequence[History], others: Sequence[History]) -> str:
    """Return ``difference`` as a table shows it."""
    seeds = len(common_seeds(histories, others))
    if not seeds:
        return NO_PAIR
    gap = difference(histories, others)
    if gap is None:
        return DIVERGED
    return stated_gap(gap, seeds) if others[0].score == "accuracy" else f"{gap:+.{_digits(others[0].score)}f}"


def mean_and_std(histories: Sequence[History]) -> str:
    """Return mean and, of two seeds or more, standard deviation; the mean alone where one of them diverged."""
    scores = [display_score(h.last, h.score) for h in histories]
    several, digits = len(scores) > 1 and all(map(math.isfinite, scores)), _digits(histories[0].score)
    return f"{statistics.mean(scores):.{digits}f}" + (f" ± {statistics.stdev(scores):.{digits}f}" if several else "")


def last_score(history: History) -> str:
    """Return where a training ends, as a table shows it."""
    return f"{display_score(history.last, history.score):.{_digits(history.score)}f}"


def _digits(kind: str) -> int:
    """Return how many digits of a score tell trainings apart."""
    return 3 if kind == "word error rate" else 2


def display_score(score: float, kind: str) -> float:
    return 100 * score if kind == "accuracy" else score


def quick_changes(run: Run, **changes: Any) -> dict[str, Any]:
    """Return the changes that make a training tiny."""
    return {"workers": min(run.workers, 2), "batch": min(run.batch, 4), "limit": 32, "steps": 4, **changes}
