"""The rank that hosts the store is frozen (SIGSTOP): no wait of the others may need an answer from the store."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import sparsync
from tests.failures.checked_training import bits
from tests.failures.ddp_training import ALL_SPARSE, SIZES, SMALL_BUCKETS, Chain, loss_of
from tests.failures.reducers import error_of
from tests.world import World

DEADLINE = 4.0
METHODS: dict[str, dict[str, Any]] = {
    "allgather": {"compressor": "topk", "density": 0.05, **ALL_SPARSE},
    "shared": {"compressor": "random", "collective": "shared", "density": 0.05, **ALL_SPARSE},
    "dense": {"compressor": "none"},
    "gtopk": {"compressor": "topk", "collective": "gtopk", "density": 0.05, **ALL_SPARSE},
    "balanced": {"compressor": "topk", "collective": "balanced", "density": 0.05, **ALL_SPARSE},
    "sketches": {"compressor": "topk", "density": 0.05, "precondition": True},
}


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def before_headers(handle: sparsync.Handle, action: Callable[[], None]) -> None:
    """Do something when all messages of an exchange are there, and before they are looked at."""
    channel = handle._running().channel
    verify = channel.verify
    channel.verify = lambda rows: (action(), verify(rows))[1]  # type: ignore


def case_frozen(rank: int, size: int, method: str, moment: str, folder: str) -> dict[str, Any]:
    """Rank 0 freezes; whoever of the others comes last lets it go on."""
    place, model = Path(folder), Chain(SIZES)
    ddp = DistributedDataParallel(model, **SMALL_BUCKETS)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3) if method == "sketches" else None
    handle = sparsync.attach(ddp, optimizer=optimizer, deadline=DEADLINE, **METHODS[method])
    for step in range(0 if moment == "first step" else 2):
        loss_of(ddp, rank, step).backward()
    loss = loss_of(ddp, rank, 2)
    torch.distributed.barrier()
    if moment == "cause":  # one of the messages says that its rank has failed
        before_headers(handle, freeze if rank == 0 else lambda: time.sleep(0.5))
        if rank == 1:
            handle._running().worker.feedback.memory = lambda *_: (_ for _ in ()).throw(MemoryError("no room"))  # type: ignore
    if rank == 0:
        (place / "pid").write_text(str(os.getpid()))
        if moment == "backward":  # the last layers have sent their gradients when this one's come
            model.get_parameter("layer1.weight").register_hook(lambda _: freeze())
        elif moment != "cause":
            freeze()
    began = time.monotonic()
    failed, _ = error_of(loss.backward)
    took = time.monotonic() - began
    answer = error_of(handle.check)
    if rank != 0:
        (place / f"survivor {rank}").touch()
        if all((place / f"survivor {other}").exists() for other in range(1, size)):
            os.kill(int((place / "pid").read_text()), signal.SIGCONT)
    handle.detach()
    del ddp, loss
    gc.collect()
    return {"failed": failed, "took": took, "error": answer}


def assert_all_raised(outcomes: list[tuple[bool, Any]]) -> None:
    assert all(finished for finished, _ in outcomes), outcomes
    for rank, (_, answer) in enumerate(outcomes):
        assert answer["failed"] == "RuntimeError", (rank, answer)
        assert answer["error"][0] in ("PeerLost", "PeerFailed"), (rank, answer)
        if rank:
            assert answer["took"] < 2 * DEADLINE, (rank, answer)


@pytest.mark.parametrize(
    ("method", "moment"),
    [
        ("allgather", "backward"),
        pytest.param("allgather", "between steps", marks=pytest.mark.slow),
        pytest.param("allgather", "first step", marks=pytest.mark.slow),
        pytest.param("shared", "backward", marks=pytest.mark.slow),
        pytest.param("dense", "between steps", marks=pytest.mark.slow),
        pytest.param("gtopk", "between steps", marks=pytest.mark.slow),
        pytest.param("balanced", "backward", marks=pytest.mark.slow),
        pytest.param("sketches", "backward", marks=pytest.mark.slow),
        ("sketches", "between steps"),
    ],
)
def test_survivors_raise_when_the_host_of_the_store_is_frozen(method: str, moment: str, tmp_path: Path) -> None:
    outcomes = World.once(3, case_frozen, timeout=60.0, method=method, moment=moment, folder=str(tmp_path))
    assert_all_raised(outcomes)
    for _, answer in outcomes[1:]:
        assert "the store does not answer" in answer["error"][1]


def test_a_cause_that_the_frozen_store_holds_is_not_waited_for(tmp_path: Path) -> None:
    outcomes = World.once(3, case_frozen, timeout=60.0, method="allgather", moment="cause", folder=str(tmp_path))
    assert_all_raised(outcomes)
    assert outcomes[1][1]["error"] == ("PeerFailed", "rank 1: failed to compress bucket 0: MemoryError: no room")
    assert outcomes[2][1]["error"][0] == "PeerFailed"
    assert outcomes[2][1]["error"][1].startswith("rank 1 failed, and the store does not answer")


def case_frozen_before_attach(rank: int, size: int, folder: str) -> tuple[tuple[str, str], float]:
    """Rank 0 freezes when the others attach."""
    place, ddp = Path(folder), DistributedDataParallel(Chain(SIZES))
    torch.distributed.barrier()
    if rank == 0:
        (place / "pid").write_text(str(os.getpid()))
        freeze()
        return ("none", ""), 0.0
    time.sleep(0.5)
    began = time.monotonic()
    answer = error_of(sparsync.attach, ddp, "topk", density=0.05, deadline=DEADLINE)
    took = time.monotonic() - began
    (place / f"survivor {rank}").touch()
    if all((place / f"survivor {other}").exists() for other in range(1, size)):
        os.kill(int((place / "pid").read_text()), signal.SIGCONT)
    return answer, took


def test_attach_raises_when_the_host_of_the_store_is_frozen(tmp_path: Path) -> None:
    outcomes = World.once(3, case_frozen_before_attach, timeout=60.0, folder=str(tmp_path))
    for finished, answer in outcomes[1:]:
        assert finished, outcomes
        (kind, text), took = answer
        assert kind == "PeerLost"
        assert "the store does not answer" in text
        assert took < 2 * DEADLINE


def case_short_freeze(rank: int, size: int, folder: str) -> list[bytes]:
    """Rank 0 freezes for less than the deadline, long enough for the others to ask the store in vain."""
    place, model = Path(folder), Chain(SIZES)
    ddp = DistributedDataParallel(model, **SMALL_BUCKETS)
    handle = sparsync.attach(ddp, "topk", density=0.05, deadline=10 * DEADLINE, **ALL_SPARSE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(ddp, rank, step)
        if step == 1 and rank == 0:
            (place / "pid").write_text(str(os.getpid()))
            freeze()
        if step == 1 and rank == 2:
            waker = threading.Timer(3.0, lambda: os.kill(int((place / "pid").read_text()), signal.SIGCONT))
            waker.start()
        loss.backward()
        optimizer.step()
    handle.check()
    assert not handle._running().channel.monitor.store.silent
    handle.detach()
    return [bits([p]) for p in model.parameters()]


def test_a_short_freeze_ends_nothing(tmp_path: Path) -> None:
    outcomes = World.once(3, case_short_freeze, timeout=60.0, folder=str(tmp_path))
    assert all(finished for finished, _ in outcomes), outcomes
    assert outcomes[0] == outcomes[1] == outcomes[2]
