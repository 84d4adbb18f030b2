"""The forms of Gaussian-k in figure 6: what pages say of them follows the stored trainings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sparsync_lab.papers import evidence, gaussian_forms, gaussian_masks, random_forms
from sparsync_lab.papers.item import RunContext
from sparsync_lab.papers.p1_convergence import BESIDE, figure_1, figure_6
from sparsync_lab.papers.p1_runs import CARRIED, COUNTED, HELD, HELD_COUNTED, training
from sparsync_lab.papers.run import History, Run, file_of, write
from sparsync_lab.papers.vgg16_gap import PLAIN, cause
from sparsync_lab.papers.vgg16_notes import spread_note
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
    (look,) = (curve.look for curve in accuracy.curves if curve.label == HELD)
    assert [(curve.label, curve.look) for curve in counts.curves] == [(HELD_COUNTED, look)]
    assert [row.cells[0] for row in result.tables[0].rows] == ["dense", HELD]
    assert training("resnet20", HELD_COUNTED).name in result.runs
    assert not any(HELD_COUNTED in curve.label for figure in figure_1(context).figures for curve in figure.chart.curves)


def test_seeds_of_a_form_share_a_row_a_curve_and_their_fallbacks(context: RunContext) -> None:
    run = training("lenet5", CARRIED)
    store(context, training("lenet5", "dense"))
    for seed, (mean, fallbacks) in enumerate([(61.0, 16), (62.0, 20), (66.0, 18)]):
        seeded = replace(run, label=f"{CARRIED}, seed {seed}" if seed else CARRIED, seed=seed)
        store(context, seeded, 0.98, [{"step": 60, "mean": mean, "fallbacks": fallbacks}])
    result = figure_6(context)
    assert [(row.cells[0], row.cells[4]) for row in result.tables[0].rows] == [("dense", "1"), (CARRIED, "3")]
    chart = result.figures[1].chart
    assert isinstance(chart, LineChart)
    (curve,) = chart.curves
    assert [curve.low[0], curve.y[0], curve.high[0]] == pytest.approx([own / 62 for own in (61, 63, 66)], abs=0.02)
    assert any("went in 54 of 2,880 selections of LeNet-5 (three seeds)" in note for note in result.notes)


def test_seeds_that_are_stored_are_drawn_though_nothing_asks_for_them(context: RunContext) -> None:
    run = training("resnet20", CARRIED)
    store(context, training("resnet20", "dense"))
    store(context, run)
    before = figure_6(context)
    for seed, score in ((1, 0.8), (2, 0.7)):
        store(context, replace(run, label=f"{CARRIED}, seed {seed}", seed=seed), score, SEEN)
    result = figure_6(context)
    assert [(row.cells[0], *row.cells[3:5]) for row in before.tables[0].rows[1:]] == [(CARRIED, "under a point", "1")]
    assert [(row.cells[0], row.cells[1], row.cells[4]) for row in result.tables[0].rows[1:]] == [
        (CARRIED, "80.00 ± 10.00", "3")
    ]
    assert result.missing == before.missing
    assert any("two seeds" in note for note in result.notes if "selections of ResNet-20" in note)  # which counted
    assert any(f"ResNet-20 has three seeds of {CARRIED}. Shown are mean" in note for note in result.notes)
    assert any(f"{BESIDE} All have one seed, and what" in note for note in before.notes)


def test_hardly_anything_lies_beyond_the_last_mask_after_a_while() -> None:
    k, steps = gaussian_masks.K, gaussian_masks.STEPS
    first, *_ = gaussian_masks.mask_counts(1, two_sided=True, masks=3)
    assert 2 * k / 3 <= first <= 4 * k / 3  # of a normal vector the first mask is right
    few, many, last = gaussian_masks.mask_counts(steps, two_sided=True, masks=3)
    assert few < k / 100 < last < k < many
    printed = gaussian_masks.mask_counts(steps, two_sided=False, masks=4)
    assert printed[1] == 0 < printed[3] < k < printed[0] < printed[2]
    assert [gaussian_masks.last_threshold(own) for own in ([few, many, last], printed)] == [0.75, 1.125]
    for counts in ([few, many, last], printed):
        assert f" and {', '.join(f'{count / k:.3g}' for count in counts)} in the last" in gaussian_masks.masks_note()


def test_on_which_models_rand_k_was_trained_otherwise_is_read_from_stored_trainings(context: RunContext) -> None:
    assert random_forms.trained_on(context) == "on no model yet (LeNet-5, ResNet-20, VGG-16: not run)"
    for model in ("lenet5", "resnet20"):
        for form in random_forms.FORMS:
            store(context, random_forms.random_k(model, form))
    assert random_forms.trained_on(context) == "on LeNet-5 and ResNet-20 (VGG-16: not run)"
    for form in random_forms.FORMS:
        store(context, random_forms.random_k("vgg16", form))
    assert random_forms.trained_on(context) == "on LeNet-5, ResNet-20 and VGG-16"


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
        == f"{CARRIED}: ResNet-20 (120 epochs, seed 0), VGG-16 (40 epochs, seed 0) used an older rule, which fell back "
        "below 0.9 k."
    )


def test_how_far_alike_methods_end_apart_is_read_from_stored_trainings(context: RunContext) -> None:
    for method, score in {HELD: 0.7, "topk": 0.72, CARRIED: 0.745}.items():
        store(context, training("vgg16", method), score)
    store(context, cause("topk", PLAIN), 0.2)
    assert "between 70.00 and 74.50 % in 120 epochs, one seed each" in spread_note(context)
    store(context, cause(CARRIED, PLAIN), 0.25)
    told = "between 70.00 and 74.50 % in 120 epochs and between 20.00 and 25.00 % in 40 epochs, one seed each"
    assert told in spread_note(context)
    for result in (figure_1(context), figure_6(context), evidence.evidence(context)):
        assert sum(told in note for note in result.notes) == 1
    assert spread_note(replace(context, quick=True)) == ""
