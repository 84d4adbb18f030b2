"""Files that are whole after a kill, a power failure or on a full disk: either the old one or the new one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO


def write_through(path: Path, write: Callable[[IO[bytes]], object], mode: str = "wb") -> None:
    """Let ``write`` fill an opened file, and return when it is on the disk; raise one sentence if it cannot be."""
    try:
        with path.open(mode) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise ValueError(f"{path} cannot be written: {reason}") from None


def replace_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replace a file as a whole by what ``write`` puts into an opened one."""
    part = path.with_name(path.name + ".part")
    try:
        write_through(part, write)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk: those of new files, and of renamed ones."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException | None) -> str | None:
    """Return what the operating system said; ``torch.save`` raises errors of its own on top of that."""
    while error is not None:
        if isinstance(error, OSError):
            return error.strerror or str(error)
        error = error.__context__
    return None
