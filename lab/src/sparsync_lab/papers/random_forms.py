"""The forms of Rand-k beside figure 1's: what became of their trainings on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sparsync_lab.papers.curves import display_score
from sparsync_lab.papers.item import RunContext
from sparsync_lab.papers.p1_runs import METHODS, training
from sparsync_lab.papers.run import History, Run, model_title
from sparsync_lab.papers.run_queue import stored_history
from sparsync_lab.papers.vgg16_gap import densities

FELL = 10.0  # points that an accuracy lost after its best
MODELS = ("vgg16", "resnet20", "lenet5")
# What follows "randk" in a label: whether it has its residual, and the density warm-up of the authors' code.
FORMS: Mapping[str, tuple[bool, bool]] = {
    ", no residual": (False, False),
    ", with residual, density warm-up": (True, True),
    ", no residual, density warm-up": (False, True),
}


def random_k(model: str, form: str) -> Run:
    """Return a training with a form of Rand-k."""
    feedback, staged = FORMS[form]
    own = {"densities": densities(120)} if staged else {}
    return training(model, "randk", label=f"randk{form}", feedback=feedback, **own)


def trained_on(context: RunContext) -> str:
    """Return on which models these forms are trained, and on which not, in words."""
    known: dict[bool, list[str]] = {True: [], False: []}
    for model in reversed(MODELS):
        runs = [random_k(model, form).made(context) for form in FORMS]
        known[all(stored_history(context.read_only(), run) for run in runs)].append(model_title(model))
    without = f" ({', '.join(known[False])}: not run)" if known[False] else ""
    *others, last = known[True] or ["no model yet"]
    return f"on {', '.join(others)}{' and ' if others else ''}{last}{without}"


def fallen_note(histories: Iterable[History]) -> list[str]:
    """Return which trainings with Rand-k reached far more than they ended with."""
    told = []
    for history in histories:
        best, last = (display_score(score, history.score) for score in (history.best, history.last))
        if history.run.method == METHODS["randk"] and history.run.label.startswith("randk") and best - last > FELL:
            step = history.points[list(history.scores).index(history.best)]
            told.append(
                f"{model_title(history.run.model)} ({history.run.label}) reached {best:.1f} % at step {step:,} of "
                f"{len(history.losses):,} and ended at {last:.1f}"
            )
    return [f"With Rand-k a training can fall back: {'; '.join(told)}."] if told else []
