"""A rank that is killed, stalls or never attaches is named by the others before the deadline has long passed."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import PeerLost, SparsyncError, TopK
from sparsync.collectives import Channel
from sparsync.collectives.comm.bounded_store import BoundedStore, StoreSilent
from sparsync.collectives.comm.store_monitor import StoreMonitor
from sparsync.wire import Wire
from tests.failures.checked_training import inputs, mlp, square, train
from tests.failures.ddp_training import (
    ALL_SPARSE,
    SIZES,
    SMALL_BUCKETS,
    Chain,
    assert_replicas_equal,
    local_gradients,
    loss_of,
    training,
)
from tests.failures.reducers import error_of
from tests.models import net
from tests.world import World


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


def test_a_stalled_rank_is_named_at_the_deadline() -> None:
    outcomes = World.once(3, case_stalled)
    assert all(ok for ok, _ in outcomes), outcomes
    (kind, text, seconds), (kind_1, text_1, seconds_1), _ = (result for _, result in outcomes)
    assert kind == kind_1 == PeerLost.__name__
    assert text == text_1
    assert text.endswith("no answer within 4 s; ranks not heard from: 2")
    assert max(seconds, seconds_1) < 20


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


def test_a_rank_that_never_attaches_is_named() -> None:
    outcomes = World.once(3, case_missing_at_attach)
    kind, text = outcomes[0][1]
    assert kind == "PeerLost"
    assert text.endswith("no answer within 4 s; ranks not heard from: 1")
    assert outcomes[2] == outcomes[0]


def case_rank_goes_away(rank: int, size: int, victim: int, stall: float, deadline: float) -> Any:
    """After two good steps ``victim`` ends at once, or sleeps for ``stall`` seconds."""
    ddp = DistributedDataParallel(mlp(), bucket_cap_mb=0.001)
    handle = sparsync.attach(ddp, "topk", density=0.02, transactional=True, deadline=deadline)
    batches = inputs(rank, 8, 40)
    train(ddp, handle, batches[:2])
    before = handle.state_dict()["residuals"]
    output = ddp(batches[2])
    dist.barrier()
    if rank == victim:
        if not stall:
            os._exit(9)
        time.sleep(stall)
    began = time.monotonic()
    failed, _ = error_of(square(output).backward)
    took = time.monotonic() - began
    answer = error_of(handle.check)
    again = error_of(ddp, batches[3])
    after = handle.state_dict()["residuals"]
    undone = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    handle.detach()
    del ddp, output
    gc.collect()
    return {"failed": failed, "took": took, "error": answer, "again": again, "undone": undone}


def assert_lost(answers: Sequence[tuple[bool, Any]], survivors: Sequence[int], within: float, says: str) -> None:
    for rank in survivors:
        finished, answer = answers[rank]
        assert finished, answer
        assert answer["failed"] == "RuntimeError"
        assert answer["took"] < within
        kind, text = answer["error"]
        assert kind == PeerLost.__name__
        assert says in text, text
        assert answer["again"][0] == "StepFailed"
        assert says in answer["again"][1]
        assert answer["undone"], "the failed step is in the residual that would be saved"


@pytest.mark.parametrize(
    ("victim", "says"), [(2, "ranks not heard from: 2"), (0, "the store is gone, and with it rank 0")]
)
def test_a_killed_rank_is_named(victim, says):
    answers = World.once(3, case_rank_goes_away, victim=victim, stall=0.0, deadline=60.0)
    assert answers[victim] == (False, "died with exit code 9")
    assert_lost(answers, [rank for rank in range(3) if rank != victim], within=40.0, says=says)


def case_killed_between_buckets(rank: int, size: int) -> tuple[str, str]:
    """Rank 2 dies when its first bucket has come; of the others' parameters each has its gradient, or has not."""
    model = Chain(SIZES)
    with training(model, TopK(0.05), SMALL_BUCKETS, check=False, deadline=60, **ALL_SPARSE) as run:
        for step in range(2):
            run.step(lambda m, step=step: loss_of(m, rank, step))
        before, came = run.residuals(), local_gradients(model, lambda m: loss_of(m, rank, 2))
        if rank == 2:  # by then layer 3 has been pushed
            model.get_parameter("layer1.weight").register_hook(lambda _: os._exit(9))
        run.optimizer.zero_grad()
        with pytest.raises(RuntimeError):
            loss_of(run.ddp, rank, 2).backward()
        answer, after = error_of(run.handle.check), run.residuals()
        entered = [n for n in before if torch.allclose(after[n], before[n] + came[n], rtol=1e-5, atol=1e-6)]
        assert {"layer3.weight", "layer3.bias"} <= {*entered}
        assert all(torch.equal(after[name], before[name]) for name in before if name not in entered)
    return answer


def test_the_residual_is_whole_after_a_kill() -> None:
    """What was sent comes home, also where steps cannot be undone: a checkpoint holds all that came in."""
    outcomes = World.once(3, case_killed_between_buckets)
    assert outcomes[2] == (False, "died with exit code 9")
    for finished, answer in outcomes[:2]:
        assert finished, answer
        kind, text = answer
        assert kind == PeerLost.__name__
        assert re.match(r"exchange \d+, bucket \d+: .*ranks not heard from: 2$", text), text


def test_a_rank_that_wakes_after_the_deadline_gets_the_same_error():
    answers = World.once(3, case_rank_goes_away, victim=1, stall=6.0, deadline=4.0)
    assert_lost(answers, [0, 2], within=20.0, says="no answer within 4 s; ranks not heard from: 1")
    finished, late = answers[1]  # the one that slept finds out too, and with the same words
    assert finished, late
    assert late["error"] == answers[0][1]["error"] == answers[2][1]["error"]


class GoneInBetween:
    """A store that is gone when the alarm is read that it was just asked for."""

    def set(self, name: str, value: str) -> None: ...

    def check(self, names: list[str]) -> bool:
        return True

    def compare_set(self, *names: str) -> bytes:
        raise dist.DistNetworkError("gone")  # type: ignore[attr-defined]


def test_an_alarm_that_cannot_be_read_any_more_says_so() -> None:
    monitor = StoreMonitor(GoneInBetween(), 1, 2, 8.0)  # type: ignore[arg-type]
    with pytest.raises(PeerLost, match=r"exchange 7: an error was broadcast.* the store is gone, and with it rank 0"):
        monitor.wait(lambda seconds: False, "exchange 7")
    monitor.close()


UNUSABLE = [float("inf"), float("nan"), 0, -1.0, 1e12, "soon"]


@pytest.mark.parametrize("deadline", UNUSABLE, ids=str)
def test_a_deadline_that_is_no_time_to_wait_is_refused(deadline: Any) -> None:
    with pytest.raises(ValueError, match=r"deadline must be above 0 seconds and at most a year"):
        sparsync.comm_hook(net(), "topk", deadline=deadline)
    with pytest.raises(ValueError, match=r"deadline must be above 0 seconds and at most a year"):
        Channel(None, Wire(), deadline)


def case_unusable_deadlines(rank: int, size: int) -> list[str]:
    ddp = DistributedDataParallel(net())
    said = [error_of(sparsync.attach, ddp, "topk", deadline=deadline)[0] for deadline in UNUSABLE]
    sync = sparsync.attach(ddp, "topk", deadline=365 * 24 * 3600)  # and the model is as it was
    sync.detach()
    del ddp
    gc.collect()
    return said


def test_attach_refuses_such_a_deadline_on_every_rank(worlds: dict[int, World]) -> None:
    assert worlds[2].run(case_unusable_deadlines) == 2 * [len(UNUSABLE) * ["ValueError"]]


def test_ranks_that_wait_for_different_things_are_told_so() -> None:
    store = HashStore()

    def wait(rank: int) -> tuple[str, str]:
        monitor = StoreMonitor(store, rank, 2, 2.0)
        try:
            return error_of(monitor.wait, lambda seconds: time.sleep(seconds), f"step {rank}")
        finally:
            monitor.close()

    with ThreadPoolExecutor() as pool:
        for kind, text in pool.map(wait, range(2)):
            assert kind == "Mismatch"
            assert text.startswith("where the ranks wait differs: ")
            assert all(f"rank {rank} waits at step {rank}" in text for rank in range(2))


@pytest.mark.parametrize(("seconds", "says"), [(0.4, "ranks not heard from: 1"), (60.0, "the store does not answer")])
def test_a_store_that_is_late_is_not_taken_for_frozen(seconds: float, says: str) -> None:
    """At the deadline of a wait, and before the votes: an answer that comes within the grace is waited for, once."""
    monitor, began, over = StoreMonitor(HashStore(), 0, 2, 4.0), time.monotonic(), threading.Event()  # a grace of 1 s
    monitor.leave_vote(7)
    looks = iter(range(100))

    def be_late(seconds: float) -> None:
        with pytest.raises(StoreSilent):
            monitor.store.ask(lambda _: over.wait(seconds), 0.01)

    def never(limit: float) -> bool:
        time.sleep(limit)
        if next(looks) == 4:  # a second before it looks who is missing
            be_late(1.0 + seconds)
        return False

    with pytest.raises(PeerLost, match=says):
        monitor.wait(never, "here")
    assert time.monotonic() - began < 6.0
    if seconds < 1:
        be_late(seconds)
        assert monitor.collect_votes() == {0: 7}
    else:
        began = time.monotonic()
        with pytest.raises(StoreSilent):
            monitor.collect_votes()
        assert time.monotonic() - began < 0.5
    over.set()
    monitor.close()


def test_a_wait_for_the_store_that_runs_out_is_in_time_and_silent(capfd: pytest.CaptureFixture[str]) -> None:
    """Torch's own prints warnings, and looks up the names of hosts for them, which may take seconds."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store, began = BoundedStore(TCPStore("127.0.0.1", server.port, is_master=False)), time.monotonic()
    assert not any(store.appear(["never"], 0.1) for _ in range(5))
    assert 0.3 < time.monotonic() - began < 2.0
    server.set("now", "")
    assert store.appear(["now"], 0.1)
    store.close()
    assert "waitForInput" not in capfd.readouterr().err
