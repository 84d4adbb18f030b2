"""The fault matrix where the device decides: interpreted kernels, messages over Gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from sparsync.engine.bucketing import Unit
from sparsync.engine.ledger import Ledger
from sparsync.feedback import Feedback
from sparsync.layout import Parameter, Span
from sparsync.sparse import SparseGrad
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


def test_rejected_entries_that_are_held_go_back_on_the_stream_of_the_exchanges() -> None:
    feedback, made = Feedback([Parameter.of("w", torch.zeros(4))]), list[torch.Tensor]()
    residual = feedback.memory("unit", [Span("w", 0, 4)], 4, torch.device("cpu")).after

    @contextmanager
    def on_stream(_: torch.device) -> Iterator[None]:
        before = residual.clone()
        yield
        made.append(residual - before)

    ledger, unit = Ledger(feedback, on_stream), cast(Unit, SimpleNamespace(key="unit", keeps=True, grad=residual))
    zero = torch.tensor(0)
    entries = SparseGrad(torch.tensor([1, 2]), torch.tensor([3.0, 5.0]), torch.tensor(2), 4, zero, zero)
    ledger.record_sent(unit, entries)
    ledger.record_rejected(unit, entries, held=True)
    ledger.restore_held()
    assert [change.tolist() for change in made] == [[0, 3, 5, 0]]
