"""Gradients that a hook does not get, or gets in another form than it should: refused in a sentence, or listed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import sparsync
from sparsync import SparsyncError, TopK
from tests.failures.ddp_training import SIZES, Chain, assert_replicas_equal, digest, gathered, loss_of
from tests.failures.reducers import error_of


class WithEmbedding(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(50, 30, sparse=sparse), nn.Linear(30, 40)

    def forward(self, x: Any) -> Any:
        return self.out(self.words(x))


def case_sparse_embedding(rank: int, size: int) -> list[tuple[str, str]]:
    ddp = DistributedDataParallel(WithEmbedding(sparse=True))
    refused = [error_of(sparsync.attach, ddp, "topk"), error_of(sparsync.comm_hook, ddp.module, "topk")]
    ignored = WithEmbedding(sparse=True)  # what DDP leaves alone may have any gradient
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignored, ["words.weight"])
    for model in (WithEmbedding(sparse=False), ignored):
        ddp = DistributedDataParallel(model)
        handle = sparsync.attach(ddp, TopK(0.05), dense_below=0)
        ddp(torch.tensor([rank, 7])).sum().backward()
        assert handle.residual("out.weight").any()
        assert_replicas_equal(model.out)
        handle.detach()
    del ddp
    gc.collect()
    return refused


def test_sparse_gradients_are_refused_in_one_sentence(worlds: Any) -> None:
    for refused in worlds[2].run(case_sparse_embedding):
        for kind, text in refused:
            assert kind == "ValueError"
            assert text.startswith("'words.weight' has sparse gradients")
            assert "sparse=False" in text
            assert len(text) < 200


def case_wrapped(rank: int, size: int, wrapper: str) -> tuple[str, str]:
    model = Chain(SIZES)
    ddp = DistributedDataParallel(model)
    handle, hook = sparsync.comm_hook(model, TopK(0.05))
    wrapped = getattr(default_hooks, wrapper)(hook)
    ddp.register_comm_hook(handle, lambda state, bucket: wrapped(state, bucket))  # on CPUs DDP refuses bf16's by name
    answer = error_of(loss_of(ddp, rank, 0).backward)
    assert not handle.is_attached()
    handle.detach()
    del ddp
    gc.collect()
    return answer


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_a_wrapper_that_casts_gradients_is_noticed(worlds: Any, half: str) -> None:
    for kind, text in worlds[2].run(case_wrapped, wrapper=f"{half}_compress_wrapper"):
        assert kind == "RuntimeError"
        assert f"{half}_compress_wrapper" in text
        assert f"values='{half}'" in text


def case_other_hook(rank: int, size: int) -> list[str]:
    said = []
    ddp = DistributedDataParallel(Chain(SIZES))
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(SparsyncError) as refused:
        sparsync.attach(ddp, "topk")
    said.append(str(refused.value))
    ddp = DistributedDataParallel(Chain(SIZES))
    ddp._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.ALLREDUCE)  # type: ignore[attr-defined]
    with pytest.raises(SparsyncError) as refused:
        sparsync.attach(ddp, "topk")
    said.append(str(refused.value))
    del ddp, refused
    gc.collect()
    return said


def test_a_model_with_another_hook_is_refused_by_its_name(worlds: Any) -> None:
    for named, builtin in worlds[2].run(case_other_hook):
        assert "has another: fp16_compress_hook" in named
        assert "has another" in builtin


def case_mixed_precision(rank: int, size: int) -> str:
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    ddp = DistributedDataParallel(Chain(SIZES), mixed_precision=precision)
    with pytest.raises(SparsyncError) as refused:
        sparsync.attach(ddp, "topk")
    del ddp
    gc.collect()
    return str(refused.value)


def test_ddps_own_mixed_precision_is_explained(worlds: Any) -> None:
    for text in worlds[2].run(case_mixed_precision):
        assert text.startswith("DDP's own mixed_precision= holds the only communication hook")
        assert "torch.autocast" in text


@contextmanager
def sums_awaited() -> Iterator[None]:
    """Wait for the sums that DDP begins on its own and, of parameters that it reduces later, never waits for."""
    begun, real = [], dist.all_reduce

    def noted(*args: Any, **options: Any) -> Any:
        work = real(*args, **options)
        begun.append(work)
        return work

    with patch.object(dist, "all_reduce", noted):
        yield
    for work in filter(None, begun):
        work.wait()


def case_left_to_ddp(rank: int, size: int, scope: str, momentum: str) -> None:
    model, steps = Chain(SIZES), 3
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["layer1.weight"])
    late = [(name, p) for name, p in model.named_parameters() if name.startswith("layer2")]
    # Its gradient is the last to come, so all that is reduced with it is there.
    ddp = DistributedDataParallel(
        model, delay_all_reduce_named_params=late, param_to_hook_all_reduce=model.get_parameter("layer0.weight")
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    twins = {name: nn.Parameter(model.get_parameter(name).detach().clone()) for name in ("layer1.weight", *dict(late))}
    plain = torch.optim.SGD(twins.values(), lr=0.1, momentum=0.9)
    handle = sparsync.attach(
        ddp, TopK(0.05), optimizer=optimizer, scope=scope, momentum=momentum, dense_below=0, dense_1d=False
    )
    lines = {line.split()[0]: line for line in handle.describe().splitlines()}
    left = [line for line in handle.describe().splitlines() if line.startswith("  left out")]
    assert "5 tensors" in lines["compressed"]
    assert len(left) == 1
    assert "layer1.weight" in left[0]
    assert "layer2.weight, layer2.bias" in left[0]
    for step in range(steps):
        optimizer.zero_grad()
        with sums_awaited():
            loss_of(ddp, rank, step).backward()
        for name, twin in twins.items():
            twin.grad = model.get_parameter(name).grad.clone()
        plain.step()
        optimizer.step()
        for name, twin in twins.items():  # they step by the optimizer's own rule, momentum included
            assert torch.equal(twin, model.get_parameter(name)), name
    kept = handle.state_dict()["residuals"]
    assert set(kept) == {n for n, _ in model.named_parameters()} - set(twins)
    assert_replicas_equal(model.get_submodule("layer2"))
    assert_replicas_equal(model.get_submodule("layer0"))
    assert len({digest([part]) for part in gathered(model.get_parameter("layer1.weight"))}) == size  # each its own
    handle.detach()
    del ddp
    gc.collect()


@pytest.mark.parametrize(("scope", "momentum"), [("layer", "keep"), ("global", "move"), ("layer", "correct")])
def test_parameters_that_ddp_ignores_or_reduces_later_are_listed(worlds: Any, scope: str, momentum: str) -> None:
    worlds[2].run(case_left_to_ddp, scope=scope, momentum=momentum)


def case_all_left_to_ddp(rank: int, size: int) -> str:
    model = Chain(SIZES)
    model.get_submodule("layer3").requires_grad_(False)
    ddp = DistributedDataParallel(
        model,
        delay_all_reduce_named_params=[(name, p) for name, p in model.named_parameters() if p.requires_grad],
        param_to_hook_all_reduce=model.get_parameter("layer0.weight"),
    )
    with pytest.raises(ValueError, match="nothing to exchange") as refused:
        sparsync.attach(ddp, "topk")
    del ddp
    gc.collect()
    return str(refused.value)


def test_a_model_that_ddp_keeps_to_itself_is_refused(worlds: Any) -> None:
    worlds[2].run(case_all_left_to_ddp)
