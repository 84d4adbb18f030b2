"""Locks by which processes that share the trainings of an item keep out of each other's way.

A lock is the operating system's, on an open file. It ends with the process that holds it, however that ends; the file
itself stays, empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Lock ``path`` until the end of the block and yield ``True``, or ``False`` if it is held already."""
    lock = _lock(path)
    with suppress(Timeout):
        lock.acquire(timeout=0)
    try:
        yield lock.is_locked
    finally:
        lock.release()


@contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Lock ``path`` until the end of the block, once nobody else holds it."""
    with _lock(path):
        yield


def _lock(path: Path) -> FileLock:
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path, thread_local=False)
