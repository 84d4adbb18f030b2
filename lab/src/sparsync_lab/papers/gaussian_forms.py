"""The forms of Gaussian-k in P1's figure 6: what each is, and how many entries it sent in trainings that counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from sparsync.layout import entries_for
from sparsync_lab.models import CATALOGUE
from sparsync_lab.papers.curves import by_seed
from sparsync_lab.papers.differences import in_words
from sparsync_lab.papers.item import RunContext
from sparsync_lab.papers.p1_runs import (
    AUTHORS,
    CARRIED,
    COUNT_EVERY,
    COUNTED,
    HELD,
    HELD_COUNTED,
    ITS_COUNTS,
    counts_title,
    every_run,
    training,
)
from sparsync_lab.papers.run import History, model_title
from sparsync_lab.papers.run_queue import stored_history
from sparsync_lab.papers.vgg16_gap import PLAIN, cause
from sparsync_lab.report import Curve, Figure, LineChart

MODELS = ("lenet5", "resnet20", "vgg16")
ONE_SIDED = (
    "gaussiank is Algorithm 1 as printed: the one-sided quantile and at most four masks, of which the last counts. Its "
    "messages have room for 8 k entries and travel whole: they are about eight times as long as TopK-SGD's, however "
    "few it sends."
)
FORM_NOTES = (
    ONE_SIDED,
    f"{HELD}: where the last count is more than 10 % off k, the k largest go instead. Under error feedback the fit is "
    "far off k, as the rows as printed show: take it for TopK-SGD, and for no evidence for Gaussian-k.",
    f"{AUTHORS} has the threshold rule of the published code, the two-sided quantile and three masks, with the text's "
    "settings: no weight decay, and no density warm-up.",
    f"{CARRIED} searches its threshold: around the fitted quantile times the factor that the step before ended with, "
    "entries are counted at six thresholds, and three times more at six between two of these, for the one that lets k "
    "through. The k largest go only where none near it gives a count from two thirds of k (what the paper's loop "
    "accepts) to a tenth above k.",
    "Any magnitude threshold picks the largest entries. Held and carried therefore select as TopK does; only the count "
    "differs.",
    f"{COUNTED} is the training of gaussiank made again, with its counts stored. {HELD_COUNTED} is that of {HELD} made "
    "again; only its counts are shown.",
)
# Commits of trainings that are stored from before 78931146, from which on a carried count below 0.9 k is enough.
BEFORE_RULE = ("8e7d6c6",)


def stored(context: RunContext, form: str) -> dict[str, History]:
    """Return the stored trainings of a form by model, the first seed's; none in a tiny setting."""
    models = () if context.quick else MODELS
    found = {model: stored_history(context.read_only(), training(model, form).made(context)) for model in models}
    return {model: history for model, history in found.items() if history is not None}


def every_seed(context: RunContext, form: str) -> list[History]:
    """Return the stored trainings of a form on all models, with all seeds, as figure 6 draws them; none in a tiny
    setting."""
    models = () if context.quick else MODELS
    runs = [run for model in models for run in every_run(context, model, form)]
    found = (stored_history(context.read_only(), run.made(context)) for run in runs)
    return [history for history in found if history is not None]


def fallback_note(form: str, histories: Sequence[History]) -> list[str]:
    """Return how often the k largest went instead of a mask, by what trainings have counted, of all seeds together."""
    told = []
    for model in MODELS:
        seen = [(own.run.workers, looks) for own in histories if own.run.model == model and (looks := _looks(own))]
        if seen:
            selections = sum(looks[-1]["step"] * workers for workers, looks in seen)
            fallbacks, first = (sum(looks[at]["fallbacks"] for _, looks in seen) for at in (-1, 0))
            seeds = f" ({in_words(len(seen))})" if len(seen) > 1 else ""
            told.append(
                f"{fallbacks:,} of {selections:,} selections of {model_title(model)}{seeds}, {first:,} of them in the "
                f"first {seen[0][1][0]['step']} steps"
            )
    return [f"With {form.removesuffix(ITS_COUNTS)} the k largest went in {'; '.join(told)}."] if told else []


def _looks(history: History) -> list[Mapping[str, Any]]:
    """Return the looks of a training at which was counted."""
    return [snapshot for snapshot in history.snapshots if "fallbacks" in snapshot]


def uncounted_note(context: RunContext) -> list[str]:
    """Return the models on which nothing was counted with the held form, though it was trained."""
    counted, made = stored(context, HELD_COUNTED), stored(context, HELD)
    missing = [model_title(model) for model in made if model not in counted]
    return [f"With {HELD} nothing was counted on {', '.join(missing)}."] if counted and missing else []


def older_rule(context: RunContext) -> list[str]:
    """Return which stored trainings of the carried form were made with an older rule."""
    short = None if context.quick else stored_history(context.read_only(), cause(CARRIED, PLAIN).made(context))
    made = [*every_seed(context, CARRIED), *([short] if short else [])]
    old = [history.run for history in made if history.where.get("commit", "").startswith(BEFORE_RULE)]
    listed = dict.fromkeys(f"{model_title(run.model)} ({run.epochs:g} epochs, seed {run.seed})" for run in old)
    return [f"{CARRIED}: {', '.join(listed)} used an older rule, which fell back below 0.9 k."] if listed else []


def looks_of(labels: Sequence[str]) -> dict[str, int]:
    """Return how methods look in all charts, as in ``Curve``: one that was trained again to count looks as before."""
    first = [*dict.fromkeys(label.removesuffix(ITS_COUNTS) for label in labels)]
    return {label: first.index(label.removesuffix(ITS_COUNTS)) for label in labels}


def count_figures(title: str, histories: Mapping[str, History], looks: Mapping[str, int]) -> list[Figure]:
    """Draw how many entries a worker sent over the training, as a multiple of k, where that was counted.

    Args:
        looks: as in ``Curve``, by label.
    """
    curves, more_at_first = [], False
    for label, seeds in by_seed(histories).items():
        run = seeds[0].run
        k = entries_for(float(run.options.get("density", 1)), CATALOGUE[run.model].parameters)
        counted = [seen for seen in map(_looks, seeds) if seen and "mean" in seen[0]]
        if counted:
            at = [[look["mean"] / k for look in same] for same in zip(*counted, strict=True)]
            low, high = ([*map(end, at)] if len(counted) > 1 else [] for end in (min, max))
            steps = [look["step"] for look in counted[0]]
            curves.append(Curve(label, steps, [*map(mean, at)], look=looks[label], low=low, high=high))
            more_at_first = more_at_first or bool(run.densities)
    chart = LineChart(counts_title(title), "steps", curves, log_y=True)
    range_of_seeds = ", of several seeds with their range" if any(curve.low for curve in curves) else ""
    which = ", which is 0.1 % throughout, though more is asked for in the first two epochs" if more_at_first else ""
    told = f"the mean of a worker's entries over {COUNT_EVERY} steps, as a multiple of k{which}{range_of_seeds}"
    caption = f"{title}: {told}."
    return [Figure(chart, caption)] if curves else []
