"""The fault matrix where the device decides: interpreted kernels, messages over Gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.matrix.cells import Cell, all_cells, each_cell
from tests.matrix.run import Matrix
from tests.pairs import INTERPRETED, MARKS

pytestmark = MARKS


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    if not INTERPRETED:
        pytest.skip("two ranks cannot share a GPU over NCCL")
    with closing(Matrix()) as started:
        yield started


@each_cell(all_cells(deferred=True))
def test_every_fault_ends_as_expected_where_the_device_decides(matrix: Matrix, cell: Cell) -> None:
    assert matrix.run(cell) == []
