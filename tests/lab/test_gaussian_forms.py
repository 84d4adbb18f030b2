"""The forms of Gaussian-k in figure 6: what pages say of them follows the stored trainings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from sparsync_lab.papers import evidence, gaussian_forms
from sparsync_lab.papers.item import RunContext
from sparsync_lab.papers.p1_convergence import figure_1, figure_6
from sparsync_lab.papers.p1_runs import CARRIED, COUNTED, HELD, HELD_COUNTED, training
from sparsync_lab.papers.run import History, Run, file_of, write
from sparsync_lab.papers.vgg16_gap import PLAIN, cause
from sparsync_lab.report import LineChart

SEEN = [{"step": 60, "mean": 60, "fallbacks": 16}]


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    return RunContext(output=tmp_path, scratch=tmp_path).read_only()


def store(
    context: RunContext, run: Run, score: float = 0.9, seen: Sequence[Mapping[str, object]] = (), commit: str = "abc"
) -> None:
    about = {"name": "cifar10", "size": "1", "sha256": "0"}
    where = {"commit": commit}
    history = History(run, "accuracy", [1], [score], [1], [1.0], [1], 0.001, 1.0, 1, seen, about, where)
    write(file_of(context, run), history)


def test_counts_of_the_held_form_are_drawn_as_that_form(context: RunContext) -> None:
    """They are of a training made again, which is no row and no curve beside accuracies, but a source all the same."""
    for method in ("dense", HELD):
        store(context, training("resnet20", method))
    store(context, training("resnet20", HELD_COUNTED), seen=SEEN)
    result = figure_6(context)
    accuracy, counts = (figure.chart for figure in result.figures)
    assert isinstance(accuracy, LineChart)
    assert isinstance(counts, LineChart)
    look = [curve.label for curve in accuracy.curves].index(HELD)
    assert [(curve.label, curve.look) for curve in counts.curves] == [(HELD_COUNTED, look)]
    assert [row.cells[0] for row in result.tables[0].rows] == ["dense", HELD]
    assert training("resnet20", HELD_COUNTED).name in result.runs
    assert not any(HELD_COUNTED in curve.label for figure in figure_1(context).figures for curve in figure.chart.curves)


def test_labels_of_trainings_made_again_are_explained(context: RunContext) -> None:
    notes = " ".join(figure_6(context).notes)
    assert f"{COUNTED} is the training of gaussiank made again, with its counts stored" in notes
    assert f"{HELD_COUNTED} is that of {HELD} made again; only its counts are shown" in notes


def test_models_on_which_nothing_was_counted_are_named(context: RunContext) -> None:
    assert gaussian_forms.uncounted_note(context) == []
    for model in ("lenet5", "vgg16"):
        store(context, training(model, HELD))
    assert gaussian_forms.uncounted_note(context) == []  # nothing was counted on any
    store(context, training("lenet5", HELD_COUNTED), seen=SEEN)
    assert gaussian_forms.uncounted_note(context) == [f"With {HELD} nothing was counted on VGG-16."]
    store(context, training("vgg16", HELD_COUNTED), seen=SEEN)
    assert gaussian_forms.uncounted_note(context) == []


def test_trainings_with_an_older_rule_are_named(context: RunContext) -> None:
    store(context, training("lenet5", CARRIED), commit="9a4aa73")
    assert gaussian_forms.older_rule(context) == []
    store(context, training("resnet20", CARRIED), commit="8e7d6c6")
    store(context, cause(CARRIED, PLAIN), commit="8e7d6c6+12")
    (note,) = gaussian_forms.older_rule(context)
    assert (
        note
        == f"{CARRIED}: ResNet-20 (120 epochs), VGG-16 (40 epochs) used an older rule, which fell back below 0.9 k."
    )


def test_how_far_alike_methods_end_apart_is_read_from_stored_trainings(context: RunContext) -> None:
    for method, score in {HELD: 0.7, "topk": 0.72}.items():
        store(context, training("vgg16", method), score)
    assert gaussian_forms.spread_note(context) == ""
    store(context, training("vgg16", CARRIED), 0.745)
    assert f"({HELD} 70.00, topk 72.00, {CARRIED} 74.50), end up to 4.5 points apart" in gaussian_forms.spread_note(
        context
    )
    for result in (figure_1(context), figure_6(context), evidence.evidence(context)):
        assert sum("end up to 4.5 points apart" in note for note in result.notes) == 1
