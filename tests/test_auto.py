"""Trainings that change between dense and sparse steps: nothing is lost, ranks change together, and the rule stays."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.engine.auto_policy import AutoPolicy, Figures
from sparsync.engine.dense_step import DRAIN
from sparsync.kernels import cpu, mean_velocity
from sparsync.kernels.mean_velocity import reference
from sparsync.simulate import VirtualWorkers
from tests.models import loss_of, net, weights
from tests.world import World

DENSE = "dense bf16"


class Script(AutoPolicy):
    """Changes at given steps, whatever steps take."""

    def __init__(self, names: Any, changes: dict[int, str]) -> None:
        super().__init__(list(names))
        self.changes, self.step = changes, 0

    @property
    def counts(self) -> bool:
        return True

    def advance(self) -> bool:
        self.step += 1
        return self.step in self.changes

    def wants_probe(self, step: int) -> bool:
        return False

    def decide(self, step: int, figures: Figures) -> None:
        self.current, self.settled = self.changes[self.step], True
        self.drains = self.current == DENSE


class Given(nn.Module):
    """Parameters whose gradients are given: multiples of 1/8, of which bf16 holds every sum exactly."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.zeros(shape) for shape in ((60, 50), (50,), (70, 40), (40,), (90, 33)))
        self.rank = rank

    def gradients(self, step: int) -> list[Tensor]:
        rng = torch.Generator().manual_seed(1000 * step + self.rank)
        return [(torch.randint(-16, 17, p.shape, generator=rng) / 8).to(p.device) for p in self.tensors]

    def forward(self, step: int) -> Tensor:
        return sum((p * g).sum() for p, g in zip(self.tensors, self.gradients(step), strict=True))


def law_case(rank: int, size: int, momentum: float, way: str, device: str = "cpu") -> tuple[Any, ...]:
    """Go dense, sparse, dense, sparse, dense; return what was applied and kept, and what came in, of each tensor."""
    model = Given(rank).to(device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    options = {"masking": False} if momentum else {}
    sync = sparsync.attach(ddp, "auto", optimizer=optimizer, budget=1 / 30, total_steps=20, **options)
    assert sync._auto is not None
    sync._auto.policy = Script(sync._auto.policy.names, {3: way, 9: DENSE, 12: way, 18: DENSE})
    applied = [torch.zeros_like(p) for p in model.tensors]
    came, kept_most, log = [torch.zeros_like(p) for p in model.tensors], 0.0, []
    for step in range(18 + DRAIN + 2):
        optimizer.zero_grad()
        ddp(step).backward()
        log.append(sync._auto.policy.current)
        for total, own, p, g in zip(applied, came, model.tensors, model.gradients(step), strict=True):
            assert p.grad is not None
            total += p.grad
            own += g
        optimizer.step()
        kept = [sync.residual(f"tensors.{n}") for n in range(len(applied))]
        kept_most = max([kept_most, *(float(r.abs().max()) for r in kept if r is not None)])
    velocities = [sync.velocity(f"tensors.{n}") for n in range(len(applied))] if momentum else []
    sync.detach()
    found = [[None if t is None else t.cpu() for t in tensors] for tensors in (applied, came, kept, velocities)]
    return *found, kept_most, log, weights(model).cpu()


@pytest.mark.parametrize(
    ("size", "momentum", "way"),
    [(2, 0.0, "default"), (3, 0.9, "default"), (5, 0.9, "default in buckets"), (2, 0.9, "balanced")],
)
def test_nothing_is_lost_on_the_way_between_dense_and_sparse(
    worlds: dict[int, World], size: int, momentum: float, way: str
) -> None:
    """What was applied is what came in: under momentum of 0.5 twice the gradient, less what velocities still hold."""
    assert_law(worlds[size].run(law_case, momentum=momentum, way=way), momentum, way)


def assert_law(ranks: list[Any], momentum: float, way: str) -> None:
    """Compare what ``law_case`` returned on every rank."""
    size, (applied, _, _, _, kept_most, log, after) = len(ranks), ranks[0]
    assert log == 3 * [DENSE] + 6 * [way] + 3 * [DENSE] + 6 * [way] + (DRAIN + 2) * [DENSE]
    assert kept_most > 2  # so that there is something to lose
    for other in ranks[1:]:
        assert torch.equal(after, other[-1])
        assert other[5] == log
        for mine, theirs in zip(applied, other[0], strict=True):
            assert torch.equal(mine, theirs)
    for n, total in enumerate(applied):
        came = sum(rank[1][n] for rank in ranks) / size
        kept = [rank[2][n] for rank in ranks]
        assert all(r is None or not r.any() for r in kept)  # all of it was sent
        speed = ranks[0][3][n] if momentum else 0
        torch.testing.assert_close(total + speed, came * (2 if momentum else 1), rtol=0, atol=2e-4)


def drain_case(rank: int, size: int, optimizer: str, drains: bool) -> tuple[Any, ...]:
    """Train sparse, then dense; return the weights after every dense step, and what was kept before them. Gradients do
    not depend on weights: so two trainings differ by what is drained alone."""
    model = Given(rank)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    made = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0) if optimizer == "adamw" else None
    made = made or torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    sync = sparsync.attach(ddp, recipe="auto", optimizer=made)
    assert sync._auto is not None
    sync._auto.policy = Script(sync._auto.policy.names, {2: "default", 12: DENSE})
    if not drains:
        sync._auto._dense.drain = lambda: None  # type: ignore[method-assign]
    after, kept = [], []
    for step in range(12 + DRAIN + 2):
        if step == 12:
            for name, p in model.named_parameters():
                residual = sync.residual(name)
                # Of 1-D tensors Adam's keep what bf16 cut off, in units of the gradient.
                alone = residual is None or (optimizer == "adamw" and p.dim() < 2)
                kept.append(torch.zeros(p.numel()) if alone else residual.flatten().clone())  # type: ignore[union-attr]
        made.zero_grad()
        ddp(step).backward()
        made.step()
        if step >= 12:
            after.append(weights(model))
    sync.detach()
    return after, torch.cat(kept)


@pytest.mark.parametrize(("size", "optimizer"), [(2, "sgd"), (3, "adamw"), (2, "adamw")])
def test_what_is_kept_is_sent_in_equal_parts(worlds: dict[int, World], size: int, optimizer: str) -> None:
    """Beside the same training that drains nothing, weights move by the mean of what was kept, an eighth a step."""
    with_drain = worlds[size].run(drain_case, optimizer=optimizer, drains=True)
    without = worlds[size].run(drain_case, optimizer=optimizer, drains=False)
    mean = sum(rank[1] for rank in with_drain) / size
    assert float(mean.abs().max()) > 1e-3
    rate = 1.0 if optimizer == "adamw" else 0.02 * 5  # an update is in its residual with its rate
    for other in with_drain[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(with_drain[0][0], other[0], strict=True))
    for step in range(DRAIN + 2):
        moved = (without[0][0][step] - with_drain[0][0][step]) / rate
        expected = mean * min(1.0, (step + 1) / DRAIN)
        torch.testing.assert_close(moved, expected, rtol=1e-3, atol=2e-4 * float(mean.abs().max()))


def training_case(
    rank: int, size: int, optimizer: str, slow: int | None = None, changes: Any = None
) -> tuple[Any, ...]:
    model = net(width=48)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    if optimizer == "adamw":
        made: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    else:
        made = torch.optim.SGD(model.parameters(), lr=0.06, momentum=0.9)
    sync = sparsync.attach(ddp, "auto", optimizer=made, total_steps=100)
    assert sync._auto is not None
    if changes is not None:
        sync._auto.policy = Script(sync._auto.policy.names, changes)
    losses, log = [], []
    for step in range(110):
        if rank == slow:
            time.sleep(0.004)
        made.zero_grad()
        loss = loss_of(ddp, rank, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        made.step()
        losses.append(loss.item())
        log.append(sync._auto.policy.current)
    told = sync.describe()
    sync.detach()
    return losses, log, weights(model), told


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_loss_does_not_jump(worlds: dict[int, World], optimizer: str) -> None:
    ranks = worlds[3].run(training_case, optimizer=optimizer, changes={10: "default", 60: DENSE})
    losses = torch.tensor([rank[0] for rank in ranks]).mean(0)
    before = losses[48:60].mean()
    assert losses[:8].mean() > 1.3 * before  # it learns
    assert losses[60 : 60 + DRAIN + 4].mean() < 1.05 * before
    assert losses[60 : 60 + DRAIN + 4].max() < 1.25 * losses[48:60].max()
    assert losses[-10:].mean() < before
    assert all(torch.equal(ranks[0][2], rank[2]) for rank in ranks)


@pytest.mark.parametrize(
    ("size", "optimizer", "slow"), [pytest.param(2, "adamw", None, marks=pytest.mark.slow), (3, "sgd", 1)]
)
def test_where_nothing_is_gained_steps_are_dense(
    worlds: dict[int, World], size: int, optimizer: str, slow: int | None
) -> None:
    """A small model without a network: what steps take is measured on the spot, on all ranks alike."""
    ranks = worlds[size].run(training_case, optimizer=optimizer, slow=slow)
    log = ranks[0][1]
    assert all(rank[1] == log for rank in ranks)
    assert set(log) > {DENSE, "default"}
    assert log[-10:] == 10 * [DENSE]
    assert all(torch.equal(ranks[0][2], rank[2]) for rank in ranks)
    assert "auto         dense bf16" in ranks[0][3]
    assert "compressor   none: every entry" in ranks[0][3]
    assert "decision 1   step " in ranks[0][3]
    assert "default " in ranks[0][3].split("decision 1")[1]


def resume_case(rank: int, size: int, on: str, optimizer: str) -> tuple[Any, ...]:
    """Train 30 steps at once, and 15 and 15 with a checkpoint in between."""
    found = []
    for parts in (1, 2):
        model = net(width=48)
        state, told = None, []
        for part in range(parts):
            ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
            if optimizer == "adamw":
                made: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
            else:
                made = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
            sync = sparsync.attach(ddp, "auto", optimizer=made, total_steps=100)
            assert sync._auto is not None
            script = Script(sync._auto.policy.names, {3: "default"} if on == "default" else {3: "default", 6: DENSE})
            if part == 0:
                sync._auto.policy = script
            else:
                assert state is not None
                sync.load_state_dict(state)
            for step in range(part * 15, part * 15 + 30 // parts):
                made.zero_grad()
                loss_of(ddp, rank, step).backward()
                made.step()
            told.append(sync._auto.policy.current)
            state = sync.state_dict()
            sync.detach()
        found.append((weights(model), told))
    return found[0][0], *found[1]


@pytest.mark.parametrize(("on", "optimizer"), [("default", "sgd"), (DENSE, "sgd"), ("default", "adamw")])
def test_a_checkpoint_goes_on_with_what_was_on(worlds: dict[int, World], on: str, optimizer: str) -> None:
    for whole, parts, told in worlds[2].run(resume_case, on=on, optimizer=optimizer):
        assert told == [on, on]
        if optimizer == "sgd":
            torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-5)


def not_finite_case(rank: int, size: int) -> tuple[Any, ...]:
    model = Given(rank)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sync = sparsync.attach(ddp, "auto", optimizer=optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = ddp(step)
        (loss * float("nan") if step == 2 and rank == 1 else loss).backward()
        bad = not all(bool(p.grad.isfinite().all()) for p in model.tensors if p.grad is not None)
        if bad:
            continue
        optimizer.step()
    speeds = [sync.velocity(f"tensors.{n}") for n in range(5)]
    sync.detach()
    return bad, all(bool(v.isfinite().all()) and bool(v.any()) for v in speeds if v is not None), weights(model)


def test_a_bad_gradient_does_not_reach_velocities_in_dense_steps(worlds: dict[int, World]) -> None:
    ranks = worlds[2].run(not_finite_case)
    assert all(not bad and fine for bad, fine, _ in ranks)
    assert torch.equal(ranks[0][2], ranks[1][2])
    assert bool(ranks[0][2].isfinite().all())


def bad_drain_case(rank: int, size: int, optimizer: str) -> tuple[Any, ...]:
    """A gradient is not finite while residuals are on their way out: return what is kept before that step and after."""
    model = Given(rank)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    made = torch.optim.AdamW(model.parameters(), lr=1e-2) if optimizer == "adamw" else None
    made = made or torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    sync = sparsync.attach(ddp, "auto", optimizer=made)
    assert sync._auto is not None
    sync._auto.policy = Script(sync._auto.policy.names, {2: "default", 8: DENSE})
    found, names = [], [name for name, p in model.named_parameters() if p.dim() > 1]
    for step in range(11):
        kept = [sync.residual(name) for name in names] if step >= 8 else []
        found.append([own.clone() for own in kept if own is not None])
        made.zero_grad()
        loss = ddp(step)
        if step == 9 and rank == 1:
            loss = loss + float("nan") * model.tensors[4].sum()  # the first bucket that comes, and no other
        loss.backward()
        if step != 9:
            made.step()
    sync.detach()
    return found[9], found[10], float(sum(own.abs().sum() for own in found[9]))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_bad_step_takes_nothing_out_of_residuals(worlds: dict[int, World], optimizer: str) -> None:
    for before, after, size in worlds[2].run(bad_drain_case, optimizer=optimizer):
        assert size > 0
        for own, left in zip(before, after, strict=True):
            assert torch.equal(own, left)


def test_a_step_that_ends_late_takes_nothing_off_what_was_decided_since() -> None:
    """The communication thread may still be ending a step while all ranks decide to send residuals."""
    model = net()
    handle, _ = sparsync.comm_hook(model, "auto", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    handle.start()
    assert handle._auto is not None
    dense = handle._auto._dense
    dense.begin_step(0, None)
    dense.drain()
    dense._close([])
    assert dense.draining == DRAIN
    dense.begin_step(1, None)
    assert (dense._parts, dense.draining) == (DRAIN, DRAIN - 1)
    handle.detach()


def half_case(rank: int, size: int) -> list[float]:
    model = nn.Linear(300, 300, bias=False).half()
    ddp = DistributedDataParallel(model)
    sync = sparsync.attach(ddp, "auto", optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    found = []
    for _ in range(3):
        model.weight.grad = None
        ddp(torch.eye(300).half()).sum().backward()
        assert model.weight.grad is not None
        found.append(float(model.weight.grad[0, 0]))
    sync.detach()
    return found


def test_half_precision_has_momentum_in_dense_steps(worlds: dict[int, World]) -> None:
    """The sum of a bucket's gradients is beyond fp16's range, and none of them is."""
    assert worlds[2].run(half_case) == 2 * [[1.0, 1.5, 1.75]]


@pytest.mark.parametrize("size", [2**16, 2**16 + 5, 100_003])
def test_momentum_by_a_compiled_loop_is_the_references(size: int) -> None:
    if not cpu.available():
        pytest.skip("numba is not installed")
    total, velocity = torch.randn(size).bfloat16(), torch.randn(size)
    made = [(velocity.clone(), torch.empty(size)) for _ in range(2)]
    for move, (kept, out) in zip((mean_velocity.move, reference.move), made, strict=True):
        move(total, 1 / 3, kept, 0.7, out)
    assert cpu.usable(velocity, total)
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])
    assert torch.equal(*made[0])


def slowest_case(rank: int, size: int) -> list[float]:
    model = net()
    sync = sparsync.attach(
        DistributedDataParallel(model), "auto", optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    assert sync._reducer is not None
    found = sync._reducer.slowest([0.1 * rank, -0.1 * rank])
    sync.detach()
    return found


def test_times_are_the_slowest_ranks(worlds: dict[int, World]) -> None:
    assert worlds[3].run(slowest_case) == 3 * [[0.2, 0.0]]


def test_options_that_do_not_go_with_it_are_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, value in (("transactional", True), ("clip", 1.0)):
        with pytest.raises(ValueError, match=f"'auto' does not go with {name}= yet"):
            sparsync.comm_hook(model, "auto", optimizer=optimizer, **{name: value})
    with pytest.raises(ValueError, match="'auto' does not go with per_node= yet"):
        sparsync.comm_hook(model, "auto", optimizer=optimizer, per_node=2)
    with pytest.raises(ValueError, match="compressor='auto' and recipe='paper' were both given"):
        sparsync.comm_hook(model, "auto", recipe="paper")
    with pytest.raises(ValueError, match="virtual workers have none"):
        VirtualWorkers(model, lambda *_: (torch.zeros(()), ()), optimizer, 2, recipe="auto")


def test_one_worker_alone_sends_nothing() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle, _ = sparsync.comm_hook(model, "auto", optimizer=optimizer)
    gradient = torch.randn(sum(p.numel() for p in model.parameters()))
    result = handle.push(0, gradient.clone(), list(model.parameters()), True).wait()
    assert torch.equal(result, gradient)  # and rounds nothing
    assert "one worker alone sends nothing" in handle.describe()
    assert handle._auto is not None
    others = [
        weakref.ref(way.buckets) for name, way in handle._auto._ways.items() if name != handle._auto.policy.current
    ]
    gc.collect()
    gc.disable()  # what ends now ends by itself, and CUDA graphs with it
    try:
        handle.detach()
        assert [other() for other in others] == len(others) * [None]
    finally:
        gc.enable()
