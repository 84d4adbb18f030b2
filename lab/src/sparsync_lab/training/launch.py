"""Worker processes that train: torch's elastic launcher starts them here, or ``torchrun`` has started this one."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from sparsync_lab.training.local_workers import PRELOAD, WorkerFailed, end_with_parent, fork_server

INPUT = 2  # exit code of a worker for what the user can put right
GRACE = 3.0  # seconds
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # by the launcher


def launched() -> bool:
    """Whether ``torchrun``, or another launcher that sets torch's variables, has started this process."""
    return {"RANK", "WORLD_SIZE"} <= set(os.environ)


def launch(task: Callable[..., None], workers: int, *args: Any, preload: Sequence[str] = ()) -> None:
    """Run ``task(*args)`` on ``workers`` processes of this machine, each with torch's variables set.

    Raises ``ValueError`` with a worker's own words if the user can put it right, else ``WorkerFailed``. However this
    function is left, no worker outlives it.

    Args:
        preload: modules that the workers need, imported once for all.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    fork_server([*PRELOAD, *preload])
    with tempfile.TemporaryDirectory(prefix="sparsync-") as scratch, _supervising():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id="sparsync",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(scratch),
        )
        try:
            elastic_launch(config, _enter)(task, args, scratch)
        except SignalException as stopped:
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise WorkerFailed(f"stopped by {stopped.sigval.name}") from None
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            _explain(rank, failure.exitcode, Path(scratch))


def run_worker(task: Callable[..., None], args: Sequence[Any], tell: Callable[[int, str], None]) -> None:
    """Run ``task(*args)`` as one of the workers; if it raises, ``tell(exit code, why)`` and end this process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once, wherever we are: nothing needs to be put in order
    torch.set_num_threads(1)
    try:
        task(*args)
    except Exception as error:
        known = isinstance(error, ValueError | OSError)
        if not known or int(os.environ.get("LOCAL_RANK", "0")):
            # What we see may be the end of another worker, or all workers may say the same: let the first one be heard.
            time.sleep(GRACE)
        tell(INPUT if known else 1, str(error) if known else traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INPUT if known else 1)  # Gloo's threads would not survive an orderly end


@contextlib.contextmanager
def process_group() -> Iterator[tuple[int, int]]:
    """Torch's default group of all workers, as ``(rank, workers)``: NCCL if each has a GPU of its own, else Gloo."""
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local_workers = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if torch.cuda.device_count() >= local_workers and dist.is_nccl_available():
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    else:
        dist.init_process_group("gloo")
    yield dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()


def _enter(task: Callable[..., None], args: Sequence[Any], scratch: str) -> None:
    end_with_parent()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")

    def tell(code: int, why: str) -> None:
        (Path(scratch) / f"rank-{os.environ['RANK']}.json").write_text(json.dumps([code, why]), encoding="utf-8")

    run_worker(task, args, tell)


def _explain(rank: int, exit_code: int, scratch: Path) -> NoReturn:
    """Raise why the workers failed; ``rank`` was the first to end."""
    told = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(scratch.glob("rank-*.json"))}
    for code, why in told.values():
        if code == INPUT:
            raise ValueError(why)
    if exit_code == -signal.SIGINT:
        raise KeyboardInterrupt
    if exit_code < 0:
        raise WorkerFailed(f"worker {rank} was killed by {signal.Signals(-exit_code).name}, the others were stopped")
    if told:
        name, (_, why) = next(iter(told.items()))
        raise WorkerFailed(f"{name.replace('rank-', 'worker ')} failed:\n{why.rstrip()}")
    raise WorkerFailed(f"worker {rank} ended with code {exit_code} before its work was done")


@contextlib.contextmanager
def _supervising() -> Iterator[None]:
    """Keep the launcher quiet, end what it leaves behind, and take its signal handlers away again."""
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    others = set(multiprocessing.active_children())  # of whoever called us
    logging.disable(logging.CRITICAL)  # it logs a traceback for every worker that ends early
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end is near; it shall not be left half way
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
            process.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        logging.disable(logging.NOTSET)
