"""A file for every rank's state in the folder of a checkpoint: residuals differ from rank to rank."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from sparsync.errors import name_ranks
from sparsync.hosts.handle import Handle

NAME = "sparsync"  # of the files, up to their ranks


def save_ranks(sync: Handle, folder: str | os.PathLike[str], name: str = NAME) -> None:
    """Write this rank's state to ``folder``; all ranks call this, after the same step.

    Files that another number of ranks left there are removed, so that what is loaded was saved together.
    """
    folder, state = Path(folder), sync.state_dict()
    folder.mkdir(parents=True, exist_ok=True)
    path = _file(folder, name, state["rank"], state["workers"])
    unfinished = path.with_suffix(".tmp")
    torch.save(state, unfinished)
    unfinished.replace(path)
    for workers in _saved(folder, name) - {state["workers"]} if state["rank"] == 0 else ():
        for rank in range(workers):
            _file(folder, name, rank, workers).unlink(missing_ok=True)


def load_ranks(sync: Handle, folder: str | os.PathLike[str], name: str = NAME) -> bool:
    """Continue from what ``save_ranks`` wrote, on any number of ranks; all ranks call this, and all raise if one does.

    With as many ranks as before each reads its own file alone; otherwise it needs those of all.

    Returns:
        Whether there was anything: ``False`` where no rank has found a file.
    """
    folder, channel = Path(folder), sync._running().channel
    own = _file(folder, name, channel.rank, channel.size)
    saved = _saved(folder, name)
    whole = {n for n in saved if all(_file(folder, name, rank, n).exists() for rank in range(n))}
    usable = (whole - {channel.size}) | ({channel.size} if own.exists() else set())
    seen = [set(map(int, text.split())) for text in channel.share(" ".join(map(str, usable)))]
    common = set.intersection(*seen)
    if not common:
        if not any(channel.share("found" if saved else "")):
            return False
        lacking = name_ranks([rank for rank, some in enumerate(seen) if not some] or [0])
        raise ValueError(f"the states in {folder} are not whole: files are missing on {lacking} of {channel.size}")
    if channel.size not in common and len(common) > 1:
        sizes = " and of ".join(map(str, sorted(common)))
        raise ValueError(f"{folder} holds the states of {sizes} ranks: leave those of one training there")
    error, state = "", list[Any]()
    try:
        if channel.size in common:
            state = _read(own)
        else:
            workers = common.pop()
            state = [_read(_file(folder, name, rank, workers)) for rank in range(workers)]
        sync.check_state(state)
    except Exception as raised:
        error = f"the state of rank {channel.rank} in {folder} cannot be loaded: {raised}"
    errors = [text for text in channel.share(error) if text]
    if errors:
        raise ValueError(errors[0])
    sync.load_state_dict(state)  # only now: what one rank cannot load, none does
    return True


def _file(folder: Path, name: str, rank: int, workers: int) -> Path:
    return folder / f"{name}-{rank}-of-{workers}.pt"


def _saved(folder: Path, name: str) -> set[int]:
    """Return for which numbers of ranks there are files."""
    found = (re.fullmatch(rf"{re.escape(name)}-\d+-of-(\d+)\.pt", path.name) for path in folder.glob("*.pt"))
    return {int(match[1]) for match in found if match}


def _read(path: Path) -> Any:
    state = torch.load(path, map_location="cpu", weights_only=True)
    return state
