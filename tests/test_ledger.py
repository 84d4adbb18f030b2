"""What is in flight comes home bit for bit, whatever of it was rejected before the step failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import cast

import torch

from sparsync.engine.bucketing import Unit
from sparsync.engine.ledger import Cause, Ledger
from sparsync.feedback import Feedback
from sparsync.layout import Parameter, Span
from sparsync.sparse import SparseGrad

COUNT = 4096


def sparse(values: torch.Tensor) -> SparseGrad:
    zero = torch.tensor(0)
    return SparseGrad(torch.arange(COUNT), values, torch.tensor(COUNT), COUNT, zero, zero)


def test_what_was_rejected_is_taken_out_before_what_was_sent_goes_back() -> None:
    """Rounded to halves, what is sent differs from what stood there; an owner rejects a part of it."""
    feedback = Feedback([Parameter.of("w", torch.zeros(COUNT))])
    residual = feedback.memory("unit", [Span("w", 0, COUNT)], COUNT, torch.device("cpu")).after
    rng = torch.Generator().manual_seed(0)
    stood = torch.randn(COUNT, generator=rng)
    sent = stood.half().float()
    rejected = sent * torch.rand(COUNT, generator=rng)
    exact = ((stood - sent) + rejected) - rejected == stood - sent  # those of which the sum can be undone at all
    sent, rejected = torch.where(exact, sent, 0.0), torch.where(exact, rejected, 0.0)
    residual.copy_(stood - sent)
    ledger = Ledger(feedback, lambda device: nullcontext())
    unit = cast(Unit, SimpleNamespace(key="unit", keeps=True, grad=residual))
    ledger.record_sent(unit, sparse(sent))
    ledger.restore_rejected(unit, sparse(rejected))
    ledger.record_rejected(unit, sparse(rejected))
    ledger.restore(Cause.EXCHANGE_FAILED)
    assert exact.sum() > 100
    assert torch.equal(residual, stood)


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
