"""Every seeded defect still has its place in the source and its test, so that a rename that loses one is seen."""

from __future__ import annotations

import ast
import csv
from collections import Counter
from pathlib import Path

import pytest

from tests.collected import not_there
from tests.mutants import Mutant, in_room, load_rooms
from tests.mutants.__main__ import record, rooms_touched

ROOT = Path(__file__).parent.parent
ROOMS = load_rooms()
MUTANTS = [mutant for mutants in ROOMS.values() for mutant in mutants]


@pytest.mark.parametrize(
    ("room", "mutant"),
    [pytest.param(room, mutant, id=mutant.name) for room, mutants in ROOMS.items() for mutant in mutants],
)
def test_the_quoted_source_occurs_once_in_a_file_of_the_room(room: str, mutant: Mutant) -> None:
    assert in_room(mutant.file, room)
    assert (ROOT / mutant.file).read_text().count(mutant.good) == 1
    assert mutant.bad != mutant.good


def test_the_names_are_unique() -> None:
    assert [name for name, times in Counter(mutant.name for mutant in MUTANTS).items() if times > 1] == []


def test_every_file_that_refuses_something_has_a_defect() -> None:
    raising = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "src/sparsync").rglob("*.py")
        if any(isinstance(node, ast.Raise) for node in ast.walk(ast.parse(path.read_text())))
    }
    assert sorted(raising - {mutant.file for mutant in MUTANTS}) == []


def test_the_named_tests_exist(pytestconfig: pytest.Config) -> None:
    assert sorted(not_there(pytestconfig, {mutant.test for mutant in MUTANTS})) == []


def test_rooms_are_chosen_by_what_has_changed() -> None:
    assert rooms_touched(ROOMS, ["README.md"]) == []
    assert rooms_touched(ROOMS, ["src/sparsync/wire/values.py"]) == ["wire"]
    assert rooms_touched(ROOMS, ["src/sparsync/sparse.py"]) == ["sparse"]
    assert rooms_touched(ROOMS, ["tests/mutants/feedback.py"]) == ["feedback"]
    assert rooms_touched(ROOMS, ["tests/lab/test_activations.py"]) == ["lab_models"]
    assert "collectives" in rooms_touched(ROOMS, ["tests/world.py"])  # through the tests that import it
    assert rooms_touched(ROOMS, ["tests/conftest.py"]) == list(ROOMS)


def test_what_was_found_is_noted_by_name(tmp_path: Path) -> None:
    first, second, third = MUTANTS[:3]
    file = tmp_path / "mutants.csv"
    record(file, {second.name: False, first.name: True}, MUTANTS)
    record(file, {second.name: True, third.name: False}, [first, second, third])
    record(file, {}, [second, third])  # the first is gone by now
    with file.open(newline="") as lines:
        noted = [(line["name"], line["found"]) for line in csv.DictReader(lines)]
    assert noted == [(second.name, "1"), (third.name, "0")]
