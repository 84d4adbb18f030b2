"""Whole vectors summed in parts by kernels, against the specification: the same bits."""

from __future__ import annotations

import math

import pytest
import torch

from sparsync.collectives import ReduceByParts
from sparsync.collectives.base import OverflowFlag
from sparsync.feedback import Feedback, rounding
from sparsync.kernels.by_parts.launch import PartBuffers, RestBuffer
from sparsync.kernels.message.header import HEADER
from sparsync.layout import Layout, Parameter, Span
from sparsync.sparse import SparseGrad
from sparsync.wire import Wire
from tests.methods import gradient
from tests.pairs import DEVICE, MARKS, within_bounds  # noqa: F401

pytestmark = MARKS


def mean_of(vectors: list[torch.Tensor], half: bool, dtype: torch.dtype, full: int = 0) -> tuple[torch.Tensor, int]:
    """What every rank gets, all of them in this process, and whether it overflowed; the messages' headers are kept."""
    workers, numel = len(vectors), vectors[0].numel()
    ranks = [PartBuffers(numel, full, workers, half, torch.device(DEVICE)) for _ in vectors]
    headers = [torch.full((HEADER,), rank + 1, dtype=torch.int32, device=DEVICE) for rank in range(workers)]
    rows = torch.stack([r.pack(v.to(DEVICE), h) for r, v, h in zip(ranks, vectors, headers, strict=True)])
    received = [rows[:, rank].contiguous() for rank in range(workers)]
    assert all(torch.equal(row[:, :HEADER], torch.stack(headers)) for row in received)
    sums = torch.stack([r.add(row) for r, row in zip(ranks, received, strict=True)])
    out = torch.full((numel,), 9.0, device=DEVICE).to(dtype)
    overflow = torch.zeros((), dtype=torch.int32, device=DEVICE)
    ranks[0].write_mean(sums, out, overflow)
    again = torch.zeros_like(out)
    ranks[-1].write_mean(sums, again, None)
    torch.testing.assert_close(out, again, rtol=0, atol=0, equal_nan=True)
    return out.cpu(), int(overflow)


def expected(vectors: list[torch.Tensor], half: bool, dtype: torch.dtype, full: int = 0) -> tuple[torch.Tensor, int]:
    numel, none = vectors[0].numel(), torch.zeros((), dtype=torch.int32)
    layout = Layout.cut([Span("p", 0, numel)], numel=numel, scope="global", density=1.0)
    sents = [SparseGrad(None, v, torch.tensor(numel), numel, none, none) for v in vectors]
    out, flag = torch.zeros(numel, dtype=dtype), OverflowFlag(torch.device("cpu"))
    ReduceByParts(half, full).reduce_local(sents, layout, Wire())[0].mean.write(out, flag)
    return out, int(flag.bad)


def assert_same(vectors: list[torch.Tensor], half: bool, dtype: torch.dtype = torch.float32, full: int = 0) -> int:
    ours, theirs = mean_of(vectors, half, dtype, full), expected(vectors, half, dtype, full)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0, equal_nan=True)
    assert ours[1] == theirs[1]
    return ours[1]


@pytest.mark.parametrize("half", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("numel", [1, 63, 1024, 5003])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_mean_of_the_specification(workers: int, numel: int, half: bool) -> None:
    kinds = ("normal", "heavy", "mostly zero", "zero", "normal")
    vectors = [gradient(kind, numel, torch.float32, seed) for seed, kind in enumerate(kinds[:workers])]
    assert_same(vectors, half)


@pytest.mark.parametrize("half", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("full", [1, 700, 2999, 3000])
@pytest.mark.parametrize("workers", [1, 3])
def test_sums_that_travel_in_full(workers: int, full: int, half: bool) -> None:
    assert_same([gradient("normal", 3000, torch.float32, seed) for seed in range(workers)], half, full=full)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    assert_same([gradient("normal", 700, dtype, seed) for seed in range(3)], False, dtype)


@pytest.mark.parametrize("half", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 3.4e38])
def test_what_is_not_finite_or_overflows_is_seen(odd: float, half: bool) -> None:
    vectors = [gradient("normal", 700, torch.float32, seed) for seed in range(3)]
    for vector in vectors[:2]:
        vector[77] = odd
    vectors[2][5] = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)  # NaN, but for its upper half
    assert assert_same(vectors, half) == 1
    vectors[2][5] = 0.0
    assert assert_same(vectors, half) == 1


def test_a_zero_keeps_its_sign() -> None:
    ours, _ = mean_of([torch.full((3,), -0.0)] * 2, True, torch.float32)
    assert torch.signbit(ours).all()


@pytest.mark.parametrize("good", [1.0, 0.0])
@pytest.mark.parametrize("undoable", [False, True])
def test_what_rounding_cuts_off_is_that_of_the_specification(good: float, undoable: bool, monkeypatch) -> None:
    spans, results = [Span("a", 0, 700), Span("b", 700, 1800)], []
    parameters = [Parameter.of(span.name, torch.empty(span.numel)) for span in spans]
    for device in (DEVICE, "cpu"):
        if device == "cpu" and len(results) == 1:
            monkeypatch.setattr(rounding, "usable_on", lambda device: False)
        feedback = Feedback(parameters, transactional=undoable, preconditioned=True)
        kept, sent = rounding.RoundingFeedback(feedback), []
        out = torch.zeros(2500, device=device)
        for step in range(3):
            grad = gradient("mostly zero", 2500, torch.float32, step) * 3
            out.copy_(grad)
            kept.begin_step()
            kept.round("sketch", spans, out)
            sent.append(out.cpu().clone())
            kept.keep(torch.tensor(good if step == 1 else 1.0, device=device))
            feedback.commit()
        memory = feedback.memory("sketch", spans, 2500, torch.device(device))
        assert (memory.workspace.find(RestBuffer) is None) == (len(results) == 1)
        results.append([*sent, memory.before.cpu()])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    assert results[0][-1].any()
