"""Worker processes on this machine: forked from one server, called over pipes, ended together.

This is the one way in which tests, ``train``, ``compare``, ``demo`` and the benchmarks start workers.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from sparsync_lab.training.worker_process import Failure, Worker, serve

__all__ = ["PRELOAD", "LocalWorkers", "Message", "Worker", "WorkerFailed", "fork_server", "join_gloo", "run_jobs"]

# Imported once, by the process the workers are forked from; DDP imports the second when it is first used.
PRELOAD = ("sparsync", "torch._dynamo")
GRACE = 1.0  # seconds in which the other workers may report once one has failed
LONGEST = 70  # bytes of a temporary folder's name: with 32 for a socket in it, what every system takes
STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class WorkerFailed(RuntimeError):
    """A worker raised, or ended before its work was done; the text says which and why."""

    exit_code = 1  # the command line ends with this code and the text

    def format_message(self) -> str:
        return str(self)


class Message(NamedTuple):
    """What a worker sends: kind ``"report"``, ``"result"``, ``"failed"`` (a ``Failure``), ``"ended"`` (exit code)."""

    rank: int
    kind: str
    value: Any


class LocalWorkers:
    """Start ``count`` processes that wait to be called; at the end of a ``with`` block none of them is left.

    Each has one thread and torch's variables (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ...) set, and ends when this
    process does. They have no process group until a called function joins one.

    Args:
        preload: modules that the workers find imported.
        store_on_rank_0: rank 0 hosts the store of the process group; otherwise this process does, so that no failing
            rank takes it along.
    """

    def __init__(self, count: int, preload: Sequence[str] = PRELOAD, store_on_rank_0: bool = False) -> None:
        self.count = count
        self.processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._handlers: dict[signal.Signals, Any] = {}
        context = fork_server(preload)
        self._store: TCPStore | None = None
        if not store_on_rank_0:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port() if self._store is None else self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": str(self._store is not None),  # torch: the store is there already
        }
        try:
            for rank in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, args=(rank, count, variables, theirs), daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                self._pipes.append(ours)
        except BaseException:
            self.kill()
            raise

    def run(
        self, function: Callable[..., Any], *args: Any, progress: Callable[[int], None] = lambda value: None
    ) -> list[Any]:
        """Call ``function(worker, *args)`` on every worker and return the results in rank order.

        Raises ``ValueError`` in a worker's own words if the user can put it right, else ``WorkerFailed``.

        Args:
            progress: is called with what rank 0 reports.
        """
        self.call(function, *args)
        busy, until = set(range(self.count)), math.inf
        results: dict[int, Any] = {}
        failures: list[Message] = []
        while busy and time.monotonic() < until:
            for message in self.receive(busy, None if math.isinf(until) else max(0.0, until - time.monotonic())):
                if message.kind == "report":
                    progress(message.value)
                    continue
                busy.discard(message.rank)
                if message.kind == "result":
                    results[message.rank] = message.value
                else:
                    failures.append(message)
                    until = min(until, time.monotonic() + GRACE)
        if failures:
            raise _cause(failures)
        return [results[rank] for rank in range(self.count)]

    def call(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> None:
        """Let every worker begin with ``function(worker, *args, **keywords)``."""
        for pipe in self._pipes:
            pipe.send((function, args, keywords))

    def receive(self, ranks: Collection[int], timeout: float | None) -> list[Message]:
        """Wait until one of these workers sends something and return it; nothing once the timeout is over."""
        pipes = {self._pipes[rank]: rank for rank in ranks}
        messages = []
        for pipe in wait(list(pipes), timeout):
            assert isinstance(pipe, Connection)
            rank = pipes[pipe]
            try:
                messages.append(Message(rank, *pipe.recv()))
            except (EOFError, ConnectionResetError):
                self.processes[rank].join(5)
                messages.append(Message(rank, "ended", self.processes[rank].exitcode))
        return messages

    def close(self, patience: float = 10.0) -> None:
        """Let the workers end; kill those that have not after ``patience`` seconds."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        self.kill(patience)

    def kill(self, patience: float = 0.0) -> None:
        """Kill the workers that do not end by themselves within ``patience`` seconds."""
        until = time.monotonic() + patience
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()

    def __enter__(self) -> LocalWorkers:
        self._handlers = {number: signal.signal(number, _stop) for number in STOPPING}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handlers[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end is not left half way
        if kind is None:
            self.close()
        else:
            self.kill(0.3 if kind is KeyboardInterrupt else 0.0)  # rank 0 may be clearing its progress bar
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def run_jobs(
    task: Callable[..., Any],
    workers: int,
    jobs: Sequence[Any],
    progress: Callable[[int], None],
    preload: Sequence[str] = PRELOAD,
) -> list[Any]:
    """Run ``task(worker, job)`` for one job after another on ``workers`` processes in one Gloo group.

    Returns what rank 0 returned for each job; ``progress`` is called with what rank 0 reports.
    """
    with LocalWorkers(workers, preload) as started:
        started.run(join_gloo)
        return [started.run(task, job, progress=progress)[0] for job in jobs]


def join_gloo(worker: Worker) -> None:
    """Join the Gloo group of all workers."""
    dist.init_process_group("gloo", rank=worker.rank, world_size=worker.count)


def fork_server(preload: Sequence[str] = PRELOAD) -> ForkServerContext:
    """Return the server that workers are forked from, ready: it has imported what they need, once for all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it inherits this: Ctrl-C while it imports is for us alone
    try:
        with _room_for_sockets():
            ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)
    # Whoever starts a process waits for the imports. If Ctrl-C ends that, nothing of value is left half started.
    first = context.Process(target=os.getpid, daemon=True)
    first.start()
    first.join()
    return context


@contextlib.contextmanager
def _room_for_sockets() -> Iterator[None]:
    """Take ``/tmp`` for the temporary folder where a socket in that of the environment would have too long a name."""
    former = tempfile.gettempdir()
    if len(os.fsencode(former)) > LONGEST:
        tempfile.tempdir = "/tmp"
    try:
        yield
    finally:
        tempfile.tempdir = former


def _cause(failures: Sequence[Message]) -> BaseException:
    """Return the error to raise: of a worker that was killed, else of the first that failed."""
    for rank, kind, value in failures:
        if kind == "ended" and value == -signal.SIGINT:
            return KeyboardInterrupt()
        if kind == "ended" and value is not None and value < 0:
            name = signal.Signals(-value).name
            return WorkerFailed(f"worker {rank} was killed by {name}, the others were stopped")
    raised: list[tuple[Failure, int]] = sorted((value, rank) for rank, kind, value in failures if kind == "failed")
    for failure, _ in raised:
        if failure.user_error:
            return ValueError(failure.message)
    for failure, rank in raised:
        return WorkerFailed(f"worker {rank} failed:\n{failure.traceback.rstrip()}")
    return WorkerFailed(f"worker {failures[0].rank} ended with code {failures[0].value} before its work was done")


def _stop(number: int, frame: object) -> None:
    raise WorkerFailed(f"stopped by {signal.Signals(number).name}")


def free_port() -> int:
    """Return a port that nobody listens at, below those that the system gives to outgoing connections: so none of these
    takes it before it is used."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port found from 10,000 to 32,000")
