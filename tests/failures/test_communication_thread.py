"""Exchanges run on one thread of their own, which ends with ``detach()``, or before the interpreter does."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import tracemalloc
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from sparsync import AllGather, GTopK, TopK
from sparsync.collectives import Channel
from sparsync.wire import Wire
from sparsync.workspace import Workspace
from sparsync_lab.training.local_workers import free_port
from tests.failures.ddp_training import ALL_SPARSE, Chain, loss_of, training
from tests.methods import worker


@dataclass(frozen=True)
class NotesWhereItRuns(AllGather):
    """Notes the threads and process groups it runs on."""

    def reduce(self, *args: Any) -> Any:
        THREADS.add(threading.current_thread().name)
        GROUPS.append(args[2].group)
        return super().reduce(*args)


THREADS: set[str] = set()
GROUPS: list[dist.ProcessGroup] = []


def case_many_buckets(rank: int, size: int) -> None:
    model = Chain((16,) * 31)
    with training(model, TopK(0.05), {"bucket_cap_mb": 0.001}, collective=NotesWhereItRuns(), **ALL_SPARSE) as run:
        THREADS.clear()
        GROUPS.clear()
        for step in range(5):
            run.step(lambda m, step=step: loss_of(m, rank, step))
        assert len(run.buckets()) >= 30
        assert {"sparsync"} == THREADS
        assert len(set(map(id, GROUPS))) == 1
        assert GROUPS[0] not in (dist.group.WORLD, run.ddp.process_group)
        GROUPS.clear()


@pytest.mark.parametrize("size", [2, 3])
def test_many_buckets_do_not_hang(worlds: Any, size: int) -> None:
    """All exchanges run on one thread and in a process group of our own."""
    worlds[size].run(case_many_buckets)


def case_many_messages(rank: int, size: int, exchanges: int) -> tuple[int, int, int, list[str]]:
    """Threads started by 100 exchanges, then growth of memory over more: Python's in bytes, the process's in KB."""
    channel = Channel(dist.group.WORLD, Wire(), 60.0)
    one, workspace = worker("topk", [100], density=0.05, rank=rank), Workspace()
    sent = one.send(torch.ones(100))
    started, start = 0, threading.Thread.start

    def count(thread: threading.Thread) -> None:
        nonlocal started
        started += 1
        start(thread)

    def exchange(times: int) -> tuple[int, int]:
        for _ in range(times):
            GTopK().reduce(sent, one.layout, channel, workspace)
        gc.collect()
        return tracemalloc.get_traced_memory()[0], psutil.Process().memory_info().rss // 1024

    tracemalloc.start()
    threading.Thread.start = count  # type: ignore[method-assign]
    try:
        exchange(100)
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
    before = exchange(1200)  # PyTorch keeps a record of the last 2,000 messages
    parts = [before, *(exchange(exchanges // 3) for _ in range(3))]
    tracemalloc.stop()
    channel.close()
    ours = [thread for thread in threading.enumerate() if thread.name == "sparsync message"]
    for thread in ours:
        thread.join(10)
    # A leak grows in every part; what an allocator takes at once, such as a page of 2 MB, in one of them.
    process = 3 * min(b[1] - a[1] for a, b in pairwise(parts))
    return started, parts[-1][0] - before[0], process, [t.name for t in ours if t.is_alive()]


@pytest.mark.parametrize("exchanges", [1500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_messages_between_two_ranks_leave_nothing_behind(worlds: Any, exchanges: int) -> None:
    """Neither threads nor memory, however many there are: of 10,000, not 52 bytes each."""
    for started, python, process, alive in worlds[2].run(case_many_messages, timeout=500.0, exchanges=exchanges):
        assert started <= 1
        assert python < 60_000
        assert process < 512
        assert not alive


BEGIN = """
import atexit
import gc
import os
import signal
import threading
import time

@atexit.register  # before the library is imported: it comes after what that does at the end
def tell():
    print("still running:", [thread.name for thread in threading.enumerate() if "sparsync" in thread.name])

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import sparsync

dist.init_process_group("gloo")
torch.set_num_threads(1)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 30)), bucket_cap_mb=0.002)
sync = sparsync.attach(ddp, "topk", density=0.01)
for _ in range(3):
    ddp(torch.randn(4, 50)).square().mean().backward()
"""
DETACHED = """
sync.detach()
del ddp
gc.collect()
dist.destroy_process_group()
print("the end")
"""
# The thread calls torch and comes back, time and again, as after a last step that it has not quite ended.
BUSY = """
def work():
    until = time.monotonic() + 1
    while time.monotonic() < until:
        store.check(["nothing"])

store = dist.HashStore()
sync._running()._comm_thread.submit(work)
print("the end")
"""
# A rank ends by an error of its own, while its thread waits for the other, which is frozen.
WAITING = """
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
sync._running().channel.monitor.patience = 0.001
print("the end", flush=True)

def fail(grad):
    time.sleep(0.1)
    raise ZeroDivisionError

ddp.module[0].weight.register_hook(fail)
ddp(torch.randn(4, 50)).square().mean().backward()
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param(DETACHED, 0, id="detached", marks=pytest.mark.slow),
        pytest.param(BUSY, 0, id="busy"),
        pytest.param(WAITING, 1, id="waiting for a frozen rank"),
    ],
)
def test_scripts_end_without_an_abort(tmp_path, end: str, code: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(BEGIN + end)
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)], env=os.environ | world | {"RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in ranks[: 1 if end == WAITING else 2]:
            shown, errors = process.communicate(timeout=240)
            assert (process.returncode, shown) == (code, "the end\nstill running: []\n"), errors
            assert code == 0 or "ZeroDivisionError" in errors
    finally:
        for process in ranks:
            process.kill()
