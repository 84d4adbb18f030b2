"""Units that are gathered from buckets: gradients enter the residual as buckets come, and results go
straight into buckets; nothing else changes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.collectives.allgather import AllGather, MeanOfRows
from sparsync.collectives.base import FiniteFlag
from sparsync.compressors.base import Context, vouches
from sparsync.compressors.carried_threshold import CarriedThreshold
from sparsync.engine.bucketing import Bucket
from sparsync.kernels import cpu
from sparsync.kernels.accumulate.parts import AddedParts
from sparsync.kernels.memory import Memory
from sparsync.layout import Layout, Span
from sparsync.sparse import SparseGrad
from tests.failures.reducers import error_of, make_reducer, push_all
from tests.world import World

WIDTH, BUCKETS, STEPS = 61, 3, 6  # no multiple of a row
write_parts = MeanOfRows.write_parts
LIMIT = 60.0  # seconds; a part that is added only after backward would never come
WAYS: dict[str, dict[str, Any]] = {
    "default": {"density": 0.05},
    "topk, to be undone": {"compressor": sparsync.TopK(0.05), "scope": "global", "transactional": True},
    "balanced": {"recipe": "balanced"},
    "half precision": {"density": 0.05},
    "unused": {"density": 0.05},
}


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    pytest.importorskip("numba")


class Net(nn.Module):
    """Three matrices, each a bucket of its own; in odd steps the second may be left out."""

    def __init__(self, between: Any = None, skips: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BUCKETS))
        self.between, self.skips, self.step = between, skips, 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        for number, layer in enumerate(self.layers):
            if not (self.skips and number == 1 and self.step % 2):
                x = layer(x if number == 0 or self.between is None else Gate.apply(x, self.between)).tanh()
        return x


class Gate(torch.autograd.Function):
    """Identity whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Any) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.act()
        return grad, None


def copied(self: MeanOfRows, parts: Sequence[tuple[int, Tensor]], flag: FiniteFlag | None = None) -> bool:
    """Write a mean to a unit alone."""
    return len(parts) == 1 and write_parts(self, parts, flag)


def trained(way: str, rank: int, parts: bool, bad: bool, between: Any = None) -> list[Tensor]:
    """Return gradients of every step and residuals after the last; ``bad``: one rank's are not finite in one step."""
    least, CarriedThreshold.takes_parts, cpu.LEAST = cpu.LEAST, parts, 1
    write, MeanOfRows.write_parts = MeanOfRows.write_parts, MeanOfRows.write_parts if parts else copied
    made, begin = [0], AddedParts.__init__

    def count(self: AddedParts, *args: Any) -> None:
        made[0] += 1
        begin(self, *args)

    AddedParts.__init__ = count  # type: ignore[method-assign]
    try:
        model = Net(between, skips=way == "unused")
        model = model.to(torch.bfloat16) if way == "half precision" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.001, find_unused_parameters=way == "unused")
        handle = sparsync.attach(ddp, optimizer=optimizer, dense_below=0, **WAYS[way])
        found, rng = [], torch.Generator().manual_seed(rank)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = torch.randn(8, WIDTH, generator=rng).to(next(model.parameters()).dtype)
            x[0, 0] = torch.nan if bad and step == 3 and rank == 1 else x[0, 0]
            ddp(x).square().sum().backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            if all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None):
                optimizer.step()
        found += [handle.residual(name) for name, _ in model.named_parameters()]
        assert made[0] == (STEPS - 1 if parts else 0)  # all but the first, whatever DDP's buckets are
        handle.detach()
        del ddp
        gc.collect()
        return found
    finally:
        cpu.LEAST, CarriedThreshold.takes_parts, MeanOfRows.write_parts = least, True, write  # type: ignore[method-assign]
        AddedParts.__init__ = begin  # type: ignore[method-assign]


def case_same(rank: int, size: int, way: str, bad: bool) -> None:
    for one, two in zip(trained(way, rank, True, bad), trained(way, rank, False, bad), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "one NaN"])
@pytest.mark.parametrize("way", WAYS)
def test_parts_come_to_the_same_bits(worlds: dict[int, World], way: str, bad: bool) -> None:
    worlds[3].run(case_same, way=way, bad=bad)


def case_overlap(rank: int, size: int) -> None:
    """Backward waits, between one bucket and the next, until the first is in the residual."""
    added, changed, add, passed = [0], threading.Condition(), AddedParts.add, [0]

    def counted(self: AddedParts, *args: Any) -> None:
        add(self, *args)
        with changed:
            added[0] += bool(args[0])
            changed.notify_all()

    def between() -> None:
        step, number = divmod(passed[0], BUCKETS - 1)
        passed[0] += 1
        if step > 0:
            expected = (step - 1) * BUCKETS + number + 1
            with changed:
                assert changed.wait_for(lambda: added[0] >= expected, LIMIT), (added, expected)

    AddedParts.add = counted  # type: ignore[method-assign]
    try:
        trained("default", rank, True, False, between)
    finally:
        AddedParts.add = add  # type: ignore[method-assign]
    assert added[0] == (STEPS - 1) * BUCKETS


def test_a_bucket_enters_the_residual_before_the_next_exists(worlds: dict[int, World]) -> None:
    worlds[2].run(case_overlap)


def case_fails(rank: int, size: int) -> str:
    """One rank cannot add a part."""
    add, calls = AddedParts._add, [0]

    def broken(self: AddedParts, *args: Any) -> None:
        calls[0] += 1
        if rank == 1 and calls[0] == 2:
            raise MemoryError("no room")
        add(self, *args)

    AddedParts._add = broken  # type: ignore[method-assign]
    try:
        trained("default", rank, True, False)
    except Exception as error:
        return str(error)
    finally:
        AddedParts._add = add  # type: ignore[method-assign]
    return "nothing went wrong"


def test_all_ranks_hear_of_a_part_that_was_not_added() -> None:
    for finished, said in World.once(3, case_fails):
        assert finished
        assert "rank 1: failed to compress global float32: MemoryError: no room" in said


def case_kept(rank: int, size: int, transactional: bool) -> None:
    """One rank cannot add the last of three parts: all keep what has come in, or what they had before the step."""
    add, least, cpu.LEAST = AddedParts._add, cpu.LEAST, 1
    data, parameters = torch.Generator().manual_seed(rank), {name: torch.zeros(90, 7) for name in "abc"}

    def gradients() -> list[tuple[str, Tensor]]:  # whole numbers: sums are exact in any order
        return [(name, torch.randint(-9, 10, (630,), generator=data).float()) for name in parameters]

    def broken(self: AddedParts, names: Sequence[str], *args: Any) -> None:
        if rank == 1 and "c" in names:
            raise MemoryError("no room")
        add(self, names, *args)

    try:
        reducer = make_reducer(parameters, sparsync.TopK(), scope="global", transactional=transactional)
        for _ in range(2):
            push_all(reducer, gradients())
        before, came = reducer.state_dict()["residuals"], gradients()
        AddedParts._add = broken  # type: ignore[method-assign]
        kind, said = error_of(push_all, reducer, came)
        assert "failed to compress global float32: MemoryError: no room" in said, (kind, said)
        after = reducer.state_dict()["residuals"]
        for name, grad in came:
            missing = transactional or (rank, name) == (1, "c")
            assert torch.equal(after[name], before[name] + (0 if missing else grad.view(90, 7))), name
        reducer.close()
    finally:
        cpu.LEAST, AddedParts._add = least, add  # type: ignore[method-assign]


@pytest.mark.parametrize("transactional", [False, True], ids=["kept", "undone"])
def test_the_residual_is_one_steps_after_parts_were_added_to_it(worlds: dict[int, World], transactional: bool) -> None:
    worlds[3].run(case_kept, transactional=transactional)


def test_what_no_part_brings_counts_as_it_is_in_the_whole() -> None:
    """Parts in any order, one of them unused, one missing."""
    spans = [Span("a", 0, 100), Span("b", 100, 61), Span("c", 161, 64)]
    (segment,) = Layout.cut(spans, numel=225, scope="global", density=0.1).segments
    before, whole = torch.randn(225), torch.randn(225)
    memory = Memory(before, torch.full((225,), torch.nan))
    whole[165] = torch.inf
    added = AddedParts(memory, segment, 0)
    added.add(["c"], [whole[161:]], frozenset())
    added.add(["b"], [torch.zeros(61)], frozenset(["b"]))
    rows, bad = added.finish(whole)
    expected = before + whole
    expected[100:161], expected[165] = before[100:161], before[165]
    assert torch.equal(memory.after, expected)
    assert bad == 165
    assert [(int(a), int(b)) for a, b in zip(rows.start, rows.stop, strict=True)] == [
        (0, 64), (64, 100), (100, 161), (161, 225),
    ]  # fmt: skip
    assert rows.peak[2] == 0
    assert rows.peak[0] == expected[:64].abs().max()


@dataclass(frozen=True)
class Halves(sparsync.TopK):
    """Sends half of every gradient."""

    def compress(self, grad: Tensor, *rest: Any) -> SparseGrad:
        return super().compress(grad / 2, *rest)


def test_a_compressor_of_ones_own_is_given_the_gradient(worlds: dict[int, World]) -> None:
    """Though it is derived from one that works on parts."""
    worlds[2].run(case_own)


def case_own(rank: int, size: int) -> None:
    whole, half = (steps_by(kind(0.05)) for kind in (sparsync.TopK, Halves))
    for one, two in zip(whole, half, strict=True):
        assert torch.equal(one, 2 * two)


def steps_by(compressor: Any) -> list[Tensor]:
    """Return what a few steps have found and left of gradients that are the same in every step."""
    least, cpu.LEAST = cpu.LEAST, 1
    try:
        reducer, found = make_reducer({"a": torch.zeros(60, 61)}, compressor, scope="global"), []
        for step in range(4):
            buffer = torch.randn(60 * 61, generator=torch.Generator().manual_seed(step))
            found.append(reducer.push(Bucket(0, buffer, ("a",), True)).wait())
        found += reducer.state_dict()["residuals"].values()
        reducer.close()
        return found
    finally:
        cpu.LEAST = least


def test_who_vouches_for_a_method() -> None:
    """A class that defines it anew does so by itself."""
    safe = type("Safe", (Halves,), {"graph_safe": True})(0.05)
    assert vouches(sparsync.TopK(0.05), "graph_safe", "compress", "launch")
    assert not vouches(Halves(0.05), "graph_safe", "compress", "launch")
    assert vouches(safe, "graph_safe", "compress", "launch")
    assert not vouches(type("Other", (AllGather,), {"reduce": AllGather.reduce})(), "graph_safe", "reduce")
    assert not vouches(sparsync.DGCK(0.05), "graph_safe", "compress")


def test_what_nobody_used_leaves_thresholds_alone() -> None:
    """As a rank that has no data, and keeps what it has: added in parts or as a whole."""
    compressor, spans = sparsync.ThresholdK(0.05), [Span("a", 0, 700), Span("b", 700, 300)]
    layout = Layout.cut(spans, numel=1000, scope="global", density=0.05)
    state, (segment,) = compressor.init(layout), layout.segments
    memory = Memory(residual := torch.randn(1000), residual)
    compressor.compress(torch.randn(1000), memory, layout, Context(), state)
    known, kept = {name: int(value) for name, value in state[segment.name].items()}, residual.clone()
    added = AddedParts(memory, segment, compressor.low(segment, state))
    added.add(["a", "b"], [torch.zeros(700), torch.zeros(300)], frozenset("ab"))
    for how in (None, added):
        ctx = Context(1, unused=frozenset("ab"), added=how)
        sent = compressor.compress(torch.zeros(1000), memory, layout, ctx, state)
        assert int(sent.count) == 0
        assert {name: int(value) for name, value in state[segment.name].items()} == known, how
    assert torch.equal(residual, kept)
