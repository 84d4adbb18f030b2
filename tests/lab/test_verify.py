"""What is stated is made again from what is stored, and found if it differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sparsync_lab.cli.papers import redraw, verify
from sparsync_lab.papers import ITEMS
from sparsync_lab.papers.store import read_json, results_of, write_json
from sparsync_lab.papers.verify import _mixed_data

RESULTS = Path("results/papers")


def test_a_number_that_does_not_follow_from_the_trainings_is_found(tmp_path, capsys):
    source = RESULTS / "p3-density.json"
    plain = json.loads(source.read_text(encoding="utf-8"))
    (tmp_path / "runs").mkdir()
    for name in plain["runs"]:
        shutil.copy(RESULTS / "runs" / f"{name}.json.gz", tmp_path / "runs")
    shutil.copy(source, tmp_path)
    verify(output=tmp_path)
    assert "p3/density: as stated" in capsys.readouterr().out
    for name in ("seconds", "seed", "command", "quick"):
        (tmp_path / source.name).write_text(json.dumps(plain | {name: 7}), encoding="utf-8")
        with pytest.raises(ValueError, match="1 statements do not follow"):
            verify(output=tmp_path)
        assert f"{name}: 7 is {plain[name]}" in capsys.readouterr().out
    elsewhere = plain | {"environment": plain["environment"] | {"device": "another"}}
    (tmp_path / source.name).write_text(json.dumps(elsewhere), encoding="utf-8")
    with pytest.raises(ValueError, match="1 statements do not follow"):
        verify(output=tmp_path)
    row = plain["tables"][0]["rows"][1]["cells"]
    row[1] = "80.56"
    (tmp_path / source.name).write_text(json.dumps(plain), encoding="utf-8")
    with pytest.raises(ValueError, match="1 statements do not follow"):
        verify(output=tmp_path)
    assert "80.56" in capsys.readouterr().out


def test_trainings_with_different_data_are_found(tmp_path, capsys):
    """One's own result may have them, with a note; none that is stored here."""
    source = RESULTS / "p3-density.json"
    (tmp_path / "runs").mkdir()
    names = read_json(source)["runs"]
    for name in names:
        shutil.copy(RESULTS / "runs" / f"{name}.json.gz", tmp_path / "runs")
    shutil.copy(source, tmp_path)
    other = tmp_path / "runs" / f"{names[1]}.json.gz"
    plain = read_json(other)
    plain["data"] |= {"name": "cifar10-half", "sha256": "0" * 64}
    write_json(other, plain, run=plain["run"])
    redraw("p3/density", output=tmp_path)
    assert any("not always trained with the same data" in note for note in read_json(tmp_path / source.name)["notes"])
    with pytest.raises(ValueError, match="1 statements do not follow"):
        verify(output=tmp_path)
    told = capsys.readouterr().out
    assert "p3/density: 1 differ" in told
    assert "ResNet-20 was trained with different data: cifar10 (" in told
    assert len([*_mixed_data(tmp_path / "runs", names)]) == 1
    plain["run"]["resized"] = 32  # which is what makes them different
    write_json(other, plain, run=plain["run"])
    assert not [*_mixed_data(tmp_path / "runs", names)]
    assert " and cifar10-half (" in told


def fresh(tmp_path: Path, name: str) -> dict[str, Any]:
    shutil.copy(RESULTS / name, tmp_path)
    return json.loads((tmp_path / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("what", ["notes", "missing", "figures", "headings", "caption", "rows"])
def test_whatever_is_stated_is_made_again(what, tmp_path, capsys):
    """Of an item without a training, too."""
    plain = fresh(tmp_path, "p1-fig3.json")
    verify(output=tmp_path)
    assert "p1/fig3: as stated" in capsys.readouterr().out
    if what == "notes":
        plain["notes"] = [*plain["notes"], "It is so."]
    elif what == "missing":
        plain["missing"] = ["a"]
    elif what == "figures":
        plain["figures"][0]["chart"]["curves"][0]["y"][0] += 1
    elif what == "headings":
        plain["tables"][0]["headings"][0] = "a"
    elif what == "caption":
        plain["tables"][0]["caption"] = "a"
    else:
        plain["rows"]["pi"][0] = 2
    (tmp_path / "p1-fig3.json").write_text(json.dumps(plain), encoding="utf-8")
    with pytest.raises(ValueError, match="1 statements do not follow"):
        verify(output=tmp_path)


def test_nothing_is_measured_again():
    """Items are made of trainings or of what they measured, or take seconds."""
    assert all(item.trains or item.redraw or not item.minutes for item in ITEMS.values())


def test_the_exchange_of_p2_is_computed_again(tmp_path, capsys):
    plain = fresh(tmp_path, "p2-table2.json")
    redraw("p2/table2", output=tmp_path)
    verify(output=tmp_path)
    assert "p2/table2: as stated" in capsys.readouterr().out
    again = read_json(tmp_path / "p2-table2.json")
    assert (again["rows"], again["environment"]) == (plain["rows"], plain["environment"])
    again["rows"]["exchange_ms"][1] = 50.0
    write_json(tmp_path / "p2-table2.json", again)
    with pytest.raises(ValueError, match="1 statements do not follow"):
        verify(output=tmp_path)
    again["rows"]["coding_ms"][1] = 50.0  # what is measured is the source of the table
    write_json(tmp_path / "p2-table2.json", again)
    with pytest.raises(ValueError, match="statements do not follow"):
        verify(output=tmp_path)
    assert "| 50.00 ms |" in capsys.readouterr().out


def test_a_result_is_of_one_item_alone(tmp_path):
    for name in ("p1-table2.json", "p1-table2-model.json"):
        fresh(tmp_path, name)
    shutil.copy(RESULTS / "p1-table2.json", tmp_path / "p1-table2-quick-seed-3.json")
    shutil.copy(RESULTS / "p1-table2.json", tmp_path / "p1-table2-seed-3-epochs-0.5.json")
    assert len(results_of(ITEMS["p1/table2"], tmp_path)) == 2
    assert len(results_of(ITEMS["p1/table2-model"], tmp_path)) == 1


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
