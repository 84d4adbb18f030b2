"""The fault matrix (``tests/matrix``): a sample that meets every pair; all of it by ``python -m tests.matrix``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.matrix.cells import Cell, all_cells, each_cell
from tests.matrix.run import Matrix


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    with closing(Matrix()) as started:
        yield started


@each_cell(all_cells())
def test_every_fault_ends_as_expected(matrix: Matrix, cell: Cell) -> None:
    """All survivors raise the same in time, or go on as if nothing had been; nothing is lost, nobody hangs."""
    assert matrix.run(cell) == []
