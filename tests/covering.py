"""Of the cases of a test only those that are needed to meet every value, or every pair of values, of its parameters.

A test that is marked ``each_value`` or ``each_pair`` keeps them, and the cases that seeded defects name; its other
cases are marked slow.
"""

from __future__ import annotations

from itertools import combinations

import pytest

from tests.mutants import named_tests

STRENGTHS = {"each_value": 1, "each_pair": 2}


def mark_the_others_slow(items: list[pytest.Item]) -> None:
    """Mark the cases that are not needed."""
    tests: dict[tuple[str, int], list[pytest.Function]] = {}
    for item in items:
        for mark, strength in STRENGTHS.items():
            if (
                isinstance(item, pytest.Function)
                and item.get_closest_marker(mark)
                and not item.get_closest_marker("slow")
            ):
                tests.setdefault((item.nodeid.partition("[")[0], strength), []).append(item)
    named = named_tests() if tests else set()
    for (_, strength), cases in tests.items():
        met = [_combined(case, strength) for case in cases]
        needed = cover(met, {number for number, case in enumerate(cases) if case.nodeid in named})
        for number, case in enumerate(cases):
            if number not in needed:
                case.add_marker(pytest.mark.slow)


def cover(met: list[set[object]], chosen: set[int]) -> set[int]:
    """Return numbers of sets, the ``chosen`` ones among them, that hold all that any of the sets holds: few, as the
    next one is always that which adds most."""
    missing = set().union(*met) - set().union(*(met[number] for number in chosen))
    chosen = set(chosen)
    while missing:
        best = max(range(len(met)), key=lambda number: len(met[number] & missing))
        chosen.add(best)
        missing -= met[best]
    return chosen


def _combined(case: pytest.Function, strength: int) -> set[object]:
    values = sorted((name, repr(value)) for name, value in case.callspec.params.items())
    return set(combinations(values, min(strength, len(values))))
