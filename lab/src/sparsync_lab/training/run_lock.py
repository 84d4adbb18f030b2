"""The lock of a run folder: one training at a time works in it.

It is the operating system's, on an open file, and ends with the process that holds it, however that ends. Who that is
stands in a file beside it, for whoever comes second.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from sparsync_lab.training.durable import replace_file

PATIENCE = 1.0  # seconds: another command may look whether the folder is free


@contextmanager
def hold_lock(folder: Path) -> Iterator[None]:
    """Lock a run folder until the end of the block; raise who holds it if it is locked already."""
    folder.mkdir(parents=True, exist_ok=True)
    with _acquired(folder):
        holder = folder / "holder.json"
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        text = json.dumps({"host": socket.gethostname(), "process": os.getpid(), "since": since})
        replace_file(holder, lambda file: file.write(text.encode()))
        try:
            yield
        finally:
            holder.unlink(missing_ok=True)


def check_unlocked(folder: Path) -> None:
    """Raise who works in a run folder, if anybody does."""
    if (folder / "lock").exists():
        with _acquired(folder):
            pass


@contextmanager
def _acquired(folder: Path) -> Iterator[None]:
    lock = FileLock(folder / "lock", thread_local=False)
    try:
        lock.acquire(timeout=PATIENCE)
    except Timeout:
        raise ValueError(f"{folder} is in use by {_holder(folder)}; wait for its end, or give another --out") from None
    try:
        yield
    finally:
        lock.release()


def _holder(folder: Path) -> str:
    try:
        holder = json.loads((folder / "holder.json").read_text(encoding="utf-8"))
        return f"process {holder['process']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has only just begun, or ends right now
        return "another process"
