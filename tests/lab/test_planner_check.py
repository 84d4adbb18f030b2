"""P1's table 2 as the planner predicts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsync_lab.cli.app import run
from sparsync_lab.papers import planner_check as check
from sparsync_lab.papers.planner_check import WORKERS, cost_elsewhere, fitted_link, predict, published_models

ROOT = Path(__file__).parent.parent.parent


def test_the_dense_column_gives_a_network_of_ten_gigabits() -> None:
    models = published_models()
    assert [round(model.compute, 3) for model in models] == [0.081, 1.121, 0.46, 0.69]
    link = fitted_link(models)
    assert 9e9 < link.bandwidth < 10.5e9
    for model in models:
        assert predict(model, link, "dense fp32") == pytest.approx(model.seconds["Dense"], rel=0.05)


def test_an_exchange_of_top_k_by_hand() -> None:
    """One message of k entries after backward, around a ring; selection before it."""
    models = published_models()
    model, link = models[2], fitted_link(models)
    message = 8 * 25_557 + 40
    ring = (WORKERS - 1) * (link.latency + message * link.seconds_per_byte)
    assert predict(model, link, "paper") == pytest.approx(model.compute + ring, rel=1e-4)
    assert predict(model, link, "paper", 1e-8) == pytest.approx(model.compute + ring + 0.25557032, rel=1e-4)


def test_no_cell_is_used_to_predict_itself() -> None:
    models = published_models()
    link = fitted_link(models)
    for number, model in enumerate(models):
        others = [*models]
        changed = model._replace(seconds={**model.seconds, "DGC": 100.0})
        others[number] = changed
        assert cost_elsewhere(others, changed, link, "DGC") == cost_elsewhere(models, model, link, "DGC") > 0


def test_the_item_prints_predicted_beside_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["papers", "run", "p1/table2-model", "--output", str(tmp_path), "--scratch", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "p1-table2-model.json").read_text())["rows"]
    assert len(rows["error"]) == 4 * (1 + 1 + len(check.SPARSE))
    for predicted, published, error in zip(rows["predicted_s"], rows["published_s"], rows["error"], strict=True):
        assert error == pytest.approx(predicted / published - 1, abs=1e-4)
    stored = json.loads((ROOT / "results" / "papers" / "p1-table2-model.json").read_text())["rows"]
    assert stored["predicted_s"] == pytest.approx(rows["predicted_s"], rel=1e-3)
