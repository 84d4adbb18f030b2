"""What goes wrong in data-parallel training, as real DDP trainings on real processes: cases 1 to 21.

Wherever a training runs, the replicas are compared bit for bit at its end. ``Oracle`` is the yardstick: plain error
feedback without buckets, hooks or messages.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import inspect
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import sparsync
from sparsync import AllGather, PeerFailed, PeerLost, SparsyncError, StepFailed, ThresholdK, TopK
from sparsync.collectives import Channel
from sparsync.engine.bucketing import Bucket
from sparsync.layout import Parameter
from sparsync.schedule import Constant
from sparsync.wire import Wire
from tests.methods import reducer_of
from tests.models import loss_of as simple_loss
from tests.models import net
from tests.world import World

SIZES = (32, 64, 48, 80, 32)  # layers of different sizes
SQUARE = (40, 40, 40, 40)  # three layers of equal size
ALL_SPARSE = {"dense_below": 0, "dense_1d": False}
RATE = 0.1

# ---- a training ----------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Layers ``layer0``, ``layer1``, ..., used one after another; the same on every rank."""

    def __init__(self, sizes: tuple[int, ...], bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        for i, (inputs, outputs) in enumerate(pairwise(sizes)):
            self.add_module(f"layer{i}", nn.Linear(inputs, outputs, bias))

    def forward(self, x: Tensor, without: str = "") -> Tensor:
        for name, layer in self.named_children():
            x = x if name == without else torch.tanh(layer(x))
        return x


def loss_of(model: nn.Module, rank: int, step: int, without: str = "") -> Tensor:
    """The loss on this rank's batch of this step."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    data = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(4, module.get_submodule("layer0").in_features, generator=data)
    return model(x, without).square().sum()


@dataclass
class Training:
    model: nn.Module
    ddp: DistributedDataParallel
    handle: sparsync.Handle
    optimizer: torch.optim.Optimizer

    def step(self, loss: Callable[[nn.Module], Tensor], scaler: Any = None) -> None:
        """One step as everybody writes it."""
        self.optimizer.zero_grad()
        if scaler is None:
            loss(self.ddp).backward()
            self.optimizer.step()
        else:
            scaler.scale(loss(self.ddp)).backward()
            scaler.step(self.optimizer)
            scaler.update()

    def buckets(self) -> list[tuple[str, ...]]:
        """The parameters of every bucket; those that are gathered from all buckets are not among them."""
        units = self.handle._running().buckets._bucket_units
        return [tuple(span.name for span in units[index].spans) for index in sorted(units)]

    def residuals(self) -> dict[str, Tensor]:
        return self.handle.state_dict()["residuals"]


@contextmanager
def training(
    model: nn.Module, compressor: Any, ddp: dict[str, Any] | None = None, check: bool = True, **options: Any
) -> Iterator[Training]:
    """A model under DDP and Sparsync; at the end the replicas must be equal, and nothing is left behind."""
    wrapped = DistributedDataParallel(model, **(ddp or {}))
    run = Training(
        model,
        wrapped,
        sparsync.attach(wrapped, compressor, **options),
        torch.optim.SGD(model.parameters(), lr=RATE),
    )
    del wrapped
    try:
        yield run
        if check:
            assert_replicas_equal(model)
    finally:
        run.handle.detach()
        del run.ddp
        gc.collect()


class Oracle:
    """Error feedback with exact top-k in every parameter, on a model of its own."""

    def __init__(self, model: nn.Module, density: float) -> None:
        self.model, self.density = deepcopy(model), density
        self.kept = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def step(self, loss: Callable[[nn.Module], Tensor]) -> None:
        for name, grad in local_gradients(self.model, loss).items():
            sent = torch.zeros_like(grad)
            if grad.any():  # a parameter this rank did not use is not sent from
                total = self.kept[name] + grad
                k = max(1, round(self.density * total.numel()))
                top = total.abs().flatten().topk(k).indices
                sent.view(-1)[top] = total.view(-1)[top]
                self.kept[name] = total - sent
            mean = sum(gathered(sent)) / dist.get_world_size()
            self.model.get_parameter(name).data.add_(mean, alpha=-RATE)

    def assert_same(self, run: Training) -> None:
        """Every residual and every weight is ours, bit for bit."""
        for name, kept in self.kept.items():
            residual = run.handle.residual(name)
            assert residual is not None
            assert torch.equal(residual, kept), name
            assert torch.equal(run.model.get_parameter(name), self.model.get_parameter(name)), name


def local_gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """This rank's own gradient; zero for parameters that are not used."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss(model), parameters, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, grads, strict=True)}


def gathered(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def digest(tensors: Any) -> str:
    """A text that differs when any bit differs."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def assert_replicas_equal(model: nn.Module) -> None:
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest(model.parameters()))
    assert len(set(digests)) == 1


def assert_same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


class Books:
    """Applied + kept = came in, as means over the ranks, for every parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.balance = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def step(
        self, run: Training, loss: Callable[[nn.Module], Tensor], after: Callable[[], None] = lambda: None
    ) -> None:
        came_in = local_gradients(run.model, loss)
        run.optimizer.zero_grad()
        loss(run.ddp).backward()
        for name, p in run.model.named_parameters():
            self.balance[name] += came_in[name] - (0 if p.grad is None else p.grad)
        after()
        run.optimizer.step()

    def assert_balanced(self, run: Training) -> None:
        residuals = run.residuals()
        for name, balance in self.balance.items():
            kept = residuals.get(name, torch.zeros_like(balance))
            torch.testing.assert_close(sum(gathered(kept)), sum(gathered(balance)), rtol=1e-5, atol=1e-5)


# ---- 1 to 4: buckets ------------------------------------------------------------------------------------------------


def case_oracle(rank: int, size: int, sizes: tuple[int, ...], ddp: dict[str, Any], bias: bool) -> list[Any]:
    model = Chain(sizes, bias)
    oracle, buckets = Oracle(model, 0.05), []
    with training(model, TopK(0.05), ddp, **ALL_SPARSE) as run:
        for step in range(5):
            run.step(lambda m, step=step: loss_of(m, rank, step))
            oracle.step(lambda m, step=step: loss_of(m, rank, step))
            oracle.assert_same(run)
            buckets.append(run.buckets())
    return buckets


SMALL_BUCKETS = {"bucket_cap_mb": 0.002}


@pytest.mark.parametrize("size", [2, 3])
def test_01_rebuild_keeps_residuals(worlds: Any, size: int) -> None:
    """Regrouped into buckets of other sizes, every parameter still has its own residual."""
    for first, second, *later in worlds[size].run(case_oracle, sizes=SIZES, ddp=SMALL_BUCKETS, bias=True):
        assert len(first) == 1
        assert len(second) > 2
        assert all(buckets == second for buckets in later)


@pytest.mark.parametrize("ddp", [{}, {"gradient_as_bucket_view": True}], ids=["copies", "views"])
def test_02_rebuild_with_equal_sizes_reversed(worlds: Any, ddp: dict[str, Any]) -> None:
    """The same bucket with equal parameters in reversed order: nothing but the name tells them apart."""
    for first, second, *_ in worlds[2].run(case_oracle, sizes=SQUARE, ddp=ddp, bias=False):
        assert len(first) == 1
        assert first[0] == second[0][::-1]


def test_03_rebuild_late_or_never(worlds: Any) -> None:
    """``static_graph`` regroups at another step and ``find_unused_parameters`` never: no warm-up is relied on."""
    for mode, first_change in (("static_graph", 2), ("find_unused_parameters", None)):
        for buckets in worlds[2].run(case_oracle, sizes=SIZES, ddp=SMALL_BUCKETS | {mode: True}, bias=True):
            changes = [i for i in range(1, len(buckets)) if buckets[i] != buckets[i - 1]]
            assert changes == ([] if first_change is None else [first_change]), mode


@dataclass(frozen=True)
class Measured(TopK):
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
    with training(model, Measured(0.001)) as run:
        PEAKS.clear()
        run.step(lambda m: loss_of(m, rank, 0))
        assert run.buckets() == [("layer0.weight",)]
    return max(PEAKS)


def test_04_first_bucket_is_the_whole_model(worlds: Any) -> None:
    """Compressing a bucket takes a few chunks and a summary of its rows, not a copy of the bucket."""
    for peak in worlds[2].run(case_one_bucket, width=2048):
        assert 0 < peak < 2048**2 * 4 / 2  # bytes; a copy would be twice that


# ---- 5 to 7: steps and threads --------------------------------------------------------------------------------------


def case_skipped_bucket(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(Chain(SIZES), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    for scope in ("layer", "bucket", "global"):
        with pytest.raises(ValueError, match="skip_all_reduce_unused_params"):
            sparsync.attach(ddp, "topk", scope=scope)
    del ddp
    gc.collect()


def test_05_skipped_buckets_are_refused(worlds: Any) -> None:
    worlds[2].run(case_skipped_bucket)


class Tripwire(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("tripped")


def case_half_a_backward(rank: int, size: int) -> tuple[str, float]:
    model = Chain(SIZES)
    with training(model, TopK(0.05), SMALL_BUCKETS, check=False, deadline=60, **ALL_SPARSE) as run:
        for step in range(2):
            run.step(lambda m, step=step: loss_of(m, rank, step))
        assert len(run.buckets()) > 2
        assert_replicas_equal(model)
        if rank == 1:  # layers 3 and 2 have sent their gradients when backward breaks off
            model.get_submodule("layer1").register_forward_hook(lambda module, x, y: Tripwire.apply(y))
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            loss_of(run.ddp, rank, 2).backward()
        if rank == 1:
            with pytest.raises(StepFailed) as caught:
                loss_of(run.ddp, rank, 3)
        else:
            with pytest.raises(SparsyncError) as caught:
                run.handle.check()
        return str(caught.value), time.monotonic() - start


def test_06_backward_breaks_off_on_one_rank() -> None:
    outcomes = World.once(3, case_half_a_backward)
    assert all(ok for ok, _ in outcomes), outcomes
    (peer, _), (own, _), (other, _) = (result for _, result in outcomes)
    assert "the last backward did not finish" in own
    assert peer == other == f"rank 1: {own}"
    assert max(seconds for _, (_, seconds) in outcomes) < 40  # the deadline is 60


@dataclass(frozen=True)
class Watched(AllGather):
    """Notes the threads it runs on."""

    def reduce(self, *args: Any) -> Any:
        THREADS.add(threading.current_thread().name)
        return super().reduce(*args)


THREADS: set[str] = set()


def case_many_buckets(rank: int, size: int) -> None:
    model = Chain((16,) * 31)
    with training(model, TopK(0.05), {"bucket_cap_mb": 0.001}, collective=Watched(), **ALL_SPARSE) as run:
        THREADS.clear()
        for step in range(5):
            run.step(lambda m, step=step: loss_of(m, rank, step))
        assert len(run.buckets()) >= 30
        assert {"sparsync"} == THREADS
        assert run.handle._running().channel.group not in (dist.group.WORLD, run.ddp.process_group)


@pytest.mark.parametrize("size", [2, 3])
def test_07_many_buckets_do_not_hang(worlds: Any, size: int) -> None:
    """All exchanges run on one thread and in a process group of our own."""
    worlds[size].run(case_many_buckets)


# ---- 8 to 13: errors ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failing(TopK):
    """Fails on rank 1 in step 2."""

    def compress(self, grad: Any, memory: Any, layout: Any, ctx: Any, state: Any) -> Any:
        if (ctx.rank, ctx.step) == (1, 2):
            raise ValueError("out of luck")
        return super().compress(grad, memory, layout, ctx, state)


def case_failing_compressor(rank: int, size: int) -> dict[str, Any]:
    model, said = Chain(SIZES), {}
    with training(model, Failing(0.05), SMALL_BUCKETS, check=False, **ALL_SPARSE) as run:
        for step in range(2):
            run.step(lambda m, step=step: loss_of(m, rank, step))
        before = digest(model.parameters())
        start = time.monotonic()
        with pytest.raises(RuntimeError) as raised:
            run.step(lambda m: loss_of(m, rank, 2))
        said["seconds"] = time.monotonic() - start
        said["backward"] = str(raised.value)
        for _ in range(2):  # the error stays
            with pytest.raises(PeerFailed) as failed:
                run.handle.check()
        said["check"] = str(failed.value)
        with pytest.raises(StepFailed) as again:
            run.ddp(torch.zeros(1, SIZES[0]))
        said["again"] = str(again.value)
        assert digest(model.parameters()) == before
    del raised, failed, again  # their tracebacks hold the old model
    gc.collect()
    with training(model, TopK(0.05), **ALL_SPARSE) as run:  # built anew, it trains on
        for step in range(2):
            run.step(lambda m, step=step: loss_of(m, rank, step))
    assert digest(model.parameters()) != before
    return said


@pytest.fixture(scope="module")
def failure(worlds: Any) -> list[dict[str, Any]]:
    """What every rank said when compression failed on rank 1 of 3, and when the model was used again."""
    return worlds[3].run(case_failing_compressor)


CAUSE = "rank 1: failed to compress bucket 0: ValueError: out of luck"


def test_08_one_rank_fails_and_all_raise(failure: list[dict[str, Any]]) -> None:
    assert [said["check"] for said in failure] == [CAUSE] * 3
    assert max(said["seconds"] for said in failure) < 40


def test_09_backward_raises_and_check_is_clean(failure: list[dict[str, Any]]) -> None:
    for said in failure:
        assert CAUSE in said["backward"]
        assert said["check"] == CAUSE


def case_always_a_future(rank: int, size: int) -> None:
    returned: list[Any] = []

    def noting(state, bucket):  # type: ignore[no-untyped-def]
        returned.append(hook(state, bucket))
        return returned[-1]

    model = Chain(SIZES)
    handle, hook = sparsync.comm_hook(model, TopK(0.05))
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(handle, noting)
    loss_of(ddp, rank, 0).backward()
    assert_replicas_equal(model)
    handle.detach()

    stranger = DistributedDataParallel(Chain(SIZES))
    other, hook = sparsync.comm_hook(model, TopK(0.05))  # made for another model
    stranger.register_comm_hook(other, noting)
    with pytest.raises(RuntimeError, match="belongs to another model"):
        loss_of(stranger, rank, 0).backward()
    other.detach()

    with training(Chain(SIZES), TopK(0.05)) as run:
        run.step(lambda m: loss_of(m, rank, 0))
        run.handle.detach()  # from here on: dense
        run.step(lambda m: loss_of(m, rank, 1))
    assert len(returned) >= 2
    assert all(isinstance(result, torch.futures.Future) for result in returned)
    returned.clear()
    del ddp, stranger
    gc.collect()


def test_10_the_hook_always_returns_a_future(worlds: Any) -> None:
    """When it works, when it cannot, and after ``detach()``: DDP would crash on anything else."""
    worlds[2].run(case_always_a_future)


def case_stalled(rank: int, size: int) -> tuple[str, str, float]:
    model = Chain(SIZES)
    with training(model, TopK(0.05), check=False, deadline=4) as run:
        for step in range(2):
            run.step(lambda m, step=step: loss_of(m, rank, step))
        assert_replicas_equal(model)
        loss = loss_of(run.ddp, rank, 2)
        if rank == 2:
            time.sleep(5)
            return "stalled", "", 0.0
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            loss.backward()
        seconds = time.monotonic() - start
        with pytest.raises(SparsyncError) as caught:
            run.handle.check()
        return type(caught.value).__name__, str(caught.value), seconds


def test_11_stalled_rank_is_named_at_the_deadline() -> None:
    outcomes = World.once(3, case_stalled)
    assert all(ok for ok, _ in outcomes), outcomes
    (kind, text, seconds), (kind_1, text_1, seconds_1), _ = (result for _, result in outcomes)
    assert kind == kind_1 == PeerLost.__name__
    assert text == text_1
    assert text.endswith("no answer within 4 s; ranks not heard from: 2")
    assert max(seconds, seconds_1) < 20


def case_form(rank: int, size: int, form: str) -> str:
    model = Chain(SIZES)
    ddp = DistributedDataParallel(model)
    if form == "attach":
        handle = sparsync.attach(ddp, TopK(0.05))
    else:
        handle, hook = sparsync.comm_hook(model, TopK(0.05))

        def wrapper(state, bucket):  # type: ignore[no-untyped-def]
            return hook(state, bucket)

        forms = {"pair": hook, "lambda": lambda state, bucket: hook(state, bucket), "wrapper": wrapper}
        ddp.register_comm_hook(handle, forms[form])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()
    assert handle.residual("layer1.weight").any()
    assert_replicas_equal(model)
    handle.detach()
    del ddp
    gc.collect()
    return digest(model.parameters())


def test_12_every_form_of_the_hook(worlds: Any) -> None:
    """A plain function with real types, which is what DDP's checks look at; all forms train the same."""
    hook = sparsync.comm_hook(Chain(SIZES))[1]
    assert inspect.isfunction(hook)
    assert hook.__annotations__["bucket"] is dist.GradBucket
    assert hook.__annotations__["return"] == torch.futures.Future[Tensor]
    results = {form: worlds[2].run(case_form, form=form) for form in ("attach", "pair", "lambda", "wrapper")}
    assert len({result for ranks in results.values() for result in ranks}) == 1, results


def test_13_used_again_after_a_failed_step(failure: list[dict[str, Any]]) -> None:
    for said in failure:
        assert "build the model anew" in said["again"]
        assert said["again"].endswith(CAUSE)


# ---- 14 to 18: bad gradients and undone steps -----------------------------------------------------------------------


@contextmanager
def bad_gradient(model: nn.Module, name: str, value: float, here: bool = True) -> Iterator[None]:
    """The third entry of the gradient of ``name`` is ``value``."""

    def poison(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[2] = value
        return grad

    hook = model.get_parameter(name).register_hook(poison) if here else None
    yield
    if hook is not None:
        hook.remove()


def case_overflow(rank: int, size: int, name: str, compressor: Any, bad_steps: tuple[int, ...]) -> dict[str, Any]:
    """Train with a scaler; in ``bad_steps`` the gradient overflows. Its results must be as if they had not been."""
    model, scaler = Chain(SIZES), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with training(model, compressor, SMALL_BUCKETS, scaler=scaler) as run:
        for step in range(7):
            before, weights, scale = run.handle.state_dict(), digest(model.parameters()), scaler.get_scale()
            with bad_gradient(model, name, math.inf, step in bad_steps):
                run.step(lambda m, step=step: loss_of(m, rank, step), scaler)
            if step not in bad_steps:
                assert digest(model.parameters()) != weights
                continue
            assert scaler.get_scale() == scale / 2
            assert digest(model.parameters()) == weights
            after = run.handle.state_dict()
            follow = scale / before["loss_scale"]  # what is kept is in the units of the last loss
            assert_same_tensors(after["residuals"], {n: r * follow for n, r in before["residuals"].items()})
            for segment, bag in before["compressor"].items():
                floors = [b["floor"].int().view(torch.float32) for b in (after["compressor"][segment], bag)]
                assert torch.equal(floors[0], floors[1] * follow)
        assert run.handle.stats().total.skipped == len(bad_steps)
        residuals = {n: r / run.handle.state_dict()["loss_scale"] for n, r in run.residuals().items()}
        assert all(torch.isfinite(r).all() and r.any() for r in residuals.values())
    return {"weights": digest(model.parameters()), "residuals": digest(residuals.values())}


def case_without(rank: int, size: int, compressor: Any, bad_steps: tuple[int, ...]) -> dict[str, Any]:
    """The same training without a scaler that never sees the batches of ``bad_steps``."""
    model = Chain(SIZES)
    with training(model, compressor, SMALL_BUCKETS) as run:
        for step in range(7):
            if step not in bad_steps:
                run.step(lambda m, step=step: loss_of(m, rank, step))
        residuals = run.residuals()
    return {"weights": digest(model.parameters()), "residuals": digest(residuals.values())}


@pytest.mark.parametrize("name", ["layer0.weight", "layer3.weight", "layer2.bias"])
def test_14_overflow_rolls_the_whole_step_back(worlds: Any, name: str) -> None:
    """Wherever it happens, in the first bucket, the last one, or a tensor that travels dense.

    Scales are powers of two, so training goes on with the very bits of one that never saw those batches.
    """
    arguments = {"compressor": TopK(0.05), "bad_steps": (3, 4)}
    assert worlds[2].run(case_overflow, name=name, **arguments) == worlds[2].run(case_without, **arguments)


def test_14_overflow_rolls_thresholds_back(worlds: Any) -> None:
    worlds[2].run(case_overflow, name="layer1.weight", compressor=ThresholdK(0.05), bad_steps=(3, 4))


@contextmanager
def logged() -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sparsync").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("sparsync").removeHandler(handler)


def case_nan_on_one_rank(rank: int, size: int, name: str, compressor: Any, **options: Any) -> list[str]:
    model = Chain(SIZES)
    with training(model, compressor, **options) as run, logged() as messages:
        for step in range(2):
            run.step(lambda m, step=step: loss_of(m, rank, step))
        assert messages == []
        before = run.residuals()
        came_in = local_gradients(model, lambda m: loss_of(m, rank, 2))
        with bad_gradient(model, name, math.nan, rank == 1):
            run.optimizer.zero_grad()
            loss_of(run.ddp, rank, 2).backward()
        assert not torch.isfinite(model.get_parameter(name).grad).all()  # the optimizer would see it on every rank
        if rank == 1:
            came_in[name].view(-1)[2] = 0.0  # what is not finite does not come in
        after = run.residuals()
        undone = options.get("transactional")
        together = next((bucket for bucket in run.buckets() if name in bucket), ())
        for n in after if undone else together:  # without transactions, what travelled with it comes home
            assert torch.equal(after[n], before[n] if undone else before[n] + came_in[n]), n
        assert all(torch.isfinite(r).all() for r in after.values())
        for step in (3, 4):
            run.step(lambda m, step=step: loss_of(m, rank, step))
            assert all(torch.isfinite(p).all() for p in model.parameters())
        return messages


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("layer1.weight", {"compressor": TopK(0.05)}),
        ("layer1.weight", {"compressor": TopK(0.05), "transactional": True}),
        ("layer2.bias", {"compressor": TopK(0.05), "transactional": True}),
        ("layer1.weight", {"compressor": "none", "values": "bf16"}),
    ],
    ids=["kept", "undone", "dense", "rounded"],
)
def test_15_nan_on_one_rank_is_named_on_all(worlds: Any, name: str, options: dict[str, Any]) -> None:
    expected = [f"step 2: the gradient of {name} was not finite on rank 1"]
    for messages in worlds[3].run(case_nan_on_one_rank, name=name, **options):
        assert messages == expected


@dataclass(frozen=True)
class Mute(TopK):
    """Selects nothing."""

    def choose(self, u: Tensor, *_: Any) -> Tensor:
        return torch.empty(0, dtype=torch.int64)


def case_hidden_overflow(rank: int, size: int) -> None:
    model, scaler = Chain(SIZES), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with training(model, Mute(0.05), scaler=scaler, **ALL_SPARSE) as run:
        run.step(lambda m: loss_of(m, rank, 0), scaler)
        assert run.handle.stats().step.entries == 0
        with bad_gradient(model, "layer1.weight", math.inf, rank == 0):
            run.step(lambda m: loss_of(m, rank, 1), scaler)
        assert model.get_parameter("layer1.weight").grad.isnan().any()
        assert scaler.get_scale() == 2.0**9


def test_16_overflow_is_seen_though_nothing_is_sent(worlds: Any) -> None:
    worlds[2].run(case_hidden_overflow)


def case_growing_scale(rank: int, size: int, compressor: Any) -> dict[str, Any]:
    model, scaler = Chain(SIZES), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    with training(model, compressor, SMALL_BUCKETS, scaler=scaler) as run:
        for step in range(7):
            run.step(lambda m, step=step: loss_of(m, rank, step), scaler)
        assert scaler.get_scale() == 8.0 * 2**7
        residuals = {name: residual / (scaler.get_scale() / 2) for name, residual in run.residuals().items()}
    return {"weights": digest(model.parameters()), "residuals": digest(residuals.values())}


@pytest.mark.parametrize("compressor", [TopK(0.05), ThresholdK(0.05)], ids=["topk", "threshold"])
def test_17_residual_follows_the_loss_scale(worlds: Any, compressor: Any) -> None:
    """A scale that doubles every step changes no bit of the training."""
    scaled = worlds[2].run(case_growing_scale, compressor=compressor)
    assert scaled == worlds[2].run(case_without, compressor=compressor, bad_steps=())


def case_user_skips(rank: int, size: int) -> dict[str, Any]:
    model = Chain(SIZES)
    with training(model, TopK(0.05), SMALL_BUCKETS, transactional=True) as run:
        for step in range(7):
            if step not in (0, 3):
                run.step(lambda m, step=step: loss_of(m, rank, step))
                continue
            run.optimizer.zero_grad()
            loss_of(run.ddp, rank, step).backward()
            run.handle.rollback()
        run.handle.commit()
        residuals = run.residuals()
        with pytest.raises(SparsyncError, match="no step to undo"):
            run.handle.rollback()  # too late: the step is kept
        assert_same_tensors(run.residuals(), residuals)
    with training(Chain(SIZES), TopK(0.05)) as run:
        run.step(lambda m: loss_of(m, rank, 0))
        with pytest.raises(SparsyncError, match="transactional=True"):
            run.handle.rollback()
    return {"weights": digest(model.parameters()), "residuals": digest(residuals.values())}


def test_18_skipped_step_is_rolled_back(worlds: Any) -> None:
    """Skipping steps, even the one before DDP regroups its buckets, leaves no trace."""
    skipped = worlds[2].run(case_user_skips)
    assert skipped == worlds[2].run(case_without, compressor=TopK(0.05), bad_steps=(0, 3))


# ---- 19 to 21: clipping and unused parameters -----------------------------------------------------------------------


def case_clipping(rank: int, size: int) -> None:
    model = Chain(SIZES)
    books, clipped = Books(model), 0
    with training(model, TopK(0.05), SMALL_BUCKETS) as run:

        def clip() -> None:
            nonlocal clipped
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            after = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            torch.testing.assert_close(after, norm.clamp(max=0.5), rtol=1e-4, atol=0)
            clipped += bool(norm > 0.5)

        for step in range(5):
            books.step(run, lambda m, step=step: loss_of(m, rank, step), after=clip)
        books.assert_balanced(run)
        assert clipped


def test_19_clipping_after_the_exchange(worlds: Any) -> None:
    """It works on the averaged gradient, the same on every rank, and takes nothing from what is kept."""
    worlds[3].run(case_clipping)


def case_unused_everywhere(rank: int, size: int, scope: str) -> None:
    model = Chain(SQUARE)
    books = Books(model)
    with training(model, TopK(0.05), {"find_unused_parameters": True}, scope=scope, dense_below=0) as run:
        for step in range(6):
            without = "layer1" if step in (2, 3) else ""
            before = run.residuals()
            books.step(run, lambda m, step=step, without=without: loss_of(m, rank, step, without))
            if without:
                assert before["layer1.weight"].any()
                assert torch.equal(run.residuals()["layer1.weight"], before["layer1.weight"])
                assert not torch.equal(run.residuals()["layer2.weight"], before["layer2.weight"])
        books.assert_balanced(run)


@pytest.mark.parametrize("scope", ["layer", "bucket", "global"])
def test_20_unused_on_every_rank(worlds: Any, scope: str) -> None:
    """DDP throws the result of such a parameter away, so nothing is sent from it: its residual waits, bit for bit."""
    worlds[2].run(case_unused_everywhere, scope=scope)


def case_unused_on_some(rank: int, size: int, scope: str) -> None:
    model = Chain(SQUARE)
    oracle, books = Oracle(model, 0.05), Books(model)
    options = {"scope": scope} | ALL_SPARSE
    with training(model, TopK(0.05), {"find_unused_parameters": True}, **options) as run:
        for step in range(6):
            without = "layer1" if step >= 2 and rank == step % size else ""

            def loss(m: nn.Module, step: int = step, without: str = without) -> Tensor:
                return loss_of(m, rank, step, without)

            books.step(run, loss)
            if scope == "layer":
                oracle.step(loss)
                oracle.assert_same(run)
        books.assert_balanced(run)


@pytest.mark.parametrize("scope", ["layer", "bucket", "global"])
def test_21_unused_on_some_ranks(worlds: Any, scope: str) -> None:
    worlds[3].run(case_unused_on_some, scope=scope)


# ---- rarer ways to fail -------------------------------------------------------------------------------------------


def case_no_memory(rank: int, size: int) -> tuple[str, str]:
    """The first residual cannot be allocated on one rank."""
    ddp = DistributedDataParallel(net())
    handle = sparsync.attach(ddp, "topk", density=0.05, deadline=10)
    if rank == 1:
        handle._running().worker.feedback.memory = lambda *_: (_ for _ in ()).throw(MemoryError("no room"))  # type: ignore
    with contextlib.suppress(RuntimeError):
        simple_loss(ddp, rank, 0).backward()
    try:
        handle.check()
        return "", ""
    except sparsync.SparsyncError as error:
        return type(error).__name__, str(error)
    finally:
        handle.detach()
        del ddp
        gc.collect()


def test_08_out_of_memory_on_one_rank_ends_all() -> None:
    outcomes = World.once(2, case_no_memory)
    assert all(ok for ok, _ in outcomes), outcomes
    assert outcomes[0] == outcomes[1]
    kind, text = outcomes[0][1]
    assert kind == "PeerFailed"
    assert text.startswith("rank 1: failed to compress")
    assert "no room" in text


def case_subgroups(rank: int, size: int) -> list[float]:
    """Two models on two pairs of ranks, through the raw hook; every gradient is its rank."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    model = torch.nn.Linear(40, 40, bias=False)
    ddp = DistributedDataParallel(model, process_group=group)
    state, hook = sparsync.comm_hook(model, sparsync.TopK(1.0), process_group=group, dense_below=0)
    ddp.register_comm_hook(state, hook)
    for _ in range(2):
        ddp.zero_grad()
        (ddp(torch.eye(40)).sum() * rank).backward()
    answer = model.weight.grad.unique().tolist()
    state.detach()
    ddp.zero_grad()
    (ddp(torch.eye(40)).sum() * rank).backward()  # detached: dense, over the same ranks
    answer += model.weight.grad.unique().tolist()
    del ddp
    gc.collect()
    return answer


def test_12_the_raw_hook_keeps_to_its_process_group() -> None:
    outcomes = World.once(4, case_subgroups)
    assert outcomes == [(True, [0.5, 0.5])] * 2 + [(True, [2.5, 2.5])] * 2


def case_missing_at_attach(rank: int, size: int) -> tuple[str, str]:
    ddp = DistributedDataParallel(net())
    try:
        if rank == 1:
            return "", ""
        sparsync.attach(ddp, "topk", density=0.05, deadline=4)
    except sparsync.SparsyncError as error:
        return type(error).__name__, str(error)
    finally:
        del ddp
        gc.collect()
    return "attached", ""


def test_11_a_rank_that_never_attaches_is_named() -> None:
    outcomes = World.once(3, case_missing_at_attach)
    kind, text = outcomes[0][1]
    assert kind == "PeerLost"
    assert text.endswith("no answer within 4 s; ranks not heard from: 1")
    assert outcomes[2] == outcomes[0]


@pytest.mark.parametrize("scope", ["global", "bucket"])
def test_buffers_of_buckets_that_are_gone_are_not_kept(scope):
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
