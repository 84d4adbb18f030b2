"""``sparsync bench phases``: phases of real exchanges, and their bytes."""

from __future__ import annotations

import csv

import pytest
from typer.testing import CliRunner

from sparsync_lab.bench.phases import METHODS, REST, TOTAL, PhasesBench
from sparsync_lab.cli.commands import app


def test_every_method_has_its_phases(tmp_path):
    pytest.importorskip("numba")
    out = tmp_path / "phases.csv"
    said = CliRunner().invoke(
        app,
        ["bench", "phases", "--entries=1048576", "--workers=2", "--rounds=1", f"--out={out}"],
        catch_exceptions=False,
    )
    assert said.exit_code == 0, said.output
    with out.open(newline="") as file:
        lines = list(csv.DictReader(file))
    found = {(line["method"], line["optimizer"], line["phase"]): line for line in lines}
    assert {key[:2] for key in found} == set(METHODS)
    for method in METHODS[1:]:
        own = {phase: line for (*whose, phase), line in found.items() if tuple(whose) == method}
        parts = sum(float(line["cpu_ms"]) for phase, line in own.items() if phase not in (TOTAL, REST))
        assert 0 < parts < float(own[TOTAL]["cpu_ms"])
        streams = 5 if method[1] == "sgd" and method[0] in ("default", "balanced") else 3
        assert float(own["add to the residual"]["bytes"]) == streams * 4 * 1048576
    assert float(found["default", "sgd", "take out"]["bytes"]) > float(found["topk@bucket", "sgd", "take out"]["bytes"])


@pytest.mark.parametrize("asked", [{"entries": 100}, {"workers": 0}, {"rounds": 0}])
def test_what_cannot_be_measured_is_refused(asked):
    with pytest.raises(ValueError, match=next(iter(asked))):
        PhasesBench(**asked)
