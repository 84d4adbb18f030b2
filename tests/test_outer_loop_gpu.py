"""The outer loop on a GPU: run by hand (`make test-gpu`), skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparsync import PeerLost
from sparsync.engine.completion import Deferred
from tests.test_outer_loop import (
    SPARSE,
    STEPS,
    WAYS,
    Training,
    assert_laws,
    assert_named,
    case_killed,
    case_resume,
    case_train,
)
from tests.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RANKS = [("nccl", 1), ("gloo", 2), ("gloo", 3)]
CUDA = {"device": "cuda:0"}
STREAMED = {"every": 6, "fragments": 3, "overlap": 2, "moments": True, **SPARSE}
BUSY = 20_000_000  # cycles, some milliseconds


def run(size: int, case: Any, **arguments: Any) -> list[Any]:
    """Return what a case gives on every rank, all of which share the GPU."""
    outcomes = World.once(size, case, timeout=150, **arguments)
    assert all(finished for finished, _ in outcomes), outcomes
    return [answer for _, answer in outcomes]


@pytest.mark.parametrize(("backend", "size"), RANKS)
@pytest.mark.parametrize(
    "way",
    ["whole", "sign", "levels", "budget", "balanced", "streamed moments", "bf16 autocast", "frozen", "each step"],
)
def test_nothing_is_lost_and_shared_weights_are_equal_on_the_device(backend: str, size: int, way: str) -> None:
    assert_laws(run(size, case_train, backend=backend, **CUDA, **WAYS[way]), way)


@pytest.mark.parametrize(("backend", "size"), RANKS[:2])
@pytest.mark.parametrize("saved_on", ["cpu", "cuda:0"])
@pytest.mark.parametrize("way", ["streamed moments", "bf16"])
def test_a_resumed_training_repeats_the_bits_on_the_device(backend: str, size: int, saved_on: str, way: str) -> None:
    options = {name: value for name, value in WAYS[way].items() if name != "misses"} | {"outer_momentum": 0.5}
    for own, resumed, shared, again in run(size, case_resume, saved_on=saved_on, backend=backend, **CUDA, **options):
        for name in own:
            assert torch.equal(own[name], resumed[name])
            assert torch.equal(shared[name], again[name])


def case_streams(rank: int, size: int, backend: str) -> tuple[bool, set[bool], set[str], dict[str, Tensor]]:
    """Train twice: with streams that lag behind the host and each other, and with a host that waits for all."""
    torch.cuda.set_device(0)
    found, deferred, devices = [], set[bool](), set[str]()
    for busy in (True, False):
        training = Training(rank, backend=backend, **CUDA, **STREAMED)
        reducers = [part._reducer for part in training.outer.fragments]
        deferred |= {isinstance(reducer.completion, Deferred) for reducer in reducers}
        for _ in range(2 * STEPS):
            if busy:
                torch.cuda._sleep(BUSY)  # the local step is queued, and has not been made
                for reducer in reducers:
                    with reducer._streams.use(training.device):
                        torch.cuda._sleep(BUSY)  # what is exchanged lags behind the next local steps
            training.step()
            if not busy:
                torch.cuda.synchronize()
        first = training.outer.state_dict()["fragments"][0]  # which is on its way
        devices |= {tensor.device.type for kind in ("own", "shared", "mean", "sent") for tensor in first[kind].values()}
        devices.add(first["moments"].device.type)
        found.append(training.result())
    same = all(torch.equal(p, found[1][kind][name]) for kind in found[0] for name, p in found[0][kind].items())
    return same, deferred, devices, found[0]["shared"]


@pytest.mark.parametrize(("backend", "size"), RANKS)
def test_streams_that_lag_behind_change_no_bit(backend: str, size: int) -> None:
    answers = run(size, case_streams, backend=backend)
    for same, deferred, devices, shared in answers:
        assert same
        assert deferred == {backend == "nccl"}  # then the device decides
        assert devices == {"cuda"}
        assert all(torch.equal(p, answers[0][3][name]) for name, p in shared.items())


def case_waits(rank: int, size: int) -> int:
    """Make the steps of a round that neither send nor apply anything while the host may not wait for the device."""
    torch.cuda.set_device(0)
    training = Training(rank, backend="nccl", every=6, overlap=3, **CUDA, **SPARSE)
    model, optimizer, x = training.model, training.optimizer, torch.randn(5, 7, device="cuda")
    watched = 0
    for step in range(1, 31):
        quiet = step > 12 and step % 6 not in (0, 3)
        torch.cuda.set_sync_debug_mode("error" if quiet else "default")
        try:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            training.outer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        watched += quiet
    training.outer.detach()
    return watched


def test_the_host_waits_for_nothing_while_a_round_is_on_its_way() -> None:
    assert run(1, case_waits) == [12]


def case_silent(rank: int, size: int, moments: bool) -> tuple[str, bool]:
    """Let the device not come to the exchange for longer than the deadline, as one does whose peer is lost; NCCL's own
    limit is three seconds above ours."""
    torch.cuda.set_device(0)
    training = Training(rank, backend="nccl", every=3, moments=moments, deadline=4.0, **CUDA, **SPARSE)
    for _ in range(5):
        training.step()
    torch.cuda.synchronize()
    awake = torch.cuda.Event()
    with training.outer.fragments[0]._reducer._streams.use(training.device):
        torch.cuda._sleep(11_000_000_000)  # some six seconds
        awake.record()
    with pytest.raises(PeerLost) as raised:
        training.step()
    asleep = not awake.query()
    torch.cuda.synchronize()
    training.outer.detach()
    return str(raised.value), asleep


@pytest.mark.parametrize("moments", [False, True])
def test_a_device_that_is_never_answered_is_told_before_the_deadline(moments: bool) -> None:
    ((said, asleep),) = run(1, case_silent, moments=moments)
    assert "no answer within 4 s" in said
    assert asleep


@pytest.mark.parametrize(("overlap", "inside"), [(0, False), (1, True)])
def test_a_killed_rank_is_named_by_the_others_on_the_device(overlap: int, inside: bool) -> None:
    assert_named(World.once(3, case_killed, timeout=150, overlap=overlap, inside=inside, **CUDA))
