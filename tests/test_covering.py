"""The cases that ``make test`` keeps of a test meet every value, or every pair of values."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.covering import cover


@pytest.mark.parametrize("strength", [1, 2])
def test_all_that_is_to_be_met_is_met_by_few(strength: int) -> None:
    cases = [sorted(enumerate(values)) for values in product(range(4), range(3), range(2))]
    met = [set(combinations(case, strength)) for case in cases]
    kept = cover(met, {23})
    assert set().union(*(met[number] for number in kept)) == set().union(*met)
    assert 23 in kept
    assert len(kept) <= (6 if strength == 1 else 15)  # of 24
