"""Claims: how processes that share the trainings of an item keep out of each other's way."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def claim(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether what ``path`` stands for is ours, until the end of the block.

    A claim is a lock of the operating system on an open file. It ends with the process that holds it, however that
    ends, so that none is left over and none must be told from one that is. The file itself stays, empty: if it were
    deleted, one process could hold the old file and another a new one of the same name.

    Args:
        path: of the lock file; made if it is not there.
        wait: until nobody else holds it; the answer is always yes then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = True
        except BlockingIOError:
            ours = False
        yield ours
