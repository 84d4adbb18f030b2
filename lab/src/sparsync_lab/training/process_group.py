"""Torch's process group for a training, and workers that ``torchrun`` has started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from sparsync_lab.training.local_workers import Worker

INPUT = 2  # exit code for what the user can put right
GRACE = 3.0  # seconds


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Join torch's default group of all workers: NCCL if each has a GPU of its own, else Gloo."""
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local_workers = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    # torchrun keeps one store for all its starts, and torch reads from it where workers were that have ended since.
    store, rank, workers = next(rendezvous("env://"))
    store = PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    if torch.cuda.device_count() >= local_workers and dist.is_nccl_available():
        torch.cuda.set_device(local_rank)
        gpu = torch.device("cuda", local_rank)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=workers, device_id=gpu)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    yield
    dist.barrier()
    dist.destroy_process_group()


def launched() -> bool:
    """Return whether ``torchrun``, or another launcher that sets torch's variables, has started this process."""
    return {"RANK", "WORLD_SIZE"} <= set(os.environ)


def launch_name() -> str | None:
    """Return what all workers that one ``torchrun`` starts, again after a failure as well, have in common.

    That is its ``--rdzv-id``, on several machines too, else its process. Other launchers start workers once: ``None``.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name != "none":
        return name
    launcher = psutil.Process(os.getppid())
    return f"process {launcher.pid} on {socket.gethostname()}, started at {launcher.create_time()}"


def run_launched(function: Callable[..., None], *args: Any) -> None:
    """Run ``function(worker, *args)`` as one of the workers that a launcher has started.

    If it raises, print why to stderr and end this process with exit code 2 or 1.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once, wherever we are: nothing needs to be put in order
    torch.set_num_threads(1)
    worker = Worker(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    try:
        function(worker, *args)
    except Exception as error:
        user_error = isinstance(error, ValueError | OSError)
        if not user_error or int(os.environ.get("LOCAL_RANK", "0")):
            # What we see may be the end of another worker, or all may say the same: let the first one be heard.
            time.sleep(GRACE)
        print(f"sparsync: {error if user_error else traceback.format_exc()}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INPUT if user_error else 1)  # Gloo's threads would not survive an orderly end
