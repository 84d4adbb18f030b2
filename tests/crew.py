"""Processes that are killed, frozen and started anew while others go on; the test itself hosts their store."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from sparsync_lab.training.worker_process import LOOPBACK, exit_with_parent
from tests.world import fork_server

LIMIT = 120.0  # seconds, for a process that hangs


class Crew:
    """Processes with one store. A case is a function of a ``tests`` module: ``case(store, **arguments)``."""

    def __init__(self) -> None:
        self.context = fork_server()
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.members: list[tuple[Any, Connection]] = []

    def start(self, case: Callable[..., Any], rank: int, workers: int, **arguments: Any) -> int:
        """Start a process as this rank of so many, or on its own: rank 0 of 1; return its number."""
        ours, theirs = self.context.Pipe()
        where = self.store.port, rank, workers
        process = self.context.Process(target=_serve, args=(case, where, arguments, theirs), daemon=True)
        process.start()
        theirs.close()
        self.members.append((process, ours))
        return len(self.members) - 1

    def signal(self, member: int, number: signal.Signals) -> None:
        os.kill(self.members[member][0].pid, number)

    def wait_for(self, key: str) -> str:
        """Wait until a process has written a key."""
        until = time.monotonic() + LIMIT
        while not self.store.check([key]):
            assert time.monotonic() < until, f"nobody says {key}"
            time.sleep(0.01)
        return bytes(self.store.get(key)).decode()

    def result(self, member: int) -> Any:
        """Return what a process returns; its exit code as a text, if it died."""
        process, pipe = self.members[member]
        assert pipe.poll(LIMIT), f"process {member} has not answered"
        try:
            fine, value = pipe.recv()
        except (EOFError, ConnectionResetError):
            process.join(5)
            return f"died with exit code {process.exitcode}"
        assert fine, value
        return value

    def answered(self, member: int) -> bool:
        """Return whether a process has returned, or has died."""
        return self.members[member][1].poll(0)

    def results(self) -> list[Any]:
        """Return those of all."""
        return [self.result(member) for member in range(len(self.members))]

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for process, _pipe in self.members:
            process.kill()
            process.join()


def _serve(case: Callable[..., Any], where: tuple[int, int, int], arguments: dict[str, Any], pipe: Connection) -> None:
    exit_with_parent()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    torch.set_num_threads(1)
    try:
        port, rank, workers = where
        store = TCPStore("127.0.0.1", port, is_master=False)
        own = PrefixStore(f"start {workers}" if workers > 1 else f"alone {os.getpid()}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=workers)
        pipe.send((True, case(store, **arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
