"""Real Gloo processes for tests: a world is started once and runs many cases.

A case is a plain function of a ``tests`` module, ``case(rank, size, **arguments)``; what it returns on every rank comes
back as a list. A case that ends processes or leaves them waiting runs in a world of its own (``World.once``).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from io import StringIO
from multiprocessing.context import ForkServerContext
from typing import Any

import torch
import torch.distributed as dist

from sparsync.kernels.cpu import MODULES
from sparsync_lab.training import local_workers
from sparsync_lab.training.local_workers import LocalWorkers, Worker

# What ranks, and the workers of a training in a test's own process, find imported.
PRELOAD = [
    *local_workers.PRELOAD, "sparsync_lab.cli.train", "sklearn.datasets", "hypothesis", "pytest",
    *(f"sparsync.kernels.{module}" for module in MODULES),  # numba takes a second, of every rank
]  # fmt: skip
if os.environ.get("TRITON_INTERPRET") == "1":
    PRELOAD.append("tests.interpreter")  # so does Triton
LIMIT = 120.0  # seconds, for a case that hangs; a machine may be busy


def fork_server() -> ForkServerContext:
    """Return the one server that they are forked from; to be asked for before anything else starts one."""
    return local_workers.fork_server(PRELOAD)


class CaseFailed(AssertionError):
    """A case raised on some ranks; the text holds their tracebacks."""


class World:
    """``size`` processes in one Gloo group; rank 0 hosts its store, and takes it along when it dies."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.workers = LocalWorkers(size, PRELOAD, store_on_rank_0=True)

    def run(self, case: Callable[..., Any], *, timeout: float = LIMIT, **arguments: Any) -> list[Any]:
        """Run ``case`` on every rank and return its results in rank order. Raises if it raised on any rank."""
        answers = self.outcome(case, timeout=timeout, **arguments)
        broken = [f"--- rank {rank}\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if broken:
            raise CaseFailed(f"{case.__name__} failed on {len(broken)} of {self.size} ranks\n" + "\n".join(broken))
        return [value for _, value in answers]

    def outcome(
        self, case: Callable[..., Any], *, timeout: float = LIMIT, thaw: int | None = None, **arguments: Any
    ) -> list[tuple[bool, Any]]:
        """Return ``(finished, result or traceback)`` of every rank; one that died or never answers has not finished.

        Args:
            thaw: a rank that may stop itself (SIGSTOP); it goes on when all others have answered.
        """
        self.workers.call(_run_case, case, arguments)
        answers: dict[int, tuple[bool, Any]] = {}
        until = time.monotonic() + timeout
        while len(answers) < self.size:
            missing = [rank for rank in range(self.size) if rank not in answers]
            if missing == [thaw]:
                os.kill(self.workers.processes[thaw].pid or 0, signal.SIGCONT)
            messages = self.workers.receive(missing, max(0.0, until - time.monotonic()))
            for rank, kind, value in messages:
                if kind == "ended":
                    answers[rank] = (False, f"died with exit code {value}")
                else:
                    answers[rank] = (True, value) if kind == "result" else (False, value.traceback)
            if not messages:
                answers |= dict.fromkeys(missing, (False, f"no answer within {timeout} s"))
        return [answers[rank] for rank in range(self.size)]

    @classmethod
    def once(
        cls, size: int, case: Callable[..., Any], *, timeout: float = LIMIT, **arguments: Any
    ) -> list[tuple[bool, Any]]:
        """Return the outcome of one case in a world of its own."""
        world = cls(size)
        try:
            return world.outcome(case, timeout=timeout, **arguments)
        finally:
            world.close()

    def close(self) -> None:
        self.workers.close()


def run_forked(script: str, size: int = 1) -> list[str]:
    """Run a program on ``size`` ranks as ``torchrun`` does, but with torch imported already; return what they print."""
    with LocalWorkers(size, PRELOAD) as workers:
        return workers.run(_run_script, script)


def processes_of(session: int) -> dict[int, int]:
    """Return the living processes of a session, with their parents."""
    import psutil

    found = {}
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(pid) == session and (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                found[pid] = process.ppid()
    return found


def _run_script(worker: Worker, script: str) -> str:
    with redirect_stdout(StringIO()) as shown:
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})
    return shown.getvalue()


def _run_case(worker: Worker, case: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    if not dist.is_initialized():
        if os.environ.get("TRITON_INTERPRET") == "1":
            from tests.interpreter import quicken

            quicken()
        local_workers.join_gloo(worker)
    torch.manual_seed(worker.rank)
    return case(worker.rank, worker.count, **arguments)
