"""The charts of ``beyond/evidence``: the trainings of a question over epochs, beside dense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparsync_lab.papers import random_forms
from sparsync_lab.papers.curves import by_epoch, spread_caption
from sparsync_lab.papers.differences import SEED
from sparsync_lab.papers.evidence_questions import RANDOM, SETTINGS, TREE
from sparsync_lab.papers.gaussian_forms import count_figures
from sparsync_lab.papers.run import History, Run, model_title
from sparsync_lab.report import Figure
from sparsync_lab.training.methods import DENSE

# What is drawn of a question, and of which models; the other questions have tables alone.
DRAWN = {
    SETTINGS: ("settings of text and code", ("vgg16", "resnet20", "lenet5")),
    RANDOM: ("forms of Rand-k", random_forms.MODELS),
    TREE: ("forms of gTop-k", ("resnet20",)),
}


def question_figures(name: str, runs: Sequence[Run], done: Mapping[str, History]) -> list[Figure]:
    """Draw scores over epochs, in a chart for each model; nothing where no two trainings are done. A method looks the
    same in all of them, dense and TopK-SGD in those of all questions. Counts are drawn where they are an answer.

    Args:
        name: of the question.
        runs: its trainings, and before them those that they are compared with.
        done: by name.
    """
    figures = []
    words, models = DRAWN.get(name, ("", ()))
    labels = (run.label.partition(SEED)[0] for run in runs if run.model in models)
    looks = {label: number for number, label in enumerate(dict.fromkeys((DENSE, "topk", *labels)))}
    for model in models:
        own = {run.label: done[run.name] for run in runs if run.model == model and run.name in done}
        own = dict(sorted(own.items(), key=lambda each: each[1].run.method != DENSE))
        if len(own) > 1:
            caption = f"{model_title(model)}, {words}: test accuracy; {spread_caption(own)}."
            figures.append(by_epoch(f"{model_title(model)} accuracy, {words}", own, caption, looks))
            figures += count_figures(f"{model_title(model)}, {words}", own, looks) if name == SETTINGS else []
    return figures
