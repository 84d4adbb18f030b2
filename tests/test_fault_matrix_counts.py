"""What is written of the fault matrix is what it has today."""

from __future__ import annotations

import csv
import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.matrix.cells import all_cells, sample

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(not importlib.util.find_spec("numba"), reason="without numba gradients are not added in parts")
@pytest.mark.parametrize("deferred", [False, True])
def test_the_published_counts_are_those_of_todays_cells(deferred: bool) -> None:
    with (ROOT / "results/fault-matrix.csv").open(newline="", encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if (line["completion"] == "deferred") == deferred]
    published = {(line["collective"], line["fault"]): int(line["cells"]) for line in lines}
    assert published == Counter((cell.collective, cell.fault) for cell in all_cells(deferred))
    assert [line for line in lines if not line["cells"] == line["ran"] == line["as_expected"]] == []


def test_cells_that_prove_a_failure_case_are_in_the_sample() -> None:
    """A row of docs/failures.md names them as pytest does."""
    page = (ROOT / "docs/failures.md").read_text()
    named = set(re.findall(r"`tests/test_fault_matrix\w*\.py::\w+\[([\w-]+)\]`", page))
    assert named
    assert named <= {str(cell) for deferred in (False, True) for cell in sample(all_cells(deferred))}
