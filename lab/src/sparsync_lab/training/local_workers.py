"""Worker processes on this machine: started together, ended together."""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

# Imported once, by the process the workers are forked from; DDP imports the second when it is first used.
PRELOAD = ["sparsync", "torch._dynamo"]

# task(rank, workers, job, report): runs on every rank; ``report(n)`` says that n more steps are done.
Task = Callable[[int, int, Any, Callable[[int], None]], Any]


GRACE = 1.0  # seconds, to hear the others out once a worker has failed


class WorkerFailed(RuntimeError):
    """A worker raised, or ended before its work was done; the text says which and why."""

    exit_code = 1  # the command line ends with this code and the text

    def format_message(self) -> str:
        return str(self)


def run(
    task: Task,
    workers: int,
    jobs: Sequence[Any],
    progress: Callable[[int], None],
    preload: Sequence[str] = PRELOAD,
) -> list[Any]:
    """Run ``task`` for every job, one after another, on ``workers`` processes; what rank 0 returned for each.

    ``progress`` is called with the number of steps that rank 0 has done since the last call. However this function is
    left, no worker outlives it. ``preload``: modules that the workers find imported already.
    """
    context = fork_server(preload)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    try:
        for rank in range(workers):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(task, rank, workers, list(jobs), store.port, theirs))
            process.daemon = True
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            results = _listen(pipes, progress)
        except WorkerFailed as failure:
            raise _cause(processes, failure) from None
        for process in processes:
            process.join(10)
        return results
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def fork_server(preload: Sequence[str]) -> ForkServerContext:
    """The process that workers are forked from, ready: what they need has been imported there, once for all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it inherits this: Ctrl-C while it imports is for us alone
    try:
        ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)
    # Whoever starts a process waits for the imports. If Ctrl-C ends that, nothing of value is left half started.
    first = context.Process(target=os.getpid, daemon=True)
    first.start()
    first.join()
    return context


def _cause(processes: Sequence[BaseProcess], failure: WorkerFailed) -> WorkerFailed:
    """The worker that was killed, if one was: the others fail because of it, and may be heard before its end is."""
    for rank, process in enumerate(processes):
        process.join(0.5)
        if process.exitcode is not None and process.exitcode < 0:
            return WorkerFailed(f"worker {rank} was killed by {signal.Signals(-process.exitcode).name}")
    return failure


def end_with_parent() -> None:
    """End this process when the one that asked for it ends, however that happens."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def _listen(pipes: list[Connection], progress: Callable[[int], None]) -> list[Any]:
    """Hear the workers out; if one of them fails, the others do too, and the first of all is quoted."""
    results: list[Any] = []
    failures: list[tuple[float, str]] = []
    ranks = {pipe: rank for rank, pipe in enumerate(pipes)}
    until = math.inf
    while ranks and time.monotonic() < until:
        for pipe in wait(list(ranks), timeout=GRACE if failures else None):
            assert isinstance(pipe, Connection)
            try:
                kind, value = pipe.recv()
            except EOFError:
                kind, value = "failed", (0.0, "ended before its work was done")
            if kind == "steps":
                progress(value)
            elif kind == "result":
                results.append(value)
            else:
                rank = ranks.pop(pipe)
                if kind == "failed":
                    failures.append((value[0], f"worker {rank} {value[1]}"))
                    until = min(until, time.monotonic() + GRACE)
    if failures:
        raise WorkerFailed(min(failures)[1])
    return results


def _work(task: Task, rank: int, workers: int, jobs: list[Any], port: int, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends us
    end_with_parent()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    torch.set_num_threads(1)

    def report(steps: int) -> None:
        if rank == 0:
            pipe.send(("steps", steps))

    try:
        store = TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
        for job in jobs:
            result = task(rank, workers, job, report)
            if rank == 0:
                pipe.send(("result", result))
            gc.collect()  # DDP models must be gone before the process group is
        dist.barrier()
        dist.destroy_process_group()
        pipe.send(("done", None))
    except Exception:
        failed = time.monotonic()  # the same clock for all processes of a machine
        with contextlib.suppress(OSError):  # the parent may be gone
            pipe.send(("failed", (failed, f"failed:\n{traceback.format_exc()}")))
