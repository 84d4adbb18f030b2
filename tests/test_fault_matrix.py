"""The fault matrix (``tests/matrix``): a sample that meets every pair; all of it in ``make test-full``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.matrix.cells import Cell, all_cells, sample
from tests.matrix.run import Matrix

CELLS = all_cells()
SAMPLE = set(sample(CELLS))


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    started = Matrix()
    yield started
    started.close()


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=str(cell), marks=() if cell in SAMPLE else pytest.mark.slow) for cell in CELLS]
)
def test_every_fault_ends_as_expected(matrix: Matrix, cell: Cell) -> None:
    """All survivors raise the same in time, or go on as if nothing had been; nothing is lost, nobody hangs."""
    assert matrix.run(cell) == []
