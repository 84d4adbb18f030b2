"""Real Gloo processes for tests: a world is started once and runs many cases.

A case is a plain function of a ``tests`` module, ``case(rank, size, **arguments)``; what it returns on every rank comes
back as a list. A case that ends processes or leaves them waiting runs in a world of its own (``World.once``).
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from typing import Any

import torch
import torch.distributed as dist

from sparsync_lab.training import local_workers as workers

# What ranks, and the workers of a training in a test's own process, find imported.
PRELOAD = [*workers.PRELOAD, "sparsync_lab.cli.train", "sklearn.datasets", "hypothesis", "pytest"]
LIMIT = 120.0  # seconds, for a case that hangs; a machine may be busy


def fork_server() -> ForkServerContext:
    """The one process that they are forked from; to be asked for before anything else starts one."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ensure_running()
    return context


class CaseFailed(AssertionError):
    """A case raised on some ranks; the text holds their tracebacks."""


class World:
    """``size`` processes in one Gloo group."""

    def __init__(self, size: int) -> None:
        self.size = size
        context = fork_server()
        port = _free_port()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, case: Callable[..., Any], *, timeout: float = LIMIT, **arguments: Any) -> list[Any]:
        """Run ``case`` on every rank; its results in rank order. Raises if it raised on any rank."""
        answers = self.outcome(case, timeout=timeout, **arguments)
        broken = [f"--- rank {rank}\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if broken:
            raise CaseFailed(f"{case.__name__} failed on {len(broken)} of {self.size} ranks\n" + "\n".join(broken))
        return [value for _, value in answers]

    def outcome(self, case: Callable[..., Any], *, timeout: float = LIMIT, **arguments: Any) -> list[tuple[bool, Any]]:
        """``(finished, result or traceback)`` of every rank; a rank that died or never answers has not finished."""
        for pipe in self.pipes:
            pipe.send((case.__module__, case.__qualname__, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        until = time.monotonic() + timeout
        while len(answers) < self.size:
            open_pipes = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready = wait(list(open_pipes), timeout=max(0.0, until - time.monotonic()))
            for pipe in ready:
                rank = open_pipes[pipe]  # type: ignore[index]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(5)
                    answers[rank] = (False, f"died with exit code {self.processes[rank].exitcode}")
            if not ready:
                for rank in open_pipes.values():
                    answers[rank] = (False, f"no answer within {timeout} s")
        return [answers[rank] for rank in range(self.size)]

    @classmethod
    def once(
        cls, size: int, case: Callable[..., Any], *, timeout: float = LIMIT, **arguments: Any
    ) -> list[tuple[bool, Any]]:
        """The outcome of one case in a world of its own."""
        world = cls(size)
        try:
            return world.outcome(case, timeout=timeout, **arguments)
        finally:
            world.close()

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.interpreter import quicken

        quicken()
    gc.freeze()  # what was there before the cases, dynamo above all, need not be looked through after each of them
    dist.init_process_group("gloo", rank=rank, world_size=size)
    while (job := pipe.recv()) is not None:
        module, name, arguments = job
        try:
            torch.manual_seed(rank)
            case = getattr(__import__(module, fromlist=[name]), name)
            pipe.send((True, case(rank, size, **arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        gc.collect()
    dist.destroy_process_group()
