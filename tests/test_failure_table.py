"""The table of failure cases and the tests that prove it are held together."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.collected import quick_tests
from tests.mutants import named_tests

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/failures.md").read_text()
COVERED, GAPS = PAGE.split("## Known gaps")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[[\w-]+\])?`")  # of a test, or of one case of it


def rows(text: str) -> dict[int, str]:
    """Return the rows of a table by their number, each of which must be there once."""
    found = re.findall(r"^\| *(\d+) *\|(.*)\|$", text, flags=re.MULTILINE)
    numbers = [int(number) for number, _ in found]
    assert len(set(numbers)) == len(numbers), "a number stands twice"
    return {int(number): rest for number, rest in found}


@cache
def functions_of(path: str) -> set[str]:
    """Return the names of the test functions of a file."""
    nodes = ast.parse((ROOT / path).read_text()).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_case_stands_in_one_of_the_tables() -> None:
    assert not set(rows(COVERED)) & set(rows(GAPS))
    numbers = sorted(set(rows(COVERED)) | set(rows(GAPS)))
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_covered_case_names_tests_and_they_exist() -> None:
    for number, row in rows(COVERED).items():
        assert NAMED.search(row), f"case {number} names no test"
    missing = [f"{path}::{name}" for path, name in NAMED.findall(PAGE) if name not in functions_of(path)]
    assert missing == []


def test_every_failure_test_is_named() -> None:
    files = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/failures/**/test_*.py"))
    written = {(path, name) for path in files for name in functions_of(path)}
    assert written
    assert sorted(written - set(NAMED.findall(COVERED))) == []


def test_every_covered_case_has_a_test_that_finds_a_seeded_defect() -> None:
    proven = {test.partition("[")[0] for test in named_tests()}
    named = {number: {f"{path}::{name}" for path, name in NAMED.findall(row)} for number, row in rows(COVERED).items()}
    assert [number for number, tests in named.items() if tests.isdisjoint(proven)] == []


def test_every_covered_case_runs_in_make_test(pytestconfig: pytest.Config) -> None:
    """At least one test of it does, so that none is left to ``make test-full`` alone."""
    named = {number: {f"{path}::{name}" for path, name in NAMED.findall(row)} for number, row in rows(COVERED).items()}
    quick = quick_tests(pytestconfig, named.values())
    assert [number for number, tests in named.items() if tests.isdisjoint(quick)] == []
