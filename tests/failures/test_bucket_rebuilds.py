"""DDP groups parameters into buckets, and groups them anew after the first steps."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from sparsync import AllGather, TopK
from sparsync.collectives import Channel
from sparsync.engine.bucketing import Bucket
from sparsync.layout import Parameter
from sparsync.schedule import Constant
from sparsync.wire import Wire
from tests.failures.ddp_training import (
    ALL_SPARSE,
    SIZES,
    SMALL_BUCKETS,
    SQUARE,
    Chain,
    ErrorFeedbackReference,
    loss_of,
    training,
)
from tests.methods import reducer_of


def case_against_reference(rank: int, size: int, sizes: tuple[int, ...], ddp: dict[str, Any], bias: bool) -> list[Any]:
    model = Chain(sizes, bias)
    reference, buckets = ErrorFeedbackReference(model, 0.05), []
    with training(model, TopK(0.05), ddp, **ALL_SPARSE) as run:
        for step in range(5):
            run.step(lambda m, step=step: loss_of(m, rank, step))
            reference.step(lambda m, step=step: loss_of(m, rank, step))
            reference.assert_same(run)
            buckets.append(run.buckets())
    return buckets


@pytest.mark.parametrize("size", [2, 3])
def test_residuals_survive_a_rebuild_into_buckets_of_other_sizes(worlds: Any, size: int) -> None:
    """Regrouped into buckets of other sizes, every parameter still has its own residual."""
    for first, second, *later in worlds[size].run(case_against_reference, sizes=SIZES, ddp=SMALL_BUCKETS, bias=True):
        assert len(first) == 1
        assert len(second) > 2
        assert all(buckets == second for buckets in later)


@pytest.mark.parametrize("ddp", [{}, {"gradient_as_bucket_view": True}], ids=["copies", "views"])
def test_residuals_follow_their_parameters_when_equal_sizes_are_reversed(worlds: Any, ddp: dict[str, Any]) -> None:
    """The same bucket with equal parameters in reversed order: nothing but the name tells them apart."""
    for first, second, *_ in worlds[2].run(case_against_reference, sizes=SQUARE, ddp=ddp, bias=False):
        assert len(first) == 1
        assert first[0] == second[0][::-1]


def test_a_rebuild_may_come_late_or_never(worlds: Any) -> None:
    """``static_graph`` regroups at another step and ``find_unused_parameters`` never: no warm-up is relied on."""
    for mode, first_change in (("static_graph", 2), ("find_unused_parameters", None)):
        for buckets in worlds[2].run(case_against_reference, sizes=SIZES, ddp=SMALL_BUCKETS | {mode: True}, bias=True):
            changes = [i for i in range(1, len(buckets)) if buckets[i] != buckets[i - 1]]
            assert changes == ([] if first_change is None else [first_change]), mode


@dataclass(frozen=True)
class MeasuresMemory(TopK):
    """Notes the peak of memory allocated inside ``compress`` beyond what was there."""

    def compress(self, *args: Any) -> Any:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            sent = super().compress(*args)
        events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
        held = peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            held += event.nbytes()
            peak = max(peak, held)
        PEAKS.append(peak)
        return sent


PEAKS: list[int] = []


def case_one_bucket(rank: int, size: int, width: int) -> int:
    model = Chain((width, width))
    with training(model, MeasuresMemory(0.001)) as run:
        PEAKS.clear()
        run.step(lambda m: loss_of(m, rank, 0))
        assert run.buckets() == [("layer0.weight",)]
    return max(PEAKS)


def test_a_bucket_that_holds_the_whole_model_is_not_copied(worlds: Any) -> None:
    """Compressing a bucket takes a few chunks and a summary of its rows, not a copy of the bucket."""
    for peak in worlds[2].run(case_one_bucket, width=2048):
        assert 0 < peak < 2048**2 * 4 / 2  # bytes; a copy would be twice that


@pytest.mark.parametrize("scope", ["global", "bucket"])
def test_buffers_of_old_buckets_are_freed(scope):
    """DDP regroups its buckets, perhaps into fewer."""
    parameters = [Parameter.of(name, torch.zeros(100)) for name in "abc"]
    channel = Channel(None, Wire(), 20.0, torch.device("cpu"))
    reducer = reducer_of(parameters, TopK(0.1), AllGather(), channel, scope=scope, density=Constant(0.1))
    buffers = [torch.randn(100) for _ in parameters]
    old = [weakref.ref(buffer) for buffer in buffers]
    futures = [reducer.push(Bucket(i, b, (n,), i == 2)) for i, (b, n) in enumerate(zip(buffers, "abc", strict=True))]
    for future in futures:
        future.wait()
    del buffers, futures, future
    for _ in range(3):
        reducer.push(Bucket(0, torch.randn(300), ("a", "b", "c"), True)).wait()
    gc.collect()
    assert [ref() for ref in old] == [None] * 3
