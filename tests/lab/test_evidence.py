"""The trainings that test claims: what they change is what is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparsync_lab.models import CATALOGUE
from sparsync_lab.papers import RunContext, evidence, store, vgg16_gap
from sparsync_lab.papers.claim import NOT, PARTLY, REPRODUCED
from sparsync_lab.papers.density_stages import DensityStages
from sparsync_lab.papers.p1_runs import AUTHORS, CARRIED, training
from sparsync_lab.papers.run import History, Run, file_of, read, write
from sparsync_lab.papers.trainings import run_options, train_run
from sparsync_lab.papers.verdicts import verdicts
from tests.lab.test_papers import task


def small(run: Run, **changes: object) -> Run:
    own = {"model": "lenet5", "workers": 2, "batch": 4, "steps": 8, "limit": 32, "autocast": False, **changes}
    return replace(run, **own)  # type: ignore[arg-type]


def test_every_run_is_there_once_and_has_its_time() -> None:
    runs = [run for one in evidence.questions() for run in one.runs]
    assert len({run.name for run in runs}) == len(runs)
    assert all(run.seconds > 20 and run.model in CATALOGUE for run in runs)
    for run in runs:
        if run.method != "dense":
            run_options(replace(run, steps=run.steps or 100))  # a setting that cannot be made raises


def test_the_list_says_what_is_missing(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path)
    first = evidence.questions()[0].runs[0]
    file_of(context, first).parent.mkdir()
    file_of(context, first).touch()
    rows = [row.cells for row in evidence.order(context).rows]
    assert [row[-1] for row in rows] == ["done", *["missing"] * (len(rows) - 1)]
    assert rows[0][2] == first.name


def test_what_has_not_run_is_shown_as_that(tmp_path: Path) -> None:
    result = evidence.evidence(RunContext(output=tmp_path, scratch=tmp_path).read_only())
    assert len(result.missing) == sum(len(one.runs) for one in evidence.questions())
    *tables, learned = result.tables
    assert all(row.cells[2] == "not run" for table in tables for row in table.rows)
    assert all(cell.startswith("– (") for row in learned.rows for cell in row.cells[1:])


def test_densities_fall_in_stages() -> None:
    density = DensityStages(vgg16_gap.densities(120), 1200, 0.001)
    assert [density(step) for step in (0, 9, 10, 19, 20, 1199)] == [1 / 64, 1 / 64, 0.004, 0.004, 0.001, 0.001]
    with pytest.raises(ValueError, match="densities must be left out with front"):
        Run("a", "lenet5", "topk", {"density": 0.1}, densities=((0.1, 0.2),), front=2.0, steps=5)


def trained(run: Run, folder: Path) -> History:
    """Train it, and read it back."""
    context = RunContext(output=folder, scratch=folder / "scratch")
    history = train_run(run, context, task(run))
    assert history is not None
    assert Run(**store.read_json(file_of(context, run))["run"]).name == run.name
    assert read(file_of(context, run), run).snapshots == list(history.snapshots)
    return history


def test_more_is_sent_at_first(tmp_path: Path) -> None:
    run = small(vgg16_gap.cause("topk", "density warm-up", densities=((0.25, 1 / 4), (0.5, 0.04))))
    history = trained(run, tmp_path)
    sent = history.sent
    assert sent[0] == sent[1] > sent[2] == sent[3] > sent[4] == sent[7]


def test_without_a_residual_nothing_is_kept(tmp_path: Path) -> None:
    """At density 1 there is nothing to keep; below it, what is lost makes another training."""
    losses = []
    for feedback in (True, False):
        run = small(evidence.random_k("lenet5", feedback, False), options={"density": 0.5, "scope": "global"})
        losses.append(trained(run, tmp_path).losses)
    assert losses[0][:2] == losses[1][:2]
    assert losses[0][2:] != losses[1][2:]


@pytest.mark.parametrize("form", [AUTHORS, CARRIED])
def test_counts_are_stored(form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = small(training("lenet5", form), watch_every=4)
    seen = trained(run, tmp_path).snapshots
    assert [snapshot["step"] for snapshot in seen] == [4, 8]
    assert all(0 <= s["least"] <= s["mean"] <= s["most"] for s in seen)
    assert seen[-1]["fallbacks"] >= seen[0]["fallbacks"] >= 0


@pytest.mark.parametrize(
    ("changed", "word", "says"),
    [
        ({}, "", ""),
        ({("topk", "clipped at 1"): 77.4}, PARTLY, "with clipped at 1, 89% of the gap is gone; why,"),
        ({("topk", "clipped at 1"): 77.4, ("dense", "clipped at 1"): 78.0}, REPRODUCED, "clipped at 1 -0.6"),
        (
            {("topk", "rate 0.025"): 61.5, ("topk", "weight decay"): 25.0},
            PARTLY,
            "with rate 0.025, 63% of the gap is gone",
        ),
        ({("topk", "weight decay"): 25.0}, NOT, "none of these takes half of the gap away"),
        ({("topk", "weight decay"): 25.0, ("topk", "as in figure 6"): 83.5}, REPRODUCED, "no gap to explain"),
    ],
)
def test_the_cause_of_the_gap_follows_the_numbers(changed: dict[tuple[str, str], float], word: str, says: str) -> None:
    scores = {("topk", "as in figure 6"): 23.4, ("dense", "as in figure 6"): 83.9, **changed}
    if not changed:
        with pytest.raises(LookupError):
            vgg16_gap.judge_gap(scores)
        return
    told, found = vgg16_gap.judge_gap(scores)
    assert found == word
    assert says in told


def test_the_gap_is_read_from_stored_trainings(tmp_path: Path) -> None:
    """Its note says "not run" until they are there."""
    context = RunContext(output=tmp_path, scratch=tmp_path)
    assert "not run" in vgg16_gap.gap_note(context)[0]
    for run in vgg16_gap.causes():
        if run.label.startswith(("cause: topk, as", "cause: dense, as", "cause: topk, clipped")):
            score = 0.2 if run.label == "cause: topk, as in figure 6" else 0.8
            about = {"name": "cifar10", "size": "1", "sha256": "0"}
            write(
                file_of(context, run), History(run, "accuracy", [1], [score], [1], [1.0], [1], 1.0, 1.0, 1, [], about)
            )
    (note,) = vgg16_gap.gap_note(context)
    assert "clipped at 1 +0.0" in note
    result = evidence.evidence(context.read_only())
    verdict = next(one for one in verdicts({"beyond/evidence": result}) if one.item == "beyond/evidence")
    assert verdict.word == REPRODUCED
