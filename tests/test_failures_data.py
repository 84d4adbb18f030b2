"""Failure cases of data, configuration, peers and checkpoints; the number in a test's name is the case's."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import AllGather, Mismatch, PeerLost, ThresholdK, TopK
from sparsync.collectives import Channel
from sparsync.compressors import Context
from sparsync.engine.bucketing import Bucket
from sparsync.engine.checkpoint import load_state_dict, state_dict
from sparsync.engine.reducer import Reducer
from sparsync.kernels import Memory
from sparsync.kernels.accumulate import accumulate, reference
from sparsync.kernels.topk import largest
from sparsync.layout import Layout, Parameter, Span, entries_for
from sparsync.schedule import Constant
from sparsync.sparse import SparseGrad, write_mean
from sparsync.wire import HEADER, Header, Shape, Wire
from tests.world import World

EVERYTHING = {"dense_below": 0, "dense_1d": False}  # nothing is too small to be compressed


# ---- training on real processes, with law 1 and law 2 checked at every step ---------------------------------------


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 20)).to(dtype)


def real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def bits(tensors: Sequence[Tensor]) -> bytes:
    return b"".join(real(t).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)


def assert_same_on_all_ranks(tensors: Sequence[Tensor]) -> None:
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, bits(tensors))
    assert len(set(said)) == 1, "the replicas differ"


def mean_over_ranks(tensor: Tensor) -> Tensor:
    total = real(tensor).double().contiguous()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def kept(handle: sparsync.Handle, name: str, parameter: Tensor) -> Tensor:
    residual = handle.residual(name)
    return torch.zeros_like(real(parameter)) if residual is None else residual.clone()


def checked_step(
    ddp: DistributedDataParallel, handle: sparsync.Handle, batches: Sequence[Tensor], loss: Callable[..., Tensor]
) -> None:
    """Forward and backward over ``batches`` (all but the last without exchange): mean applied + mean kept must be what
    came in, for every parameter."""
    alone = copy.deepcopy(ddp.module)
    for batch in batches:
        loss(alone(batch)).backward()
    before = {name: kept(handle, name, p) for name, p in ddp.module.named_parameters()}
    ddp.zero_grad()
    with ddp.no_sync():
        for batch in batches[:-1]:
            loss(ddp(batch)).backward()
    loss(ddp(batches[-1])).backward()
    handle.check()
    for (name, p), own in zip(ddp.module.named_parameters(), alone.parameters(), strict=True):
        came, applied = real(own.grad).double(), real(p.grad).double()
        total = mean_over_ranks(came + before[name])
        bound = mean_over_ranks(came.abs() + before[name].abs())
        eps = torch.finfo(real(p).dtype).eps
        error = (applied + mean_over_ranks(kept(handle, name, p)) - total).abs()
        assert (error <= 4 * dist.get_world_size() * eps * bound).all(), (name, error.max())


def square(out: Tensor) -> Tensor:
    return out.abs().square().mean()


def train(
    ddp: DistributedDataParallel,
    handle: sparsync.Handle,
    batches: Sequence[Tensor],
    accumulate: int = 1,
    loss: Callable[..., Tensor] = square,
) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for start in range(0, len(batches), accumulate):
        checked_step(ddp, handle, batches[start : start + accumulate], loss)
        optimizer.step()
        assert_same_on_all_ranks([p.grad for p in ddp.parameters()] + list(ddp.parameters()))


def inputs(rank: int, *shape: int, steps: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(*shape, generator=generator, dtype=dtype) for _ in range(steps)]


# ---- a reducer on its own, fed with buckets -----------------------------------------------------------------------


def make_reducer(
    parameters: dict[str, Tensor],
    compressor: Any = None,
    collective: Any = None,
    *,
    alone: bool = False,
    **options: Any,
) -> Reducer:
    options = {"scope": "layer", "density": Constant(0.1)} | options
    wire = Wire(options.pop("values", "fp32"))
    channel = Channel(None if alone else dist.group.WORLD, wire, options.pop("deadline", 20.0))
    described = [Parameter.of(name, tensor) for name, tensor in parameters.items()]
    return Reducer(described, compressor or TopK(), collective or AllGather(), channel, **options)


def push_all(reducer: Reducer, buckets: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
    """One step of buckets that hold one parameter each; their results."""
    futures = [
        reducer.push(Bucket(i, gradient.clone(), (name,), i == len(buckets) - 1))
        for i, (name, gradient) in enumerate(buckets)
    ]
    for future in futures:
        future.wait()
    return [future.value() for future in futures]


def error_of(action: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[str, str]:
    try:
        action(*arguments, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def compress(compressor: Any, gradient: Tensor, k: int, **context: Any) -> tuple[SparseGrad, Tensor]:
    """One pass over a gradient that is one segment; what is sent, and the residual."""
    span = Span("w", 0, gradient.numel())
    layout = Layout.cut(
        [span],
        numel=gradient.numel(),
        scope="layer",
        density=k / gradient.numel(),
        capacity=compressor.capacity,
    )
    residual = torch.zeros_like(gradient)
    memory = Memory(residual, residual)
    return compressor.compress(gradient, memory, layout, Context(**context), compressor.init(layout)), residual


# ---- gradients as they come ---------------------------------------------------------------------------------------


def case_no_sync(rank: int, size: int, scope: str) -> None:
    ddp = DistributedDataParallel(mlp())
    handle = sparsync.attach(ddp, "topk", density=0.02, scope=scope)
    train(ddp, handle, inputs(rank, 8, 40, steps=9), accumulate=3)
    assert handle.stats().total.steps == 3
    handle.detach()
    del ddp
    gc.collect()


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_25_no_sync(worlds, scope):
    worlds[2].run(case_no_sync, scope=scope)


class Mixed(nn.Module):
    """Three layers, each of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.single = nn.Linear(40, 50)
        self.wide = nn.Linear(50, 50, dtype=torch.float64)
        self.narrow = nn.Linear(50, 30, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(self.single(x).relu().double())
        return self.narrow(x.relu().bfloat16()).float()


def case_mixed_dtypes(rank: int, size: int, scope: str) -> dict[str, torch.dtype]:
    ddp = DistributedDataParallel(Mixed())
    handle = sparsync.attach(ddp, "topk", density=0.02, scope=scope)
    train(ddp, handle, inputs(rank, 8, 40))
    units = [exchange.unit for exchange in handle.stats().timeline]
    dtypes = {name: tensor.dtype for name, tensor in handle.state_dict()["residuals"].items()}
    handle.detach()
    del ddp
    gc.collect()
    return {"dtypes": dtypes, "units": units}


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_26_mixed_dtypes(worlds, scope):
    for answer in worlds[2].run(case_mixed_dtypes, scope=scope):
        assert answer["dtypes"] == {
            "single.weight": torch.float32,
            "wide.weight": torch.float64,
            "narrow.weight": torch.float32,
        }
        if scope == "global":
            large = [unit for unit in answer["units"] if unit.startswith("global")]
            assert sorted(large) == ["global bfloat16", "global float32", "global float64"]


def case_half_sum(rank: int, size: int, dtype: torch.dtype) -> None:
    gradients = [torch.randn(500, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)]
    if dtype == torch.float16:
        for gradient in gradients:
            gradient[7] = 40_000.0  # the sum of three is beyond fp16, the mean is not
    reducer = make_reducer({"w": torch.zeros(500, 1, dtype=dtype)}, density=Constant(1.0))
    (result,) = push_all(reducer, [("w", gradients[rank])])
    total = torch.zeros(500)
    for gradient in gradients:
        total += gradient.float()
    assert torch.equal(result, (total / size).to(dtype))
    assert bits([result]) == bits([(total / size).to(dtype)])
    reducer.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_27_half_gradients_are_summed_in_fp32(worlds, dtype):
    worlds[3].run(case_half_sum, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_27_small_additions_are_kept(dtype):
    reducer = make_reducer({"w": torch.zeros(10, 1, dtype=dtype)}, alone=True)  # k = 1
    small = torch.finfo(dtype).eps / 4
    gradient = torch.tensor([100.0, 1.0] + [0.0] * 8, dtype=dtype)
    push_all(reducer, [("w", gradient)])
    gradient[1] = small
    for _ in range(64):
        (result,) = push_all(reducer, [("w", gradient)])
        assert result.dtype == dtype
        assert result.tolist() == [100.0] + [0.0] * 9
    residual = state_dict(reducer)["residuals"]["w"]
    assert residual.dtype == torch.float32
    assert residual[1].item() == 1.0 + 64 * small  # one at a time they vanish beside 1 in the gradient's own dtype


def case_dtype(rank: int, size: int, dtype: torch.dtype, kept_as: torch.dtype) -> None:
    ddp = DistributedDataParallel(mlp(dtype))
    handle = sparsync.attach(ddp, "topk", density=0.02)
    train(ddp, handle, inputs(rank, 8, 40, dtype=dtype))
    assert {t.dtype for t in handle.state_dict()["residuals"].values()} == {kept_as}
    handle.detach()
    del ddp
    gc.collect()


def test_27_bf16_training(worlds):
    worlds[3].run(case_dtype, dtype=torch.bfloat16, kept_as=torch.float32)


def test_28_fp64_training(worlds):
    """The bound of law 1 is in units of fp64's rounding, so a detour through fp32 would show."""
    worlds[3].run(case_dtype, dtype=torch.float64, kept_as=torch.float64)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Parameter(torch.randn(40, 50, dtype=torch.complex64) / 7)
        self.middle = nn.Linear(50, 30)  # a real one after it: offsets count real numbers
        self.bias = nn.Parameter(torch.randn(30, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.middle((x.to(torch.complex64) @ self.first).abs()) + self.bias


def case_complex(rank: int, size: int, scope: str) -> None:
    ddp = DistributedDataParallel(Complex())
    handle = sparsync.attach(ddp, "topk", density=0.02, scope=scope)
    train(ddp, handle, inputs(rank, 8, 40))
    residuals = handle.state_dict()["residuals"]
    assert residuals["first"].shape == (40, 50, 2)
    assert residuals["first"].count_nonzero() > 1000
    assert handle.stats().step.numel == 2 * 40 * 50 + 50 * 30 + (30 + 2 * 30)
    handle.detach()
    del ddp
    gc.collect()


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_29_complex_parameters(worlds, scope):
    worlds[2].run(case_complex, scope=scope)


def case_channels_last(rank: int, size: int, scope: str) -> None:
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(1)
        convolutions = nn.Sequential(nn.Conv2d(6, 10, 3), nn.ReLU(), nn.Conv2d(10, 8, 3)).double()
        ddp = DistributedDataParallel(convolutions.to(memory_format=memory_format))
        handle = sparsync.attach(ddp, "topk", density=0.1, scope=scope, dense_below=0)
        train(ddp, handle, [x.to(memory_format=memory_format) for x in inputs(rank, 4, 6, 9, 9, dtype=torch.float64)])
        assert convolutions[0].weight.is_contiguous(memory_format=memory_format)
        found.append(handle.state_dict()["residuals"])
        handle.detach()
        del ddp
        gc.collect()
    plain, last = found
    assert plain.keys() == last.keys() == {"0.weight", "2.weight"}
    for name in plain:
        assert last[name].is_contiguous()
        torch.testing.assert_close(last[name], plain[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_30_channels_last(worlds, scope):
    worlds[2].run(case_channels_last, scope=scope)


# ---- copies and reuse ---------------------------------------------------------------------------------------------


def case_copies(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(mlp())
    handle = sparsync.attach(ddp, "topk", density=0.02)
    batches = inputs(rank, 8, 40)
    train(ddp, handle, batches)
    for duplicate in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        twin = duplicate(ddp)
        assert handle.is_attached()
        steps = handle.stats().total.steps
        square(twin(batches[0])).backward()  # dense: the copy has no hook
        assert handle.stats().total.steps == steps
        theirs = sparsync.attach(twin, "topk", density=0.02)
        assert theirs.is_attached()
        train(twin, theirs, batches)
        theirs.detach()
        assert not theirs.is_attached()
        del twin
        gc.collect()
    twin = copy.deepcopy(ddp)
    handle.detach()
    assert not handle.is_attached()
    square(twin(batches[0])).backward()  # a copy outlives what it was copied from
    del ddp, twin
    gc.collect()


def test_34_copies_are_not_attached(worlds):
    worlds[2].run(case_copies)


def case_reuse(rank: int, size: int) -> str:
    model, other = mlp(), mlp()
    first, second = DistributedDataParallel(model), DistributedDataParallel(other)
    handle, hook = sparsync.comm_hook(model, "topk", density=0.02)
    first.register_comm_hook(handle, hook)
    second.register_comm_hook(handle, hook)
    batch = inputs(rank, 8, 40)[0]
    square(first(batch)).backward()
    _, refused = error_of(square(second(batch)).backward)
    first.zero_grad()
    square(first(batch)).backward()  # the model it belongs to goes on
    assert_same_on_all_ranks([p.grad for p in first.parameters()])
    handle.detach()
    del first, second
    gc.collect()
    return refused


def test_35_one_state_for_one_model():
    for finished, answer in World.once(2, case_reuse):
        assert finished, answer
        assert "belongs to another model" in answer


# ---- how many entries ---------------------------------------------------------------------------------------------


def case_small_is_dense(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 300)))
    handle = sparsync.attach(ddp, "topk", density=0.001, dense_below=100)
    train(ddp, handle, inputs(rank, 8, 5))
    assert set(handle.state_dict()["residuals"]) == {"1.weight"}
    handle.detach()
    del ddp
    gc.collect()


def test_38_small_tensors_travel_dense(worlds):
    worlds[2].run(case_small_is_dense)


@pytest.mark.parametrize("compressor", [TopK(), ThresholdK()], ids=repr)
@pytest.mark.parametrize("numel", [1, 2, 65])
def test_38_k_above_n_is_clamped(compressor, numel):
    gradient = torch.randn(numel)
    sent, residual = compress(compressor, gradient, k=10 * numel)
    assert sent.values.numel() == numel
    assert torch.equal(sent.densify(), gradient)
    assert not residual.any()


def test_38_largest_takes_any_k():
    u = torch.randn(100)
    rows, _ = accumulate(u, Memory(torch.zeros(100), torch.zeros(100)), [(0, 100)])
    assert largest(u, rows, 1000).tolist() == list(range(100))


@pytest.mark.parametrize("density", [0, 0.0, -0.1, 1.0001, float("nan"), float("inf")])
def test_39_density_out_of_range(density):
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
def test_39_tiny_density_sends_one(compressor):
    assert entries_for(1e-12, 1000) == 1
    reducer = make_reducer({"w": torch.zeros(1000, 1)}, compressor, alone=True, density=Constant(1e-12))
    (result,) = push_all(reducer, [("w", torch.arange(1000.0))])
    (sent,) = result.nonzero().flatten().tolist()
    assert sent == 999 or (isinstance(compressor, ThresholdK) and sent > 990)  # nearly equal ones share a bin


def case_zero_gradient(rank: int, size: int, compressor: Any) -> None:
    ddp = DistributedDataParallel(mlp())
    handle = sparsync.attach(ddp, compressor, **EVERYTHING)
    (0 * ddp(inputs(rank, 8, 40)[0])).sum().backward()
    assert handle.stats().step.entries == 0
    assert not any(p.grad.any() for p in ddp.parameters())
    train(ddp, handle, inputs(rank, 8, 40))  # and goes on from there
    assert handle.stats().step.entries > 0
    handle.detach()
    del ddp
    gc.collect()


@pytest.mark.parametrize("compressor", [TopK(0.05), ThresholdK(0.05)], ids=repr)
def test_40_zero_gradient_sends_nothing(worlds, compressor):
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
def test_41_empty_parameters(worlds, scope):
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


def test_41_empty_buckets(worlds):
    worlds[3].run(case_empty_buckets)


def case_uneven_counts(rank: int, size: int, compressor: Any) -> None:
    """Rank 0 has three entries to send, rank 1 none, rank 2 more than it may."""
    gradients = torch.zeros(3, 400)
    gradients[0, [3, 200, 399]] = torch.tensor([1.0, -2.0, 4.0])
    gradients[2] = torch.arange(1.0, 401.0)
    reducer = make_reducer({"w": torch.zeros(400, 1)}, compressor)
    (result,) = push_all(reducer, [("w", gradients[rank])])
    residual = state_dict(reducer)["residuals"]["w"].flatten()
    came_back = gradients[rank] - residual  # what this rank sent
    assert reducer.stats.step.entries == came_back.count_nonzero() == (3, 0, reducer.stats.step.entries)[rank]
    sent = [torch.empty(400) for _ in range(size)]
    dist.all_gather(sent, came_back)
    assert 30 <= sent[2].count_nonzero() <= 45
    assert torch.equal(result, (sent[0] + sent[1] + sent[2]) / 3)
    assert_same_on_all_ranks([result])
    reducer.close()


@pytest.mark.parametrize("compressor", [TopK(), ThresholdK()], ids=repr)
def test_42_uneven_counts(worlds, compressor):
    worlds[3].run(case_uneven_counts, compressor=compressor)


# ---- ranks that disagree ------------------------------------------------------------------------------------------


class Renamed(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(40, 60, bias=False))


def case_other_configuration(rank: int, size: int, usual: dict[str, Any], odd: dict[str, Any]) -> Any:
    ddp = DistributedDataParallel(mlp())
    answer = error_of(sparsync.attach, ddp, **(odd if rank == 1 else usual))
    handle = sparsync.attach(ddp, **usual)  # nothing is left of the attempt
    train(ddp, handle, inputs(rank, 8, 40, steps=1))
    handle.detach()
    del ddp
    gc.collect()
    return answer


def case_other_names(rank: int, size: int) -> Any:
    ddp = DistributedDataParallel(Renamed("one" if rank == 1 else "two"))
    answer = error_of(sparsync.attach, ddp, "topk")
    del ddp
    gc.collect()
    return answer


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"density": 0.02}, "density=[0.02"),
        ({"compressor": "threshold"}, "ThresholdK"),
        ({"scope": "global"}, "scope=global"),
        ({"values": "bf16"}, "values=bf16"),
        ({"seed": 5}, "seed=5"),
        ({"transactional": True}, "transactional=True"),
        ({"dense_below": 0, "dense_1d": False}, "0.bias"),
        ({"debug": True}, "debug=True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_43_other_configuration(worlds, odd, says):
    usual = {"compressor": "topk", "density": 0.01}
    answers = worlds[3].run(case_other_configuration, usual=usual, odd=usual | odd)
    assert len(set(answers)) == 1
    kind, text = answers[0]
    assert kind == Mismatch.__name__
    assert "configuration differs on rank 1" in text
    assert says in text


def test_43_other_model(worlds):
    answers = worlds[3].run(case_other_names)
    assert len(set(answers)) == 1
    kind, text = answers[0]
    assert kind == Mismatch.__name__
    assert "model differs on rank 1" in text
    assert "'one.weight'" in text
    assert "'two.weight'" in text


def case_other_order(rank: int, size: int, numel: tuple[int, int], good_steps: int, swap: str) -> Any:
    gradients = {"a": torch.ones(numel[0]), "b": torch.ones(numel[1])}
    reducer = make_reducer({name: gradient.view(-1, 1) for name, gradient in gradients.items()}, deadline=6.0)
    for _ in range(good_steps):
        push_all(reducer, list(gradients.items()))
    buckets = [Bucket(0, gradients["a"], ("a",), False), Bucket(1, gradients["b"], ("b",), True)]
    if rank == 1 and swap == "parameters":
        buckets = [Bucket(0, gradients["b"], ("b",), False), Bucket(1, gradients["a"], ("a",), True)]
    if rank == 1 and swap == "buckets":
        reducer._begin()  # which the bucket 0 does otherwise
        buckets = [Bucket(1, gradients["b"], ("b",), False), Bucket(0, gradients["a"], ("a",), True)]
    for future in [reducer.push(bucket) for bucket in buckets]:
        error_of(future.wait)
    answer = error_of(reducer.check)
    reducer.close()
    return answer


@pytest.mark.parametrize(
    ("numel", "good_steps", "swap"),
    [
        ((100, 100), 0, "parameters"),
        ((100, 300), 0, "parameters"),
        ((100, 100), 2, "buckets"),
        ((100, 300), 2, "buckets"),
        ((100, 100), 2, "parameters"),
    ],
)
def test_44_other_order(numel, good_steps, swap):
    answers = World.once(2, case_other_order, numel=numel, good_steps=good_steps, swap=swap)
    assert all(finished for finished, _ in answers), answers
    assert answers[0] == answers[1]
    kind, text = answers[0][1]
    assert kind == Mismatch.__name__
    assert "differs" in text


# ---- bits on the wire ---------------------------------------------------------------------------------------------


def sparse(indices: Sequence[int] | Tensor, values: Tensor, numel: int, count: int | None = None) -> SparseGrad:
    words = torch.tensor([0, -1], dtype=torch.int32)
    count = values.numel() if count is None else count
    return SparseGrad(torch.as_tensor(indices), values, torch.tensor(count), numel, words[0], words[1])


def message_of(sent: SparseGrad, wire: Wire, sequence: int = 0) -> tuple[Tensor, Shape]:
    shape = Shape(sent.numel, sent.values.numel(), 1, sent.values.dtype)
    message = wire.encode(sent, torch.zeros_like, shape, wire.header(sent, sequence, 3, 7))
    assert message.nbytes == wire.bytes(shape)
    return message, shape


@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "sign", "levels"])
@pytest.mark.parametrize("numel", [2**31 - 1, 2**31, 2**31 + 10, 2**33])
def test_45_more_than_2_31_entries(values, numel):
    indices = [0, 2**24 + 1, 2**31 - 2, numel - 3, numel - 1]
    sent = sparse(indices, torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0]), numel)
    message, shape = message_of(sent, Wire(values))
    got = Wire(values).decode(message, torch.zeros_like, shape)
    assert got.indices.tolist() == indices
    assert torch.equal(got.values, sent.values)
    assert got.numel == numel


def test_45_layout_of_more_than_2_31_entries():
    spans = [Span("a", 0, 2**31 + 10), Span("b", 2**31 + 10, 2**31)]
    layout = Layout.cut(spans, numel=2**32 + 10, scope="layer", density=1e-9)
    assert [segment.k for segment in layout.segments] == [2, 2]
    assert layout.sendable == 2**32 + 10
    assert layout.segment_of(torch.tensor([0, 2**31 + 9, 2**31 + 10, 2**32 + 9])).tolist() == [0, 0, 1, 1]
    whole = Layout.cut(spans, numel=2**32 + 10, scope="global", density=0.001)
    assert whole.k == round(0.001 * (2**32 + 10))
    assert whole.segments[0].runs() == [(0, 2**32 + 10)]
    assert AllGather().traffic(whole, Wire(), workers=2).mean_bytes == 4 * HEADER + whole.k * (8 + 4)


def test_45_more_than_2_31_exchanges():
    message, _ = message_of(sparse([1], torch.ones(1), 10), Wire(), sequence=2**31 + 5)
    assert Header(*message[:HEADER].tolist()).sequence == 5


@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "sign", "levels"])
def test_46_indices_are_not_floats(values):
    indices = torch.arange(2**24 - 2, 2**24 + 6)
    sent = sparse(indices, torch.ones(8), 2**24 + 6)
    message, shape = message_of(sent, Wire(values))
    assert torch.equal(Wire(values).decode(message, torch.zeros_like, shape).indices, indices)


# Seen as fp32: signalling and quiet NaN with payloads, both infinities, -0, the smallest denormals.
ODD_WORDS = [0x7F800001, 0x7FC12345, 0x7FFFFFFF, 0x7F800000, 0x7FABCDEF, 0x00000001, 0x7FC00000, 0x00400000]


def case_odd_bits(rank: int, size: int, values: str, dtype: torch.dtype) -> None:
    indices = torch.tensor([word - 1 - rank for word in ODD_WORDS[:4]] * 2)
    wire = Wire(values)
    words = torch.tensor(ODD_WORDS, dtype=torch.int32) ^ (-0x80000000 if rank else 0)
    if values in ("sign", "levels"):  # eight times 32 signs: the packed word is the pattern itself
        lanes = torch.arange(32, dtype=torch.int32)
        content = torch.where((words.unsqueeze(1) >> lanes & 1).bool(), -1.0, 1.0).flatten()
        indices = indices.repeat(32)
    else:
        content = words.view(dtype)
    indices = indices[: content.numel()]
    sent = sparse(indices, content, 2**31 - 1)
    message, shape = message_of(sent, wire)
    channel = Channel(dist.group.WORLD, wire, 20.0)
    rows = channel.all_gather(message)
    said: list[Any] = [None] * size
    dist.all_gather_object(said, bits([message]))  # as pickled bytes: another way to the same message
    channel.close()
    own = wire.decode(rows[rank], torch.zeros_like, shape)
    assert torch.equal(own.indices, indices)
    assert bits([own.values]) == bits([content])
    assert said == [bits([row]) for row in rows]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ("fp32", torch.float32),
        ("fp32", torch.float64),
        ("sign", torch.float32),
        ("levels", torch.float32),
    ],
)
def test_47_patterns_that_look_like_nan(worlds, values, dtype):
    worlds[2].run(case_odd_bits, values=values, dtype=dtype)


# ---- sums ---------------------------------------------------------------------------------------------------------


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
def test_48_duplicates_over_ranks(worlds, dtype):
    worlds[3].run(case_duplicates, dtype=dtype)


@pytest.mark.parametrize("chunk", [64, 128, 2**18])
@pytest.mark.parametrize(
    ("numel", "k"), [(10, 3), (64, 63), (65, 64), (128, 65), (500, 63), (500, 64), (500, 129), (1000, 999)]
)
def test_49_of_equals_the_lower_index_goes(monkeypatch, chunk, numel, k):
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


def test_49_threshold_is_deterministic():
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
def test_50_sums_run_in_rank_order(worlds, dtype):
    assert len(set(worlds[3].run(case_order_of_summation, dtype=dtype))) == 1


@dataclass(frozen=True)
class OffOnOneRank(AllGather):
    """An exchange whose result is a little off on rank 1."""

    def reduce(self, sent, layout, channel, state):
        reduced = super().reduce(sent, layout, channel, state)
        if channel.rank == 1:
            reduced.total[0].values[0] *= 1 + 2**-20
        return reduced


def case_replicas_differ(rank: int, size: int, debug: bool) -> Any:
    reducer = make_reducer({"w": torch.zeros(100, 1)}, TopK(), OffOnOneRank(), debug=debug)
    future = reducer.push(Bucket(0, torch.ones(100), ("w",), True))
    error_of(future.wait)
    answer = error_of(reducer.check)
    reducer.close()
    return answer


def test_50_debug_finds_the_rank_that_differs(worlds):
    answers = worlds[3].run(case_replicas_differ, debug=True)
    assert len(set(answers)) == 1
    kind, text = answers[0]
    assert kind == Mismatch.__name__
    assert "result of bucket 0 differs on rank 1:" in text
    assert worlds[3].run(case_replicas_differ, debug=False) == [("none", "")] * 3


# ---- peers that are gone ------------------------------------------------------------------------------------------


def case_peer(rank: int, size: int, victim: int, stall: float, deadline: float) -> Any:
    """After two good steps ``victim`` ends at once, or sleeps for ``stall`` seconds."""
    ddp = DistributedDataParallel(mlp(), bucket_cap_mb=0.001)
    handle = sparsync.attach(ddp, "topk", density=0.02, transactional=True, deadline=deadline)
    batches = inputs(rank, 8, 40)
    train(ddp, handle, batches[:2])
    before = handle.state_dict()["residuals"]
    output = ddp(batches[2])
    dist.barrier()
    if rank == victim:
        if not stall:
            os._exit(9)
        time.sleep(stall)
    began = time.monotonic()
    failed, _ = error_of(square(output).backward)
    took = time.monotonic() - began
    answer = error_of(handle.check)
    again = error_of(ddp, batches[3])
    after = handle.state_dict()["residuals"]
    undone = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    handle.detach()
    del ddp, output
    gc.collect()
    return {"failed": failed, "took": took, "error": answer, "again": again, "undone": undone}


def assert_lost(answers: Sequence[tuple[bool, Any]], survivors: Sequence[int], within: float, says: str) -> None:
    for rank in survivors:
        finished, answer = answers[rank]
        assert finished, answer
        assert answer["failed"] == "RuntimeError"
        assert answer["took"] < within
        kind, text = answer["error"]
        assert kind == PeerLost.__name__
        assert says in text, text
        assert answer["again"][0] == "StepFailed"
        assert says in answer["again"][1]
        assert answer["undone"], "the failed step is in the residual that would be saved"


@pytest.mark.parametrize(
    ("victim", "says"), [(2, "ranks not heard from: 2"), (0, "the store is gone, and with it rank 0")]
)
def test_52_rank_killed(victim, says):
    answers = World.once(3, case_peer, victim=victim, stall=0.0, deadline=60.0)
    assert answers[victim] == (False, "died with exit code 9")
    assert_lost(answers, [rank for rank in range(3) if rank != victim], within=40.0, says=says)


def test_53_rank_stalled():
    answers = World.once(3, case_peer, victim=1, stall=6.0, deadline=4.0)
    assert_lost(answers, [0, 2], within=20.0, says="no answer within 4 s; ranks not heard from: 1")
    finished, late = answers[1]  # the one that slept finds out too, and with the same words
    assert finished, late
    assert late["error"] == answers[0][1]["error"] == answers[2][1]["error"]


# ---- checkpoints --------------------------------------------------------------------------------------------------


def case_save(rank: int, size: int, compressor: str) -> dict[str, Any]:
    ddp = DistributedDataParallel(mlp())
    handle = sparsync.attach(ddp, compressor, density=0.02)
    train(ddp, handle, inputs(rank, 8, 40))
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    handle.detach()
    del ddp
    gc.collect()
    return {"file": file.getvalue()}


def case_load(rank: int, size: int, files: list[bytes], compressor: str) -> None:
    states = [torch.load(io.BytesIO(file), weights_only=True) for file in files]
    ddp = DistributedDataParallel(mlp())
    handle = sparsync.attach(ddp, compressor, density=0.02)
    handle.load_state_dict(states if size != len(states) else states[rank])
    own = handle.state_dict()
    assert own["step"] == states[0]["step"] == 4
    for name, p in ddp.module.named_parameters():
        if name in states[0]["residuals"]:
            old = torch.stack([state["residuals"][name].double() for state in states]).mean(0)
            assert old.any()
            torch.testing.assert_close(mean_over_ranks(kept(handle, name, p)), old, rtol=1e-5, atol=1e-9)
    if size == len(states):
        assert own["residuals"].keys() == states[rank]["residuals"].keys()
        for name, residual in own["residuals"].items():
            assert torch.equal(residual, states[rank]["residuals"][name])
    train(ddp, handle, inputs(rank, 8, 40, steps=2))
    handle.detach()
    del ddp
    gc.collect()


@pytest.mark.parametrize("compressor", ["topk", "threshold"])
@pytest.mark.parametrize(("old", "new"), [(2, 2), (2, 3), (5, 2), (3, 1)])
def test_57_checkpoint_on_any_world_size(worlds, old, new, compressor):
    files = [answer["file"] for answer in worlds[old].run(case_save, compressor=compressor)]
    worlds[new].run(case_load, files=files, compressor=compressor)


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(inner) for key, inner in value.items())
    return value is None or type(value) in (int, float, str, bool, Tensor)


def test_57_what_does_not_fit_is_refused(tmp_path):
    parameters = {"a": torch.zeros(40, 5), "b": torch.zeros(30, 1)}
    reducer = make_reducer(parameters, ThresholdK(), alone=True)
    push_all(reducer, [("a", torch.randn(200)), ("b", torch.randn(30))])
    torch.save(state_dict(reducer), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert plain(state)
    assert state["schema"] == 1
    residuals = copy.deepcopy(state["residuals"])

    for wrong, says in [
        (state | {"schema": 99}, "schema 1: it says 99"),
        ({"weight": torch.zeros(3)}, "not a sparsync state"),
        (state | {"workers": 4, "rank": 2}, "rank 2 of 4, and here is rank 0 of 1"),
        ([], "list is empty"),
        ([state | {"workers": 2, "rank": 1}, state | {"workers": 2, "rank": 0}], "ranks 0 to 1, in order"),
        ([state | {"workers": 2, "rank": 0}], "ranks 0 to 1, in order"),
        (state | {"residuals": {"c": torch.zeros(3)}}, "'c', which this model does not have"),
        (state | {"residuals": {"a": torch.zeros(5, 40)}}, r"'a' has shape \(5, 40\)"),
    ]:
        with pytest.raises(ValueError, match=says):
            load_state_dict(reducer, wrong)
        assert state_dict(reducer)["step"] == 1
        for name, residual in state_dict(reducer)["residuals"].items():
            assert torch.equal(residual, residuals[name]), "a refused state changed something"


# ---- world sizes --------------------------------------------------------------------------------------------------


def case_train(rank: int, size: int, compressor: str, scope: str) -> None:
    ddp = DistributedDataParallel(mlp())
    handle = sparsync.attach(ddp, compressor, density=0.02, scope=scope)
    train(ddp, handle, inputs(rank, 8, 40))
    handle.detach()
    del ddp
    gc.collect()


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize(("compressor", "scope"), [("topk", "layer"), ("threshold", "global"), ("none", "layer")])
def test_59_odd_world_sizes(worlds, size, compressor, scope):
    worlds[size].run(case_train, compressor=compressor, scope=scope)


@pytest.mark.parametrize("size", range(1, 10))
def test_59_any_world_size_in_one_process(size):
    torch.manual_seed(size)
    layout = Layout.cut([Span("w", 0, 300)], numel=300, scope="layer", density=0.2)
    sents, total = [], torch.zeros(300)
    for _ in range(size):
        sent, _ = compress(TopK(), torch.randn(300), k=60)
        sents.append(sent)
        total += sent.densify()
    for reduced in AllGather().reduce_local(sents, layout, {}, Wire()):
        out = torch.full((300,), torch.nan)
        write_mean(out, reduced.total, reduced.divisor)
        assert torch.equal(out, total / size)


@pytest.mark.parametrize(("compressor", "scope"), [("topk", "layer"), ("threshold", "global"), ("none", "layer")])
def test_60_one_worker_in_a_process_group(worlds, compressor, scope):
    worlds[1].run(case_train, compressor=compressor, scope=scope)


@pytest.mark.parametrize("compressor", [TopK(), ThresholdK()], ids=repr)
@pytest.mark.parametrize("values", ["fp32", "bf16"])
@pytest.mark.parametrize("scope", ["layer", "bucket", "global"])
def test_60_one_worker_without_torch_distributed(compressor, values, scope):
    assert not dist.is_initialized()
    reducer = make_reducer(
        {"a": torch.zeros(300, 1), "b": torch.zeros(20, 10)}, compressor, alone=True, scope=scope, values=values
    )
    residuals = {"a": torch.zeros(300), "b": torch.zeros(200)}
    for step in range(5):
        torch.manual_seed(step)
        gradients = {"a": torch.randn(300), "b": torch.randn(200)}
        results = push_all(reducer, list(gradients.items()))
        kept_now = state_dict(reducer)["residuals"]
        for (name, gradient), result in zip(gradients.items(), results, strict=True):
            came_in = gradient + residuals[name]
            residuals[name] = kept_now[name].flatten()
            assert torch.equal(result + residuals[name], came_in)  # law 1, bit for bit
        assert 0 < sum(int(result.count_nonzero()) for result in results) <= 60
    assert reducer.stats.total.bytes == 0
    reducer.close()


# ---- the end ------------------------------------------------------------------------------------------------------

SCRIPT = """
import gc
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import sparsync

dist.init_process_group("gloo")
torch.set_num_threads(1)
ddp = DistributedDataParallel(nn.Linear(50, 40))
sync = sparsync.attach(ddp, "topk", density=0.01)
for _ in range(3):
    ddp(torch.randn(4, 50)).square().mean().backward()
sync.detach()
del ddp
gc.collect()
dist.destroy_process_group()
print("the end")
"""


def test_64_scripts_end_well(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the end") == 3
