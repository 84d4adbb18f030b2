"""Sums over the ranks and choices among equals are the same everywhere and in every run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sparsync import AllGather, Mismatch, ThresholdK, TopK
from sparsync.collectives.base import Mean
from sparsync.engine.bucketing import Bucket
from sparsync.kernels.accumulate import reference
from sparsync.schedule import Constant
from tests.failures.checked_training import bits
from tests.failures.reducers import compress, error_of, make_reducer, push_all


def case_duplicates(rank: int, size: int, dtype: torch.dtype) -> None:
    gradient = torch.zeros(200, dtype=dtype)
    gradient[:20] = 1 + rank  # every rank sends the same twenty indices
    gradient[20 + rank] = 0.5
    reducer = make_reducer({"w": torch.zeros(200, 1, dtype=dtype)})
    (result,) = push_all(reducer, [("w", gradient)])
    mean = torch.full((20,), sum(range(1, size + 1))) / size
    assert torch.equal(result[:20], mean.to(dtype))
    assert not result[20:].any()
    reducer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_an_index_sent_by_several_ranks_is_summed(worlds, dtype):
    worlds[3].run(case_duplicates, dtype=dtype)


@pytest.mark.parametrize("chunk", [64, 128, 2**18])
@pytest.mark.parametrize(
    ("numel", "k"), [(10, 3), (64, 63), (65, 64), (128, 65), (500, 63), (500, 64), (500, 129), (1000, 999)]
)
def test_of_equal_entries_the_lower_index_is_sent(monkeypatch, chunk, numel, k):
    monkeypatch.setattr(reference, "CHUNK", chunk)
    signs = torch.where(torch.arange(numel) % 3 == 0, -1.0, 1.0)
    sent, _ = compress(TopK(), signs, k)
    assert sent.indices.tolist() == list(range(k))

    few_levels = torch.randint(-3, 4, (numel,), generator=torch.Generator().manual_seed(k)).float()
    sent, residual = compress(TopK(), few_levels, k)
    by_size = few_levels.abs().sort(descending=True, stable=True).indices[:k]
    wanted = by_size[few_levels[by_size] != 0].sort().values
    assert sent.indices[: int(sent.count)].tolist() == wanted.tolist()
    assert torch.equal(sent.densify() + residual, few_levels)


def test_a_threshold_that_overflows_is_deterministic():
    """Above its capacity a threshold takes neighbours, from a place that moves with the step; the same in every run."""
    equal, starts = torch.ones(1000), set()
    for step in range(4):
        sent, residual = compress(ThresholdK(), equal, k=40, step=step)
        again, _ = compress(ThresholdK(), equal, k=40, step=step)
        assert torch.equal(sent.indices, again.indices)
        taken = set(sent.indices.tolist())
        assert len(taken) == int(sent.count) == 40
        (start,) = [i for i in taken if (i - 1) % 1000 not in taken]
        starts.add(start)
        assert torch.equal(sent.densify() + residual, equal)
    assert len(starts) == 4


def case_order_of_summation(rank: int, size: int, dtype: torch.dtype) -> bytes:
    # In rank order (big + 1) - big = 0 and (big - big) + 1 = 1, whoever adds.
    big = 2.0**24 if dtype != torch.float64 else 2.0**53
    columns = torch.tensor([[big, 1.0, -big], [big, -big, 1.0], [1.0, big, -big]]).T
    noise = torch.randn(3, 400, generator=torch.Generator().manual_seed(0))
    gradient = torch.cat([columns, noise], dim=1)[rank].to(dtype)
    reducer = make_reducer({"w": torch.zeros(403, 1, dtype=dtype)}, density=Constant(1.0), debug=True)
    (result,) = push_all(reducer, [("w", gradient)])
    assert result[:3].tolist() == [0.0, torch.tensor(1 / 3, dtype=torch.float64).to(dtype).item(), 0.0]
    reducer.close()
    return bits([result])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sums_run_in_rank_order(worlds, dtype):
    assert len(set(worlds[3].run(case_order_of_summation, dtype=dtype))) == 1


class OffMean(Mean):
    """A mean of which one entry is a little off."""

    def __init__(self, mean):
        self.mean = mean

    def write(self, out, flag=None):
        self.mean.write(out, flag)
        out[out.nonzero()[0]] *= 1 + 2**-20


@dataclass(frozen=True)
class OffOnOneRank(AllGather):
    """An exchange whose result is a little off on rank 1."""

    def reduce(self, sent, layout, channel, state):
        reduced = super().reduce(sent, layout, channel, state)
        if channel.rank == 1:
            reduced.mean = OffMean(reduced.mean)
        return reduced


def case_replicas_differ(rank: int, size: int, debug: bool) -> Any:
    reducer = make_reducer({"w": torch.zeros(100, 1)}, TopK(), OffOnOneRank(), debug=debug)
    future = reducer.push(Bucket(0, torch.ones(100), ("w",), True))
    error_of(future.wait)
    answer = error_of(reducer.check)
    reducer.close()
    return answer


def test_debug_names_the_rank_whose_result_differs(worlds):
    answers = worlds[3].run(case_replicas_differ, debug=True)
    assert len(set(answers)) == 1
    kind, text = answers[0]
    assert kind == Mismatch.__name__
    assert "result of bucket 0 differs on rank 1:" in text
    assert worlds[3].run(case_replicas_differ, debug=False) == [("none", "")] * 3
