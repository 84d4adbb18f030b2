"""``sparsync bench adamw``: its rows and columns."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from sparsync_lab.bench.adamw_step import CASES, FUSED
from sparsync_lab.cli.app import run
from sparsync_lab.training.local_workers import LocalWorkers, Worker
from tests.world import PRELOAD


def in_a_process(worker: Worker, arguments: list[str]) -> int:
    """Run a command in a process of its own, where a process group may be made."""
    return run(arguments)


@pytest.mark.slow
def test_the_command_writes_its_columns(tmp_path: Path) -> None:
    out, profile = tmp_path / "new" / "adamw.csv", tmp_path / "profile.txt"
    options = ["--device", "cpu", "--size", "200000", "--density", "0.01", "--rounds", "3", "--out", str(out)]
    options += ["--profile", str(profile)]
    with LocalWorkers(1, PRELOAD) as workers:
        assert workers.run(in_a_process, ["bench", "adamw", *options]) == [0]
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == [FUSED, *(case.name for case in CASES if not case.nccl)]
    for row in rows:
        assert float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"])
        assert float(row["ratio_to_floor"]) == pytest.approx(
            float(row["p50_ms"]) / float(row["floor_p50_ms"]), rel=0.05
        )
        assert row["floor"] == FUSED
        assert row["launches"] == row["state_over_parameters"] == ""  # there is no GPU
        assert f"{row['method']}, 200,000 parameters" in profile.read_text()
        assert all(row[key] for key in ("device", "torch", "sparsync", "date", "rounds"))


def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "adamw", "--device", "tpu"]) == 2
    assert "device must be cpu or cuda, got 'tpu'" in capsys.readouterr().err
