"""How many entries are sent: all, none, one, and not the same number on every rank."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import DGCK, BlockRandomK, GaussianK, RandomK, ThresholdK, TopK, TrimmedK
from sparsync.kernels import Memory
from sparsync.kernels.accumulate import accumulate
from sparsync.kernels.topk import largest
from sparsync.layout import entries_for
from sparsync.schedule import Constant
from tests.failures.checked_training import assert_same_on_all_ranks, inputs, mlp, train
from tests.failures.ddp_training import ALL_SPARSE
from tests.failures.reducers import compress, make_reducer, push_all


def case_small_is_dense(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 300)))
    handle = sparsync.attach(ddp, "topk", density=0.001, dense_below=100)
    train(ddp, handle, inputs(rank, 8, 5))
    assert set(handle.state_dict()["residuals"]) == {"1.weight"}
    handle.detach()
    del ddp
    gc.collect()


def test_small_tensors_travel_dense(worlds):
    worlds[2].run(case_small_is_dense)


@pytest.mark.parametrize("compressor", [TopK(), ThresholdK()], ids=repr)
@pytest.mark.parametrize("numel", [1, 2, 65])
def test_k_above_n_is_clamped(compressor, numel):
    gradient = torch.randn(numel)
    sent, residual = compress(compressor, gradient, k=10 * numel)
    assert sent.values.numel() == numel
    assert torch.equal(sent.densify(), gradient)
    assert not residual.any()


def test_the_selection_of_the_largest_takes_any_k():
    u = torch.randn(100)
    rows, _ = accumulate(u, Memory(torch.zeros(100), torch.zeros(100)), [(0, 100)])
    assert largest(u, rows, 1000).tolist() == list(range(100))


@pytest.mark.parametrize(
    "kind", [TopK, ThresholdK, GaussianK, DGCK, TrimmedK, RandomK, BlockRandomK], ids=lambda kind: kind.__name__
)
def test_more_than_2_24_entries_are_compressed(kind):
    """Above that, ``torch.quantile`` and ``torch.multinomial`` raise."""
    gradient = torch.randn(2**24 + 3, generator=torch.Generator().manual_seed(0))
    sent, residual = compress(kind(), gradient, k=1000)
    assert 0 < int(sent.count) <= sent.values.numel()
    assert torch.equal(sent.densify() + residual, gradient)


@pytest.mark.parametrize("density", [0, 0.0, -0.1, 1.0001, float("nan"), float("inf")])
def test_a_density_out_of_range_is_refused(density):
    model = nn.Linear(3, 3)
    for make in (
        lambda: TopK(density),
        lambda: ThresholdK(density),
        lambda: sparsync.comm_hook(model, "topk", density=density),
        lambda: sparsync.comm_hook(model, "topk", density=lambda step: density),
        lambda: sparsync.ExponentialWarmup(density, epochs=1, steps_per_epoch=1),
        lambda: sparsync.FrontLoaded(density, steps=10),
    ):
        with pytest.raises(ValueError, match="density must be above 0 and at most 1"):
            make()


@pytest.mark.parametrize("compressor", [TopK(1e-12), ThresholdK(1e-12)], ids=repr)
def test_a_tiny_density_sends_one_entry(compressor):
    assert entries_for(1e-12, 1000) == 1
    reducer = make_reducer({"w": torch.zeros(1000, 1)}, compressor, alone=True, density=Constant(1e-12))
    (result,) = push_all(reducer, [("w", torch.arange(1000.0))])
    (sent,) = result.nonzero().flatten().tolist()
    assert sent == 999 or (isinstance(compressor, ThresholdK) and sent > 990)  # nearly equal ones share a bin


def case_zero_gradient(rank: int, size: int, compressor: Any) -> None:
    ddp = DistributedDataParallel(mlp())
    handle = sparsync.attach(ddp, compressor, **ALL_SPARSE)
    (0 * ddp(inputs(rank, 8, 40)[0])).sum().backward()
    assert handle.stats().step.entries == 0
    assert not any(p.grad.any() for p in ddp.parameters())
    train(ddp, handle, inputs(rank, 8, 40))  # and goes on from there
    assert handle.stats().step.entries > 0
    handle.detach()
    del ddp
    gc.collect()


@pytest.mark.parametrize("compressor", [TopK(0.05), ThresholdK(0.05)], ids=repr)
def test_a_zero_gradient_sends_nothing(worlds, compressor):
    sent, _ = compress(compressor, torch.zeros(1000), k=50)
    assert sent.count.item() == 0
    worlds[2].run(case_zero_gradient, compressor=compressor)


class WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Parameter(torch.empty(0, 5))
        self.layer = nn.Linear(40, 30)
        self.between = nn.Parameter(torch.empty(0))
        self.out = nn.Linear(30, 20)

    def forward(self, x: Tensor) -> Tensor:
        nothing = self.before.sum() + self.between.sum()
        return self.out(self.layer(x).relu()) + nothing


def case_empty_parameters(rank: int, size: int, scope: str) -> None:
    ddp = DistributedDataParallel(WithEmpty(), bucket_cap_mb=0.001)
    handle = sparsync.attach(ddp, "topk", density=0.02, scope=scope, dense_below=1)
    train(ddp, handle, inputs(rank, 8, 40))
    handle.detach()
    del ddp
    gc.collect()


@pytest.mark.parametrize("scope", ["layer", "bucket", "global"])
def test_empty_parameters(worlds, scope):
    worlds[2].run(case_empty_parameters, scope=scope)


def case_empty_buckets(rank: int, size: int) -> None:
    full = torch.zeros(50, 1)
    reducer = make_reducer({"a": torch.zeros(0), "b": full, "c": torch.zeros(0), "d": full, "e": torch.zeros(0)})
    empty = torch.zeros(0)
    for step in range(3):
        buckets = [("a", empty), ("b", torch.full((50,), 1.0 + rank)), ("c", empty)]
        buckets += [("d", torch.full((50,), 10.0 + rank)), ("e", empty)]
        results = push_all(reducer, buckets)
        assert [result.numel() for result in results] == [0, 50, 0, 50, 0]
        assert [exchange.unit for exchange in reducer.stats.timeline] == ["bucket 1", "bucket 3"]
        assert results[1][5 * step] > 0
        assert results[3][5 * step] >= 10
    reducer.close()


def test_empty_buckets_exchange_nothing(worlds):
    worlds[3].run(case_empty_buckets)


def case_uneven_counts(rank: int, size: int, compressor: Any) -> None:
    """Rank 0 has three entries to send, rank 1 none, rank 2 more than it may."""
    gradients = torch.zeros(3, 400)
    gradients[0, [3, 200, 399]] = torch.tensor([1.0, -2.0, 4.0])
    gradients[2] = torch.arange(1.0, 401.0)
    reducer = make_reducer({"w": torch.zeros(400, 1)}, compressor)
    (result,) = push_all(reducer, [("w", gradients[rank])])
    residual = reducer.state_dict()["residuals"]["w"].flatten()
    came_back = gradients[rank] - residual  # what this rank sent
    assert reducer.stats.step.entries == came_back.count_nonzero() == (3, 0, reducer.stats.step.entries)[rank]
    sent = [torch.empty(400) for _ in range(size)]
    dist.all_gather(sent, came_back)
    assert 30 <= sent[2].count_nonzero() <= 45
    assert torch.equal(result, (sent[0] + sent[1] + sent[2]) / 3)
    assert_same_on_all_ranks([result])
    reducer.close()


@pytest.mark.parametrize("compressor", [TopK(), ThresholdK()], ids=repr)
def test_uneven_counts_over_the_ranks(worlds, compressor):
    worlds[3].run(case_uneven_counts, compressor=compressor)
