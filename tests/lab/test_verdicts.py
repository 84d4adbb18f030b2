"""Claims are judged by stored numbers, and stated numbers are made again from stored trainings."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from sparsync_lab.cli.papers import redraw, verify
from sparsync_lab.papers import ITEMS
from sparsync_lab.papers.claim import MISSING, NOT, PARTLY, REPRODUCED, first_number
from sparsync_lab.papers.item import Result
from sparsync_lab.papers.report_page import write_report
from sparsync_lab.papers.store import results_of
from sparsync_lab.papers.verdicts import verdicts
from sparsync_lab.report import Row, Table

RESULTS = Path("results/papers")


def stored(*keys: str) -> dict[str, Result]:
    return {key: results_of(ITEMS[key], RESULTS)[0].result for key in keys}


def changed(result: Result, row: str, column: int, cell: str) -> Result:
    """The result with another number in its first table."""
    table = result.tables[0]
    rows = [
        Row([*line.cells[:column], cell, *line.cells[column + 1 :]]) if line.cells[0] == row else line
        for line in table.rows
    ]
    return replace(result, tables=[Table(table.caption, table.headings, rows), *result.tables[1:]])


def test_what_was_not_run_has_no_verdict():
    assert {one.word for one in verdicts({})} == {MISSING}


def test_every_claim_is_of_an_item_and_judged_by_it():
    every = verdicts({key: found[0].result for key, item in ITEMS.items() if (found := results_of(item, RESULTS))})
    assert all(one.item in ITEMS for one in every)
    assert {one.word for one in every} >= {REPRODUCED, PARTLY, NOT}
    assert all(any(sign.isdigit() for sign in one.here) for one in every if one.word != MISSING)


def test_a_verdict_follows_the_numbers():
    def word(results: dict[str, Result], claim: str) -> str:
        (one,) = (one for one in verdicts(results) if claim in one.claim)
        return one.word

    results = stored("p3/density")
    claim = "converges like dense"
    assert word(results, claim) == PARTLY
    near = changed(results["p3/density"], "gTop-k, 0.001", 3, "-0.50")
    assert word({"p3/density": near}, claim) == REPRODUCED
    far = changed(changed(near, "gTop-k, 0.001", 3, "-9"), "gTop-k, 0.005", 3, "-2")
    assert word({"p3/density": changed(far, "gTop-k, 0.01", 3, "-1.2")}, claim) == NOT
    less = changed(results["p3/density"], "gTop-k, 0.01", 1, "70.00")
    assert word(results, "more entries") == REPRODUCED
    assert word({"p3/density": less}, "more entries") == NOT


@pytest.mark.parametrize(
    ("text", "number"), [("89.67 ± 0.25", 89.67), ("−1.41", -1.41), ("1,612.20 MB", 1612.2), ("5.88e-05", 5.88e-5)]
)
def test_the_first_number_of_a_cell(text, number):
    assert first_number(text) == number


def test_a_number_that_does_not_follow_from_the_trainings_is_found(tmp_path, capsys):
    source = RESULTS / "p3-density.json"
    plain = json.loads(source.read_text(encoding="utf-8"))
    (tmp_path / "runs").mkdir()
    for name in plain["runs"]:
        shutil.copy(RESULTS / "runs" / f"{name}.json.gz", tmp_path / "runs")
    shutil.copy(source, tmp_path)
    verify(output=tmp_path)
    assert "p3/density: as stated" in capsys.readouterr().out
    row = plain["tables"][0]["rows"][1]["cells"]
    row[1] = "80.56"
    (tmp_path / source.name).write_text(json.dumps(plain), encoding="utf-8")
    with pytest.raises(ValueError, match="1 statements do not follow"):
        verify(output=tmp_path)
    assert "80.56" in capsys.readouterr().out


def test_the_report_opens_with_all_verdicts(tmp_path):
    write_report([ITEMS[key] for key in ("p1/fig5", "p3/density", "p3/traffic")], RESULTS, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    first = page.index("Verdicts: ")
    assert first < page.index("<h2")
    assert page.count("Reproduced: ") == 4


def test_what_was_measured_is_redrawn_without_measuring(tmp_path, capsys):
    source = RESULTS / "p1-table2.json"
    plain = json.loads(source.read_text(encoding="utf-8"))
    plain["tables"][0]["rows"][0]["cells"][2] = "0.1 s"
    place = tmp_path / source.name
    place.write_text(json.dumps(plain), encoding="utf-8")
    with pytest.raises(ValueError, match="1 statements do not follow"):
        verify(output=tmp_path)
    redraw("p1/table2", output=tmp_path)
    verify(output=tmp_path)
    assert "p1/table2: as stated" in capsys.readouterr().out
    assert json.loads(place.read_text(encoding="utf-8"))["environment"] == plain["environment"]
    redraw("p3/density", output=tmp_path)
    assert not (tmp_path / "p3-density.json").exists()  # no training is stored there
