"""The checkpoints of a run: the last two, each a folder of files that every rank has written a part of.

    step-00000030/    model.pt (weights, optimizer), rank-0.pt, rank-1.pt, ... (what each worker kept)

A checkpoint is written under another name, through to the disk, and renamed when every rank's file is there; those
before the last two are deleted after that. Whenever processes are killed, or the power fails, one can be used.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsync_lab.training.all_ranks import on_all_ranks, on_rank_0
from sparsync_lab.training.durable import sync_folder, write_through
from sparsync_lab.training.settings import Training

SCHEMA = 1
KEPT = 2  # checkpoints


@dataclass(frozen=True)
class Checkpoint:
    """The part of a checkpoint that all ranks have in common.

    Args:
        workers: how many there were, each with a file of its own beside.
        progress: sums since step 0 that the outcome is made of.
    """

    training: Training
    workers: int
    step: int
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    progress: Mapping[str, float]


class Checkpoints:
    """The checkpoints in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # ---- reading --------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, the newest first."""
        names = [path.name for path in self.folder.glob("step-*")]
        return sorted((int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name)), reverse=True)

    def load(self, step: int) -> Checkpoint:
        """Return what all ranks have in common."""
        path = self._place(step) / "model.pt"
        plain = load_verified(path)
        try:
            check_schema(plain)
            common = plain["checkpoint"]
            return Checkpoint(**{**common, "training": Training.from_json(common["training"])})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be read, the run is damaged: {one_line(error)}") from None

    def rank_states(self, step: int, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """Return what these ranks kept."""
        return [load_verified(self._place(step) / f"rank-{rank}.pt") for rank in ranks]

    def newest_whole(
        self, rank: int = 0, workers: int = 1, gather: Callable[[Any], list[Any]] = lambda value: [value]
    ) -> tuple[int | None, str | None]:
        """Return the step of the newest checkpoint that can be used, and what is wrong with a newer one.

        Raises ``ValueError`` if there are some and none can be used; the step is ``None`` before the first.

        Args:
            rank: of those that look, each at its share of the files.
            workers: how many look; they take the same one.
            gather: gives each of them what all say.
        """
        newer: str | None = None
        for step in gather(self.steps())[0]:
            wrong = [said for said in gather(self._damage(step, rank, workers)) if said is not None]
            if not wrong:
                return step, newer
            newer = newer or wrong[0]
        if newer is not None:
            raise ValueError(newer)
        return None, None

    def _damage(self, step: int, rank: int, workers: int) -> str | None:
        """Return what is wrong with the files that this rank looks at."""
        try:
            self.rank_states(step, range(rank, self.load(step).workers, workers))
        except ValueError as error:
            return str(error)
        return None

    # ---- writing --------------------------------------------------------------------------------------------------

    def begin(self, step: int | None) -> None:
        """Clear away what came after the checkpoint to go on from."""
        self.folder.mkdir(exist_ok=True)
        for part in self.folder.glob("*.part"):
            shutil.rmtree(part)
        for newer in self.steps():
            if step is not None and newer > step:
                aside = self._place(newer).with_suffix(".damaged")
                shutil.rmtree(aside, ignore_errors=True)
                self._place(newer).rename(aside)

    def save(self, rank: int, checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
        """Write a checkpoint; all ranks call this, each with its own ``state``."""
        part = self._place(checkpoint.step).with_suffix(".part")
        with self.naming_the_last():
            try:
                on_all_ranks(lambda: self._write(part, rank, checkpoint, state))
                on_rank_0(lambda: self._complete(part, checkpoint))
            except ValueError:
                if rank == 0:
                    shutil.rmtree(part, ignore_errors=True)  # a full disk needs the room
                raise

    @contextmanager
    def naming_the_last(self) -> Iterator[None]:
        """Add to an error from which checkpoint the training can go on."""
        try:
            yield
        except ValueError as error:
            last = next(iter(self.steps()), None)
            hint = "there is no checkpoint yet" if last is None else f"the checkpoint of step {last} is whole: --resume"
            raise ValueError(f"{error}; {hint}") from None

    def _write(self, part: Path, rank: int, checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
        part.mkdir(exist_ok=True)
        write_through(part / f"rank-{rank}.pt", lambda file: torch.save(dict(state), file))
        if rank == 0:
            common = {field.name: getattr(checkpoint, field.name) for field in dataclasses.fields(checkpoint)}
            common["training"] = checkpoint.training.to_json()
            plain = {"schema": SCHEMA, "checkpoint": common}
            write_through(part / "model.pt", lambda file: torch.save(plain, file))

    def _complete(self, part: Path, checkpoint: Checkpoint) -> None:
        missing = [n for n in range(checkpoint.workers) if not (part / f"rank-{n}.pt").exists()]
        if missing:
            raise ValueError(f"rank {missing[0]} does not see {self.folder}: it must be a folder all ranks share")
        sync_folder(part)
        part.rename(self._place(checkpoint.step))
        sync_folder(self.folder)
        for step in self.steps()[KEPT:]:
            shutil.rmtree(self._place(step))

    def _place(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"


def load_verified(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Load a file of a checkpoint; one that is cut off, or whose bytes have changed, is refused."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        if broken is not None:
            raise ValueError(f"{broken} has changed")
        loaded: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        return loaded
    except torch.OutOfMemoryError:  # nothing is wrong with the file
        raise
    except FileNotFoundError:
        raise ValueError(f"{path} is missing, the run is damaged") from None
    except Exception as error:  # torch.load raises nearly anything for a file that is not its own
        raise ValueError(f"{path} cannot be read, the run is damaged: {one_line(error)}") from None


def check_schema(plain: Any) -> None:
    """Refuse a file of another schema."""
    if not isinstance(plain, dict) or plain.get("schema") != SCHEMA:
        raise ValueError(f"it is not of schema {SCHEMA}")


def one_line(error: Exception) -> str:
    """Return an error in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip()
