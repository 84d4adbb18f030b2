"""The tests that there are, as pytest knows them: ids of parameters cannot be read off the source.

What a run has collected, with what it then leaves out, is remembered; only files that it was not given are collected
for the purpose, in a process of their own, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.world import run_forked

ROOT = Path(__file__).parent.parent
REMEMBERED = pytest.StashKey[dict[str, bool]]()  # the ids of a run's tests, and whether each is slow


def remember(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Remember the tests of a run; they are marked by now, and none is left out yet."""
    config.stash[REMEMBERED] = {item.nodeid: item.get_closest_marker("slow") is not None for item in items}


def not_there(config: pytest.Config, named: set[str]) -> set[str]:
    """Return those of the ``named`` files, tests and cases of tests that do not exist."""
    missing = named - _with_parents(config.stash[REMEMBERED])
    return missing - _with_parents(collect(missing)) if missing else missing


def quick_tests(config: pytest.Config, sets: Iterable[set[str]]) -> set[str]:
    """Return the tests that are not slow, of all files of those sets of tests that would not have one otherwise."""
    quick = _with_parents(case for case, slow in config.stash[REMEMBERED].items() if not slow)
    without = set().union(*(tests for tests in sets if tests.isdisjoint(quick)))
    return quick | _with_parents(collect(without, "-mnot slow")) if without else quick


def collect(tests: Iterable[str], *options: str) -> list[str]:
    """Collect the files of tests, those that exist, and return the ids of all that is in them."""
    files = [ROOT / file for file in sorted({test.partition("::")[0] for test in tests})]
    if not (there := [str(file) for file in files if file.exists()]):
        return []
    arguments = [f"--rootdir={ROOT}", "--collect-only", "-q", "-pno:cacheprovider", *options, *there]
    (listed,) = run_forked(f"import pytest\nassert pytest.main({arguments}) in (0, 5)")  # 5: all of them are left out
    return listed.splitlines()


def _with_parents(cases: Iterable[str]) -> set[str]:
    """Return the cases of tests, their tests and the files of these."""
    cases = set(cases)
    return cases | {case.partition("[")[0] for case in cases} | {case.partition("::")[0] for case in cases}
