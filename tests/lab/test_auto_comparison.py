"""Comparisons of 'auto': when it holds, and that they are held on real links."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsync_lab.cli.app import run
from sparsync_lab.network.auto_comparison import ComparisonResult, SettledMethod, Times
from sparsync_lab.network.auto_sweep import METHODS, rows_of, summarize
from sparsync_lab.network.shaping import Rate
from sparsync_lab.network.steps import StepCell
from tests.lab.namespaces import needs_namespaces, read_rows

TURNS = {"bf16": [1.00, 1.01, 1.02, 1.01], "default": [1.5, 1.6, 1.5, 1.6], "dense": [0.5, 0.5], "balanced": [0.9]}


def result(auto: list[float], **others: list[float]) -> ComparisonResult:
    methods = [Times(SettledMethod(name), times) for name, times in {**TURNS, **others, "auto": auto}.items()]
    return ComparisonResult(StepCell(Rate.parse("1Gbit"), "1000"), 4, 1e9, methods)


def test_a_comparison_is_lost_beyond_what_equal_runs_differ_by() -> None:
    """The rival is the better of dense bf16 and the sparse method that took part; fp32 and the others are none."""
    same = result([1.02, 1.02, 1.02, 1.02])
    assert (same.rival.method.name, same.holds) == ("bf16", True)
    slower = result([1.04, 1.05, 1.04, 1.05])
    assert slower.ratio == pytest.approx(1.045 / 1.01)
    assert not slower.holds
    noisy = result([1.04, 1.05, 1.04, 1.05], bf16=[1.00, 1.06, 0.99, 1.06])
    assert noisy.equal_runs == pytest.approx(1.06 / 0.995)
    assert noisy.holds
    sparse = result([1.0, 1.0, 1.0, 1.0], default=[0.5, 0.5, 0.5, 0.5])
    assert (sparse.rival.method.name, sparse.ratio, sparse.holds) == ("default", 2.0, False)
    rows = [row.to_csv() for one in (same, slower) for row in rows_of(one)]
    told = summarize(rows)
    assert "in 1 of 2 cells (1 within 1.02 of it, 0 within what two equal runs differ by)" in told
    assert "slower: 1000, 4 workers, 1000 Mbit/s: 1.0347 × bf16" in told


@needs_namespaces
@pytest.mark.slow
def test_a_comparison_is_made_on_real_links_and_not_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "auto.csv"
    words = ["lab", "auto", "--workers", "2", "--rate", "100Mbit", "--model", "300000", "--out", str(out)]
    words += ["--compute", "10ms", "--seconds", "1"]
    assert run(words) == 0
    rows = {row["method"]: row for row in read_rows(out)}
    assert set(rows) == set(METHODS)
    assert rows["auto"]["rival"] in ("bf16", "default", "default@bucket", "balanced")
    assert "measured at the start (dense bf16 " in rows["auto"]["decided"]
    assert float(rows["dense"]["step_p50_ms"]) > 90  # 1.2 MB on 100 Mbit/s
    capsys.readouterr()
    assert run(words) == 0
    assert "1 of 1 cells are in" in capsys.readouterr().out


@needs_namespaces
@pytest.mark.slow
def test_predictions_stand_beside_measured_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "predict.csv"
    words = ["lab", "predict", "--workers", "2", "--rate", "100Mbit", "--model", "300000", "--out", str(out)]
    assert run([*words, "--compute", "10ms", "--rounds", "3"]) == 0
    rows = {row["method"]: row for row in read_rows(out)}
    assert set(rows) == {"dense", "bf16", "default", "balanced"}
    for row in rows.values():
        assert float(row["error"]) == pytest.approx(
            float(row["predicted_ms"]) / float(row["step_p50_ms"]) - 1, abs=1e-3
        )
    assert abs(float(rows["dense"]["error"])) < 0.5  # nearly all of it is the link
    assert "predictions are within 15%" in capsys.readouterr().out
