"""Finite gradients at the end of their dtype's range: nothing becomes infinite, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.config import resolve
from sparsync.layout import Parameter
from sparsync.simulate.exchange import VirtualExchange
from tests.failures.checked_training import assert_same_on_all_ranks, mean_over_ranks
from tests.failures.reducers import make_reducer, push_all
from tests.methods import COLLECTIVES, PAIRS, make

LARGE = 3e38  # of fp32's 3.4e38
ULP = 2.0**104  # of fp32's largest numbers
SIZES = {"a": 300, "b": 41}
BLOCKS = ("block", "balanced", ("fp32", "fp16", "bf16", "sign", "levels"))
# (compressor, collective, value codec), every one that goes together
EVERY = [(name, collective, values) for name, collective, codecs in [*PAIRS, BLOCKS] for values in codecs]
IDS = ["-".join(method) for method in EVERY]
# Of these some that differ in how sums are made and what comes home.
SOME = [
    ("topk", "allgather", "fp32"),
    ("threshold", "allgather", "levels"),
    ("block", "balanced", "sign"),
    ("topk", "balanced", "bf16"),
    ("topk", "gtopk", "fp32"),
    ("random", "shared", "bf16"),
    ("none", "dense", "bf16"),
]
SOME_IDS = ["-".join(method) for method in SOME]


def huge(kind: str, size: float, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Gradients of that size: all of them, with any sign, or a few among small ones."""
    rng = torch.Generator().manual_seed(seed)
    signs = torch.randn(numel, generator=rng).sign()
    if kind == "all":
        signs = signs.abs()
    if kind == "few":
        signs = torch.where(torch.rand(numel, generator=rng) < 0.1, signs, 1e-30 * signs)
    return (size * signs.double()).to(dtype)


class Team:
    """Three virtual workers, whose law 1 is checked in every step."""

    def __init__(self, name: str, collective: str, values: str, dtype: torch.dtype, workers: int = 3) -> None:
        plan = resolve(compressor=make(name, 0.1), collective=COLLECTIVES[collective], values=values, scope="layer")
        parameters = [Parameter.of(n, torch.zeros(size, dtype=dtype)) for n, size in SIZES.items()]
        self.exchange = VirtualExchange(plan, parameters, frozenset(), workers, torch.device("cpu"))
        self.places = {p.name: self.exchange.place(p) for p in parameters}

    def kept(self, name: str) -> Tensor:
        """Return the sum of what all workers keep; it is finite."""
        found = [worker.feedback.residual(name) for worker in self.exchange.workers]
        kept = [residual for residual in found if residual is not None]
        assert all(residual.isfinite().all() for residual in kept), f"a residual of {name} is not finite"
        return torch.stack(kept).double().sum(0) if kept else torch.zeros(SIZES[name]).double()

    def step(self, make: Any, error: float) -> None:
        """Make a step; ``make(name, rank)``: gradients. Unless it was bad, what came in is there but for ``error``."""
        before, came = {name: self.kept(name) for name in SIZES}, dict[str, Tensor]()
        for name, (rows, _) in self.places.items():
            for rank, row in enumerate(rows):
                row.copy_(make(name, rank))
            came[name] = torch.stack(rows).double().sum(0)
        bad = self.exchange.tally.bad_steps
        with torch.no_grad():
            self.exchange.reduce()
        for name, (rows, mean) in self.places.items():
            after = self.kept(name)
            if self.exchange.tally.bad_steps == bad:
                assert mean.isfinite().all()
                lost = before[name] + came[name] - after - mean.double() * len(rows)
                assert lost.abs().max() <= error, (name, lost.abs().max())


@pytest.mark.each_pair
@pytest.mark.parametrize(
    ("kind", "dtype"), [("all", torch.float32), ("signs", torch.float32), ("few", torch.bfloat16)], ids=str
)
@pytest.mark.parametrize(("name", "collective", "values"), EVERY, ids=IDS)
def test_sums_of_the_largest_numbers_saturate(name, collective, values, dtype, kind):
    """One step of them is good, and so are those that follow; what does not travel stays."""
    team = Team(name, collective, values, dtype)
    # What comes home is added, which rounds at most to the last bit; what travels is exact but for the mean's dtype.
    error = 8 * ULP if collective in ("balanced", "gtopk", "every other") else 8 * ULP * torch.finfo(dtype).eps
    if name == "none" and values == "fp32":  # which is DDP's own sum, and rounds as that does
        error = 8 * LARGE * torch.finfo(dtype).eps
    for step in range(4):
        size = LARGE if step == 0 else 1e-30
        team.step(lambda n, rank, step=step, size=size: huge(kind, size, SIZES[n], dtype, 100 * step + rank), error)
    assert team.exchange.tally.bad_steps == 0


@pytest.mark.each_pair
@pytest.mark.parametrize(("name", "collective", "values"), EVERY, ids=IDS)
def test_no_residual_becomes_infinite(name, collective, values):
    """However often they come: a gradient that finds no room stays out, and the step is bad; later ones are good."""
    team, numbers = Team(name, collective, values, torch.float32), iter(range(10**6))
    for largest in 2 * [LARGE, torch.finfo(torch.float32).max]:
        team.step(lambda n, rank, size=largest: huge("signs", size, SIZES[n], torch.float32, next(numbers)), 1e39)
    bad = team.exchange.tally.bad_steps
    for _ in range(3):
        team.step(lambda n, rank: huge("signs", 1.0, SIZES[n], torch.float32, next(numbers)), 1e39)
    assert team.exchange.tally.bad_steps == bad


@pytest.mark.parametrize(("name", "collective", "values"), SOME, ids=SOME_IDS)
def test_the_largest_numbers_of_double_precision(name, collective, values):
    team = Team(name, collective, values, torch.float64)
    for step, size in enumerate([1.7e308, 1.0, 1.0]):
        for n, (rows, _) in team.places.items():
            for rank, row in enumerate(rows):
                row.copy_(huge("signs", size, SIZES[n], torch.float64, 10 * step + rank))
        with torch.no_grad():
            team.exchange.reduce()
        for n, (_, mean) in team.places.items():
            team.kept(n)
            assert mean.isfinite().all()
    assert team.exchange.tally.bad_steps == 0


@pytest.mark.each_pair
@pytest.mark.parametrize("kind", ["all", "signs"])
@pytest.mark.parametrize(("name", "collective", "values"), EVERY, ids=IDS)
def test_half_precision_means_stay_in_range(name, collective, values, kind):
    """Gradients of 40,000 that wait a step or more make more than fp16's 65,504."""
    team = Team(name, collective, values, torch.float16)
    for step in range(14):
        size = 40_000 if step < 8 else 0.0
        # The cast of a mean rounds, to 1/32 of 32 at most; sums of the backend in bf16 do so to 1/256, step by step.
        error = 3 * 3 * 65_504 / 256 if values == "bf16" and collective in ("dense", "shared") else 3 * 32
        team.step(lambda n, rank, size=size: huge(kind, size, SIZES[n], torch.float16, 7 * rank), error)
    assert team.exchange.tally.bad_steps == 0


def case_half(rank: int, size: int, name: str, collective: str, values: str, momentum: bool) -> None:
    """Push gradients of 40,000, the same on every rank: results are finite and exact, and in the end all is applied."""
    dtype, options = torch.float16, {"density": lambda step: 0.3}
    if momentum:
        options |= {"momentum": "correct", "beta": 0.5, "masking": False}
    tensors = {"w": torch.zeros(60, 1, dtype=dtype), "b": torch.zeros(7, dtype=dtype)}
    compressor, kind = make(name, 0.3), COLLECTIVES[collective]
    reducer = make_reducer(tensors, compressor, kind, values=values, dense_names=frozenset({"b"}), **options)
    came, applied, velocity = 0.0, [torch.zeros(60).double(), torch.zeros(7).double()], 0.0
    for step in range(40):
        gradient = 40_000.0 if step < 4 else 0.0
        velocity = velocity / 2 + gradient if momentum else gradient
        came += velocity
        pushed = [(n, torch.full((t.numel(),), gradient, dtype=dtype)) for n, t in tensors.items()]
        results = push_all(reducer, pushed)
        for total, result in zip(applied, results, strict=True):
            assert result.isfinite().all(), (step, result)
            total += result.double()
        assert_same_on_all_ranks(results)
        for n, total in zip(tensors, applied, strict=True):
            residual = reducer.residual(n)
            kept = torch.zeros_like(total) if residual is None else mean_over_ranks(residual).view(-1)
            rounding = 0.0 if values == "fp32" and not momentum else 2e-2 if collective == "shared" else 2e-3
            torch.testing.assert_close(total + kept, torch.full_like(total, came), rtol=rounding, atol=0)
    assert not reducer.completion.bad
    if name == "topk" and values == "fp32":
        torch.testing.assert_close(applied[0], torch.full_like(applied[0], came), rtol=2e-3, atol=0)
    reducer.close()


@pytest.mark.each_pair
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("momentum", [False, True], ids=["plain", "corrected"])
@pytest.mark.parametrize(("name", "collective", "values"), SOME, ids=SOME_IDS)
def test_half_precision_gradients_that_add_up_beyond_their_range(worlds, name, collective, values, momentum, size):
    """Tensors that travel dense as well: with momentum before the residual they add up, too."""
    worlds[size].run(case_half, name=name, collective=collective, values=values, momentum=momentum)


def case_large(rank: int, size: int, name: str, collective: str, values: str) -> bool:
    """Push the largest numbers, then small ones; return whether any step was bad."""
    reducer = make_reducer({"w": torch.zeros(300, 1)}, make(name, 0.1), COLLECTIVES[collective], values=values)
    bad = False
    for step in range(4):
        gradient = huge("signs", LARGE if step == 0 else 1.0, 300, torch.float32, 10 * step + rank)
        (result,) = push_all(reducer, [("w", gradient)])
        residual = reducer.residual("w")
        assert residual is None or residual.isfinite().all()
        assert_same_on_all_ranks([result])
        bad = bad or not bool(result.isfinite().all())
    reducer.close()
    return bad


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("name", "collective", "values"), SOME, ids=SOME_IDS)
def test_the_largest_numbers_in_processes(worlds, name, collective, values, size):
    assert worlds[size].run(case_large, name=name, collective=collective, values=values) == size * [False]


class Constant(nn.Module):
    """A model whose gradients are all 40,000, in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40, 50, dtype=torch.float16))
        self.bias = nn.Parameter(torch.zeros(50, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.weight.float().sum() + self.bias.float().sum())


def case_half_model(rank: int, size: int) -> None:
    """Train a model of half precision as everybody writes it, in steps so small that weights stay in range."""
    model = Constant()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-20)
    handle = sparsync.attach(ddp, "topk", density=0.2, optimizer=optimizer, momentum="keep")
    applied = torch.zeros(40, 50).double()
    for step in range(60):
        optimizer.zero_grad()
        ddp(torch.tensor(40_000.0 if step < 5 else 0.0)).backward()
        handle.check()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        applied += model.weight.grad.double()
        optimizer.step()
    assert torch.equal(applied, torch.full((40, 50), 200_000.0).double())
    assert not handle.residual("weight").any()
    assert_same_on_all_ranks(list(model.parameters()))
    handle.detach()
    del ddp
    dist.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_a_model_of_half_precision_recovers_from_large_gradients(worlds, size):
    worlds[size].run(case_half_model)


class Slope(nn.Module):
    """A model whose gradients are all of one size but for their signs, in the dtype that is asked for. Those of all
    biases but the first are multiplied by ``turn``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(5)
        self.weight = nn.Parameter(torch.zeros(40, 50, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(50, dtype=dtype))
        self.register_buffer("signs", torch.randn(40, 50, generator=rng).sign())

    def forward(self, size: float, turn: int) -> Tensor:
        bias = self.bias.float()
        return size * ((self.weight.float() * self.signs).sum() + bias[0] + turn * bias[1:].sum())


def case_preconditioned(rank: int, size: int, dtype: torch.dtype, turn: int) -> list[Tensor]:
    """Train with AdamW whose update is exchanged; gradients are large enough that their norm is not in fp16's range."""
    ddp = DistributedDataParallel(Slope(dtype))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=2.0**-10, weight_decay=0.0)
    handle = sparsync.attach(ddp, "topk", density=0.01, optimizer=optimizer, precondition=True)
    for step in range(6):
        optimizer.zero_grad()
        ddp(40_000.0 - 1_000 * rank, turn**step).backward()
        handle.check()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in ddp.parameters())
        optimizer.step()
    weights = [p.detach().float().clone() for p in ddp.parameters()]
    assert_same_on_all_ranks(weights)
    handle.detach()
    del ddp
    return weights


def assert_updates_are_those_of_single_precision(world: Any, turn: int) -> None:
    (half, *_), (single, *_) = (
        world.run(case_preconditioned, dtype=dtype, turn=turn) for dtype in (torch.float16, torch.float32)
    )
    for ours, theirs in zip(half, single, strict=True):
        assert theirs.any()
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_preconditioned_means_in_half_precision_stay_in_range(worlds, size):
    """The norm that gradients show is as large as there is room for; the update is that of single precision."""
    assert_updates_are_those_of_single_precision(worlds[size], turn=1)


def test_updates_that_travel_dense_are_shown_within_fp16(worlds):
    """Where momentum leaves little but one entry, that would show the norm of all."""
    assert_updates_are_those_of_single_precision(worlds[2], turn=-1)
