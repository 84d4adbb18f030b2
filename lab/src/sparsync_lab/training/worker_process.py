"""The process of one local worker: it answers calls that come over a pipe."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


@dataclass(frozen=True)
class Worker:
    """What a called function is given first.

    Args:
        rank: of this worker.
        count: number of workers.
        report: sends a number to the process that called, from rank 0 only.
    """

    rank: int
    count: int
    report: Callable[[int], None] = lambda value: None


class Failure(NamedTuple):
    """An exception in a worker.

    Args:
        time: ``time.monotonic``, the same clock for all processes of a machine.
        user_error: whether the user can put it right: a ``ValueError`` or an ``OSError``.
    """

    time: float
    user_error: bool
    message: str
    traceback: str


def serve(rank: int, count: int, variables: dict[str, str], pipe: Connection) -> None:
    """Answer calls until there are no more, as one of the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends us
    exit_with_parent()
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ.update(variables, **{name: str(value) for name, value in own.items()})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    torch.set_num_threads(1)
    gc.freeze()  # what was imported, dynamo above all, need not be looked through after each call
    worker = Worker(rank, count, (lambda value: pipe.send(("report", value))) if rank == 0 else lambda value: None)
    for call in _calls(pipe):
        try:
            function, args, keywords = call
            pipe.send(("result", function(worker, *args, **keywords)))
        except BaseException as error:
            user_error = isinstance(error, ValueError | OSError)
            failure = Failure(time.monotonic(), user_error, str(error), traceback.format_exc())
            with contextlib.suppress(OSError):  # the parent may be gone
                pipe.send(("failed", failure))
        gc.collect()  # DDP models must be gone before the process group is
    if dist.is_initialized():
        dist.destroy_process_group()


def _calls(pipe: Connection) -> Iterator[Any]:
    while (call := pipe.recv()) is not None:
        yield call


def exit_with_parent() -> None:
    """End this process when the one that asked for it ends, however that happens."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="exit with parent", daemon=True).start()
