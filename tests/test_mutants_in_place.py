"""Every seeded defect still has its place in the source and its test, so that a rename that loses one is seen."""

from __future__ import annotations

import ast
import csv
from collections import Counter
from pathlib import Path
from textwrap import dedent

import pytest

from tests.collected import not_there
from tests.mutants import Mutant, guards, in_room, load_rooms, named_tests, written_by_room
from tests.mutants.__main__ import main, record, rooms_touched

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


def test_every_guard_has_a_defect() -> None:
    rows = [row.guard for row in guards.table()]
    switched_off = guards.switched_off_by(mutant for mutants in written_by_room().values() for mutant in mutants)
    assert sorted(guards.guards().keys() - switched_off - {*rows} - guards.NOT_HERE.keys()) == []
    assert sorted({*rows, *guards.NOT_HERE} - guards.guards().keys()) == [], "these guards are gone"
    assert [guard for guard, times in Counter([*rows, *guards.NOT_HERE]).items() if times > 1] == []


def test_a_guard_is_switched_off_and_what_it_assigns_is_not() -> None:
    text = dedent("""
        def read(text):
            if not text:
                raise ValueError
            if ("é" in text) or (length := len(text)) > 2:
                raise ValueError("long")
            elif text == "a":
                return 1
            elif (
                text.isdigit()
                or not text.isascii()
            ):
                length = 0
                raise ValueError(text)
            else:
                raise TypeError(text)
            if not text:
                raise ValueError
            return length
        """)
    found = guards.guards_of("src/sparsync/read.py", text)
    assert [guard.name for guard in found] == [
        "read.py read: if not text",
        "read.py read: if 'é' in text or (length := len(text)) > 2",
        "read.py read: if text.isdigit() or not text.isascii()",
        "read.py read: else of if text.isdigit() or not text.isascii()",
        "read.py read: if not text (2)",
    ]
    assert [text.count(guard.good) for guard in found] == [1] * len(found)
    for guard in found:
        left = guards.guards_of(guard.file, text.replace(guard.good, guard.bad))
        assert len(left) == len(found) - 1
        times = Counter(one.condition for one in found)[guard.condition]
        assert Counter(one.condition for one in left)[guard.condition] == times - 1
    assert 'if (("é" in text) or (length := len(text)) > 2) and False:\n' in found[1].bad
    assert found[3].bad == "        pass\n"


def test_the_named_tests_exist(pytestconfig: pytest.Config) -> None:
    assert sorted(not_there(pytestconfig, named_tests())) == []


def test_rooms_are_chosen_by_what_has_changed() -> None:
    assert rooms_touched(ROOMS, ["README.md"]) == []
    assert rooms_touched(ROOMS, ["src/sparsync/wire/values.py"]) == ["wire"]
    assert rooms_touched(ROOMS, ["src/sparsync/sparse.py"]) == ["sparse"]
    assert rooms_touched(ROOMS, ["tests/mutants/feedback.py"]) == ["feedback"]
    assert rooms_touched(ROOMS, ["tests/lab/test_activations.py"]) == ["lab_models"]
    assert "collectives" in rooms_touched(ROOMS, ["tests/world.py"])  # through the tests that import it
    assert rooms_touched(ROOMS, ["tests/conftest.py"]) == list(ROOMS)
    guarded = rooms_touched(ROOMS, ["tests/mutants/guards.csv"])
    assert "wire" in guarded
    assert not any(room.startswith("lab_") for room in guarded)


def test_nothing_is_noted_under_the_commit_of_another_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.mutants.__main__.ROOT", tmp_path)
    monkeypatch.setattr("tests.mutants.__main__.run", lambda *_: 0)
    with pytest.raises(SystemExit):
        main([MUTANTS[0].name, "--output", str(tmp_path / "mutants.csv")])
    assert "would note the commit of" in capsys.readouterr().err
    assert main([MUTANTS[0].name]) == 0


def test_what_was_found_is_noted_by_name(tmp_path: Path) -> None:
    first, second, third = MUTANTS[:3]
    file = tmp_path / "mutants.csv"
    record(file, {second.name: False, first.name: True}, MUTANTS)
    record(file, {second.name: True, third.name: False}, [first, second, third])
    record(file, {}, [second, third])  # the first is gone by now
    with file.open(newline="") as lines:
        noted = [(line["name"], line["found"]) for line in csv.DictReader(lines)]
    assert noted == [(second.name, "1"), (third.name, "0")]
