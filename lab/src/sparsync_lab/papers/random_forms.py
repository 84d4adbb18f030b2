"""The forms of Rand-k beside figure 1's: what became of their trainings on the way."""

from __future__ import annotations

from collections.abc import Iterable

from sparsync_lab.papers.curves import display_score
from sparsync_lab.papers.p1_runs import METHODS
from sparsync_lab.papers.run import History, model_title

FELL = 10.0  # points that an accuracy lost after its best


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
