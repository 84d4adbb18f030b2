"""Accuracy over minutes: stored scores, measured steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsync_lab.cli.app import run
from sparsync_lab.network.shaping import Rate
from sparsync_lab.network.steps import CellResult, MethodSteps, StepCell, StepRecord
from sparsync_lab.network.sweep import SweepFile, rows_of
from sparsync_lab.network.train import methods_of, read_training, timed
from sparsync_lab.papers import run as runs
from sparsync_lab.papers.run import History, Run
from tests.lab.namespaces import needs_namespaces, read_rows


def _stored(folder: Path, method: str, options: dict[str, float], sent: list[float]) -> Path:
    """Write a training of 40 steps whose scores are made up."""
    run = Run("tiny", "lenet5", method, options, workers=2, steps=len(sent))
    points, scores = [10, 20, 40], [0.5, 0.8, 0.9]
    sums = [sum(sent[:step]) for step in points]
    zeros = [0.0] * len(sent)
    data = {"name": "none", "size": "0", "sha256": ""}
    history = History(run, "accuracy", points, scores, sums, zeros, sent, 1.0, 1.0, 10, [], data)
    path = folder / f"{method}.json.gz"
    runs.write(path, history)
    return path


def test_minutes_follow_the_bytes_of_every_step(tmp_path: Path) -> None:
    sent = [900.0] * 10 + [500.0] * 10 + [100.0] * 20
    history = read_training(_stored(tmp_path, "default", {"budget": 1 / 60}, sent))
    stages = methods_of(history)
    assert [stage.density for stage in stages] == sorted(stage.density for stage in stages)
    assert len(stages) == 2
    cell = StepCell(Rate.parse("1Gbit"), "lenet5", 0.1)
    file = SweepFile(tmp_path / "steps.csv", resume=True)
    times = (0.2, 1.0)  # seconds of the smallest and of the largest step
    steps = [MethodSteps(m, [StepRecord(s, 1.0, 1.0, 0, (0, 0, 0))]) for m, s in zip(stages, times, strict=True)]
    file.put(rows_of(CellResult(cell, 2, 1e9, steps)))
    (curve,) = timed(history, cell, SweepFile(tmp_path / "steps.csv", resume=True))
    assert [60 * minutes for minutes in curve.minutes] == pytest.approx([10.0, 10.0 + 6.0, 10.0 + 6.0 + 4.0])
    assert curve.minutes_to(0.8) == curve.minutes[1]
    assert curve.minutes_to(0.95) is None
    assert [row["step"] for row in curve.to_csv()] == [10, 20, 40]


def test_trainings_that_processes_cannot_make_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _stored(tmp_path, "demo", {}, [1.0] * 40)
    assert run(["lab", "train", str(path), "--compute", "1ms", "--out", str(tmp_path / "x.csv")]) == 2
    assert "is of demo with sgd, which real processes do not train" in capsys.readouterr().err
    assert run(["lab", "train", str(tmp_path / "no.json.gz"), "--compute", "1ms"]) == 2


@pytest.mark.slow
@needs_namespaces
def test_accuracy_over_minutes_is_made_of_stored_scores_and_measured_steps(tmp_path: Path) -> None:
    dense = _stored(tmp_path, "dense", {}, [246824.0] * 40)
    sparse = _stored(tmp_path, "default", {"budget": 1 / 60}, [90000.0] * 4 + [20000.0] * 36)
    out = tmp_path / "train.csv"
    words = ["lab", "train", str(dense), str(sparse), "--compute", "20ms", "--rate", "100Mbit", "--rounds", "3"]
    words += ["--auto"]
    assert run([*words, "--out", str(out)]) == 0
    steps = read_rows(tmp_path / "train-steps.csv")
    assert [row["method"] for row in steps[:2]] == ["dense", "bf16"]
    assert (len(steps), steps[-1]["method"]) == (5, "auto")
    assert steps[-1]["decided"] in ("dense bf16", "default", "default in buckets", "balanced")
    assert all(row["interface_over_traffic"] for row in steps)
    assert float(steps[2]["traffic_bytes"]) < 0.5 * float(steps[3]["traffic_bytes"])  # its last steps, and its first
    rows = read_rows(out)
    assert [row["label"] for row in rows[::3]] == ["tiny", "tiny, bf16 (scores of fp32)", "tiny", "auto"]
    dense_s = float(steps[0]["step_p50_ms"]) / 1e3
    assert float(rows[2]["minutes"]) == pytest.approx(40 * dense_s / 60, abs=1e-3)
    assert float(rows[-1]["minutes"]) == pytest.approx(40 * float(steps[-1]["step_p50_ms"]) / 6e4, abs=1e-3)
    assert all("virtual workers" in row["seconds"] for row in rows)
    assert (tmp_path / "train.png").stat().st_size > 1000
