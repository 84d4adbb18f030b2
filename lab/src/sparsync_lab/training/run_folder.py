"""The folder of one training.

    config.json       what is trained, on how many workers, and where it was started
    metrics.jsonl     a line for every point of the curve, written as it is reached
    checkpoint/       step-00000030/: model.pt (weights, optimizer), rank-0.pt, rank-1.pt, ... (what each worker kept)
    outcome.json      what came of it; missing until the training is complete

A checkpoint is written under another name and renamed when every rank's file is there, and the one before is deleted
after that: whenever the processes are killed, the last complete one can be used.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparsync_lab.environment import environment
from sparsync_lab.training.settings import Outcome, Point, Training

SCHEMA = 1
MAY_CHANGE = {"steps"}  # of a training, when it is resumed


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


class RunFolder:
    """A run folder: ``begin`` on rank 0, then ``append``, ``save`` on all ranks, ``finish``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # ---- reading --------------------------------------------------------------------------------------------------

    def config(self) -> tuple[Training, int]:
        """Return the training and the number of its workers, as they were last started."""
        path = self.folder / "config.json"
        if not path.is_file():
            raise ValueError(f"{self.folder} holds no run to resume: there is no {path.name} in it")
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
            _check_schema(plain)
            return Training.from_json(plain["training"]), int(plain["workers"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read, the run is damaged: {one_line(error)}") from None

    def checkpoint(self) -> Checkpoint | None:
        """Return the last complete checkpoint; ``None`` before the first."""
        step = self._saved_step()
        if step is None:
            return None
        path = self._checkpoint(step) / "model.pt"
        plain = load_verified(path)
        try:
            _check_schema(plain)
            common = plain["checkpoint"]
            return Checkpoint(**{**common, "training": Training.from_json(common["training"])})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be read, the run is damaged: {one_line(error)}") from None

    def rank_states(self, checkpoint: Checkpoint, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """Return what these ranks kept."""
        return [load_verified(self._checkpoint(checkpoint.step) / f"rank-{rank}.pt") for rank in ranks]

    def points(self) -> list[Point]:
        """Return the points of the curve up to the last checkpoint; later ones are going to be made again."""
        path, until = self.folder / "metrics.jsonl", self._saved_step() or 0
        if until and not path.is_file():
            raise ValueError(f"{path} is missing, the run is damaged")
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        found: list[Point] = []
        for number, line in enumerate(lines, 1):
            try:
                found.append(Point.from_json(json.loads(line)))
            except (ValueError, TypeError) as error:
                if number < len(lines):  # the last line may be cut off in its middle
                    raise ValueError(f"{path}, line {number} cannot be read: {one_line(error)}") from None
        return [point for point in found if point.step <= until]

    def check(self, training: Training, resume: bool) -> None:
        """Raise, in one sentence, why ``begin`` cannot go on here; reads every file of the run, writes none."""
        if not resume:
            if self.folder.exists() and not self.folder.is_dir():
                raise ValueError(f"{self.folder} is a file; --out must be a folder")
            if any((self.folder / name).exists() for name in ("config.json", "metrics.jsonl", "checkpoint")):
                raise ValueError(f"{self.folder} holds a run already; continue it with --resume or give another --out")
            return
        check_same(training, self.config()[0], str(self.folder))
        checkpoint = self.checkpoint()
        if checkpoint is not None:
            check_same(training, checkpoint.training, f"the checkpoint in {self.folder}")
            self.rank_states(checkpoint, range(checkpoint.workers))
            complete = (self.folder / "outcome.json").exists()
            if checkpoint.step > training.steps or (checkpoint.step == training.steps and complete):
                raise ValueError(
                    f"{self.folder} has been trained for {checkpoint.step} steps, which is all of --steps "
                    f"{training.steps}; give a larger number to train on"
                )
        self.points()

    # ---- writing --------------------------------------------------------------------------------------------------

    def begin(self, training: Training, workers: int, resume: bool) -> None:
        """Prepare the folder, on rank 0 alone: write the configuration, cut off what came after the checkpoint."""
        self.check(training, resume)
        self.folder.mkdir(parents=True, exist_ok=True)
        config = {"schema": SCHEMA, "training": training.to_json(), "workers": workers, "environment": environment()}
        _write(self.folder / "config.json", json.dumps(config, indent=2))
        (self.folder / "outcome.json").unlink(missing_ok=True)
        lines = [json.dumps(point.to_json()) + "\n" for point in (self.points() if resume else [])]
        _write(self.folder / "metrics.jsonl", "".join(lines))
        for part in self.folder.glob("checkpoint/*.part"):
            shutil.rmtree(part)

    def append(self, point: Point) -> None:
        """Add a line to the metrics."""
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(point.to_json()) + "\n")

    def save(self, rank: int, checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
        """Write a checkpoint; all ranks call this, each with its own ``state``."""
        final = self._checkpoint(checkpoint.step)
        part = final.with_suffix(".part")
        part.mkdir(parents=True, exist_ok=True)
        torch.save(dict(state), part / f"rank-{rank}.pt")
        if rank == 0:
            common = {field.name: getattr(checkpoint, field.name) for field in dataclasses.fields(checkpoint)}
            common["training"] = checkpoint.training.to_json()
            torch.save({"schema": SCHEMA, "checkpoint": common}, part / "model.pt")
        dist.barrier()
        if rank == 0:
            missing = [n for n in range(checkpoint.workers) if not (part / f"rank-{n}.pt").exists()]
            if missing:
                raise ValueError(f"rank {missing[0]} does not see {self.folder}: it must be a folder all ranks share")
            part.rename(final)
            for old in self._checkpoint_folders():
                if old != final:
                    shutil.rmtree(old)

    def finish(self, outcome: Outcome) -> None:
        _write(self.folder / "outcome.json", json.dumps(outcome.to_json(), indent=2))

    # ---- places ---------------------------------------------------------------------------------------------------

    def _checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoint" / f"step-{step:08d}"

    def _checkpoint_folders(self) -> list[Path]:
        return [path for path in self.folder.glob("checkpoint/step-*") if re.fullmatch(r"step-\d+", path.name)]

    def _saved_step(self) -> int | None:
        return max((int(path.name.removeprefix("step-")) for path in self._checkpoint_folders()), default=None)


def check_same(asked: Training, there: Training, where: str) -> None:
    """Refuse to resume as another training."""
    for field in dataclasses.fields(Training):
        new, old = getattr(asked, field.name), getattr(there, field.name)
        if field.name not in MAY_CHANGE and new != old:
            raise ValueError(f"{where} was trained with {field.name} {old}, not {new}; start anew in another --out")


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


def _check_schema(plain: Any) -> None:
    if not isinstance(plain, dict) or plain.get("schema") != SCHEMA:
        raise ValueError(f"it is not of schema {SCHEMA}")


def _write(path: Path, text: str) -> None:
    """Replace a file as a whole."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def one_line(error: Exception) -> str:
    """Return an error in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip()
