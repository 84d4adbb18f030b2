"""The fault matrix where the device decides: interpreted kernels, messages over Gloo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.matrix.cells import Cell, all_cells, sample
from tests.matrix.run import Matrix
from tests.pairs import INTERPRETED, MARKS

pytestmark = MARKS
CELLS = all_cells(deferred=True)
SAMPLE = set(sample(CELLS))


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    if not INTERPRETED:
        pytest.skip("two ranks cannot share a GPU over NCCL")
    started = Matrix()
    yield started
    started.close()


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=str(cell), marks=() if cell in SAMPLE else pytest.mark.slow) for cell in CELLS]
)
def test_every_fault_ends_as_expected_where_the_device_decides(matrix: Matrix, cell: Cell) -> None:
    assert matrix.run(cell) == []
