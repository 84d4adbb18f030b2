"""Ranks with another configuration, another model, or another order of buckets."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import AllGather, Balanced, GTopK, Mismatch
from sparsync.engine.bucketing import Bucket
from tests.failures.checked_training import inputs, mlp, train
from tests.failures.reducers import error_of, make_reducer, push_all
from tests.world import World


class Renamed(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(40, 60, bias=False))


def case_other_configuration(rank: int, size: int, usual: dict[str, Any], odd: dict[str, Any]) -> Any:
    ddp = DistributedDataParallel(mlp())
    usual, odd = ({"optimizer": torch.optim.SGD(ddp.parameters(), lr=0.1)} | options for options in (usual, odd))
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
        ({"clip": 1.0}, "clip=1.0"),
        ({"momentum": "move"}, "momentum=move"),
        ({"beta": 0.7, "momentum": "correct"}, "Correction(beta=0.7"),
        ({"masking": False, "momentum": "correct"}, "masking=False"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_configuration_on_one_rank_is_named(worlds, odd, says):
    usual = {
        "compressor": "topk",
        "density": 0.01,
        "momentum": "correct" if odd.get("momentum") == "correct" else "keep",
    }
    answers = worlds[3].run(case_other_configuration, usual=usual, odd=usual | odd)
    assert len(set(answers)) == 1
    kind, text = answers[0]
    assert kind == Mismatch.__name__
    assert "configuration differs on rank 1" in text
    assert says in text


def test_another_model_on_one_rank_is_named(worlds):
    answers = worlds[3].run(case_other_names)
    assert len(set(answers)) == 1
    kind, text = answers[0]
    assert kind == Mismatch.__name__
    assert "model differs on rank 1" in text
    assert "'one.weight'" in text
    assert "'two.weight'" in text


def case_other_exchange(rank: int, size: int, collective: Any) -> Any:
    """Rank 1 has made an exchange more than the others, of the same unit and layout."""
    gradient = torch.arange(100.0)
    reducer = make_reducer({"a": gradient.view(-1, 1)}, collective=collective, deadline=6.0)
    for _ in range(2):
        push_all(reducer, [("a", gradient)])
    reducer.channel.sequence += rank == 1
    error_of(push_all, reducer, [("a", gradient)])
    answer = error_of(reducer.check)
    reducer.close()
    return answer


@pytest.mark.parametrize("collective", [AllGather(), GTopK(), Balanced()], ids=["allgather", "gtopk", "balanced"])
def test_another_number_of_exchanges_on_one_rank_is_an_error(collective):
    """All else in the headers is the same: only the sequence number tells that steps are mixed."""
    answers = World.once(2, case_other_exchange, collective=collective)
    assert all(finished for finished, _ in answers), answers
    assert answers[0] == answers[1]
    kind, text = answers[0][1]
    assert kind == Mismatch.__name__
    assert "their sequence differs" in text


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
        pytest.param((100, 300), 0, "parameters", marks=pytest.mark.slow),
        pytest.param((100, 100), 2, "buckets", marks=pytest.mark.slow),
        ((100, 300), 2, "buckets"),
        pytest.param((100, 100), 2, "parameters", marks=pytest.mark.slow),
    ],
)
def test_another_order_of_buckets_on_one_rank_is_an_error(numel, good_steps, swap):
    answers = World.once(2, case_other_order, numel=numel, good_steps=good_steps, swap=swap)
    assert all(finished for finished, _ in answers), answers
    assert answers[0] == answers[1]
    kind, text = answers[0][1]
    assert kind == Mismatch.__name__
    assert "differs" in text
