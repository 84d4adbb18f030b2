"""Gradients of every dtype and memory layout."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.schedule import Constant
from tests.failures.checked_training import bits, inputs, mlp, train
from tests.failures.reducers import make_reducer, push_all


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
def test_mixed_dtypes_in_one_model(worlds, scope):
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
def test_half_precision_gradients_are_summed_in_fp32(worlds, dtype):
    worlds[3].run(case_half_sum, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_small_additions_to_a_half_precision_gradient_are_kept(dtype):
    reducer = make_reducer({"w": torch.zeros(10, 1, dtype=dtype)}, alone=True)  # k = 1
    small = torch.finfo(dtype).eps / 4
    gradient = torch.tensor([100.0, 1.0] + [0.0] * 8, dtype=dtype)
    push_all(reducer, [("w", gradient)])
    gradient[1] = small
    for _ in range(64):
        (result,) = push_all(reducer, [("w", gradient)])
        assert result.dtype == dtype
        assert result.tolist() == [100.0] + [0.0] * 9
    residual = reducer.state_dict()["residuals"]["w"]
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


def test_bf16_training_keeps_an_fp32_residual(worlds):
    worlds[3].run(case_dtype, dtype=torch.bfloat16, kept_as=torch.float32)


def test_fp64_training_keeps_an_fp64_residual(worlds):
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
def test_complex_parameters(worlds, scope):
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
def test_channels_last_gives_the_same_residuals(worlds, scope):
    worlds[2].run(case_channels_last, scope=scope)
