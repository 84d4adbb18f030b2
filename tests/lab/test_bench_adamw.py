"""``sparsync bench adamw``: its rows and columns."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparsync_lab.bench.adamw_step import CASES, FUSED
from sparsync_lab.cli.app import run

ROOT = Path(__file__).parent.parent.parent


def test_the_command_writes_its_columns(tmp_path: Path) -> None:
    out = tmp_path / "new" / "adamw.csv"
    options = ["--device", "cpu", "--size", "200000", "--density", "0.01", "--rounds", "3", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "sparsync_lab", "bench", "adamw", *options],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "80", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'lab' / 'src'}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == [FUSED, *(name for name, _ in CASES)]
    for row in rows:
        assert float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"])
        assert float(row["ratio_to_floor"]) == pytest.approx(
            float(row["p50_ms"]) / float(row["floor_p50_ms"]), rel=0.05
        )
        assert row["floor"] == FUSED
        assert all(row[key] for key in ("device", "torch", "sparsync", "date", "rounds"))


def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "adamw", "--device", "tpu"]) == 2
    assert "device must be cpu or cuda, got 'tpu'" in capsys.readouterr().err
