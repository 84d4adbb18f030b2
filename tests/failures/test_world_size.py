"""Any number of workers, one included."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import AllGather, Balanced, ThresholdK, TopK
from sparsync.layout import Layout, Span
from sparsync.wire import Wire
from tests.failures.checked_training import inputs, mlp, train
from tests.failures.reducers import compress, make_reducer, push_all


def case_train(rank: int, size: int, compressor: str, scope: str) -> None:
    ddp = DistributedDataParallel(mlp())
    handle = sparsync.attach(ddp, compressor, density=0.02, scope=scope)
    train(ddp, handle, inputs(rank, 8, 40))
    handle.detach()
    del ddp
    gc.collect()


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize(("compressor", "scope"), [("topk", "layer"), ("threshold", "global"), ("none", "layer")])
def test_world_sizes_that_are_no_power_of_two(worlds, size, compressor, scope):
    worlds[size].run(case_train, compressor=compressor, scope=scope)


@pytest.mark.parametrize("size", range(1, 10))
def test_any_world_size_in_one_process(size):
    torch.manual_seed(size)
    layout = Layout.cut([Span("w", 0, 300)], numel=300, scope="layer", density=0.2)
    sents, total = [], torch.zeros(300)
    for _ in range(size):
        sent, _ = compress(TopK(), torch.randn(300), k=60)
        sents.append(sent)
        total += sent.densify()
    for reduced in AllGather().reduce_local(sents, layout, Wire()):
        out = torch.full((300,), torch.nan)
        reduced.mean.write(out)
        assert torch.equal(out, total / size)


@pytest.mark.parametrize(("compressor", "scope"), [("topk", "layer"), ("threshold", "global"), ("none", "layer")])
def test_one_worker_in_a_process_group(worlds, compressor, scope):
    worlds[1].run(case_train, compressor=compressor, scope=scope)


@pytest.mark.parametrize("compressor", [TopK(), ThresholdK()], ids=repr)
@pytest.mark.parametrize("values", ["fp32", "bf16"])
@pytest.mark.parametrize("scope", ["layer", "bucket", "global"])
def test_one_worker_without_torch_distributed(compressor, values, scope):
    assert not dist.is_initialized()
    reducer = make_reducer(
        {"a": torch.zeros(300, 1), "b": torch.zeros(20, 10)}, compressor, alone=True, scope=scope, values=values
    )
    residuals = {"a": torch.zeros(300), "b": torch.zeros(200)}
    for step in range(5):
        torch.manual_seed(step)
        gradients = {"a": torch.randn(300), "b": torch.randn(200)}
        results = push_all(reducer, list(gradients.items()))
        kept_now = reducer.state_dict()["residuals"]
        for (name, gradient), result in zip(gradients.items(), results, strict=True):
            came_in = gradient + residuals[name]
            residuals[name] = kept_now[name].flatten()
            assert torch.equal(result + residuals[name], came_in)  # law 1, bit for bit
        assert 0 < sum(int(result.count_nonzero()) for result in results) <= 60
    assert reducer.stats.total.bytes == 0
    reducer.close()


@pytest.mark.parametrize("values", ["sign", "levels"])
def test_one_worker_is_not_rounded_twice(values):
    """It sums nothing: what it sends is applied as it is, and the residual is the same whatever the collective."""
    reducers = [
        make_reducer({"a": torch.zeros(300, 1)}, TopK(), method, alone=True, values=values)
        for method in (AllGather(), Balanced())
    ]
    kept = torch.zeros(300)
    for step in range(5):
        torch.manual_seed(step)
        gradient = torch.randn(300)
        (plain,), (balanced,) = (push_all(reducer, [("a", gradient)]) for reducer in reducers)
        before, kept = kept, reducers[1].state_dict()["residuals"]["a"].flatten()
        assert plain.any()
        assert torch.equal(balanced, plain)
        assert torch.equal(balanced + kept, before + gradient)  # law 1, bit for bit
    for reducer in reducers:
        reducer.close()
