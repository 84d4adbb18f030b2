"""The folder of one training.

config.json       what is trained, on how many workers, and where it was started
metrics.jsonl     a line for every point of the curve, written as it is reached
checkpoint/       the last two: see ``checkpoints``
outcome.json      what came of it; missing until the training is complete
lock              held while a training works here; holder.json says which
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from sparsync_lab.environment import environment
from sparsync_lab.training.checkpoints import SCHEMA, Checkpoints, check_schema, one_line
from sparsync_lab.training.durable import replace_file, sync_folder, write_through
from sparsync_lab.training.settings import Outcome, Point, Training

MAY_CHANGE = {"steps"}  # of a training, when it is resumed


class RunFolder:
    """A run folder: ``begin`` on rank 0, then ``append``, ``checkpoints.save`` on all ranks, ``finish``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = Checkpoints(folder / "checkpoint")

    # ---- reading --------------------------------------------------------------------------------------------------

    def config(self) -> tuple[Training, int, str | None]:
        """Return the training, the number of its workers and the launch's name, as they were last started."""
        path = self.folder / "config.json"
        if not path.is_file():
            raise ValueError(f"{self.folder} holds no run to resume: there is no {path.name} in it")
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
            check_schema(plain)
            return Training.from_json(plain["training"]), int(plain["workers"]), plain.get("launch")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read, the run is damaged: {one_line(error)}") from None

    def outcome(self) -> Outcome | None:
        """Return what came of the training; ``None`` until it is complete."""
        path = self.folder / "outcome.json"
        return Outcome.from_json(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None

    def points(self, step: int | None) -> list[Point]:
        """Return the points of the curve up to a checkpoint; later ones are going to be made again."""
        path, until = self.folder / "metrics.jsonl", step or 0
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

    def check(self, training: Training, resume: bool, step: int | None) -> None:
        """Raise, in one sentence, why ``begin`` cannot go on here from the checkpoint of ``step``; writes nothing."""
        if not resume:
            if self.folder.exists() and not self.folder.is_dir():
                raise ValueError(f"{self.folder} is a file; --out must be a folder")
            if any((self.folder / name).exists() for name in ("config.json", "metrics.jsonl", "checkpoint")):
                raise ValueError(f"{self.folder} holds a run already; continue it with --resume or give another --out")
            return
        check_same(training, self.config()[0], str(self.folder))
        if step is not None:
            check_same(training, self.checkpoints.load(step).training, f"the checkpoint in {self.folder}")
            complete = (self.folder / "outcome.json").exists()
            if step > training.steps or (step == training.steps and complete):
                raise ValueError(
                    f"{self.folder} has been trained for {step} steps, which is all of --steps "
                    f"{training.steps}; give a larger number to train on"
                )
        self.points(step)

    # ---- writing --------------------------------------------------------------------------------------------------

    def begin(self, training: Training, workers: int, resume: bool, step: int | None, launch: str | None) -> None:
        """Prepare the folder, on rank 0 alone: write the configuration, cut off what came after the checkpoint."""
        self.check(training, resume, step)
        points = self.points(step) if resume else []
        self.checkpoints.begin(step)
        sync_folder(self.folder.parent)
        config = {"schema": SCHEMA, "training": training.to_json(), "workers": workers, "launch": launch}
        self._write("config.json", config | {"environment": environment()})
        (self.folder / "outcome.json").unlink(missing_ok=True)
        replace_file(self.folder / "metrics.jsonl", lambda file: file.writelines(map(_line, points)))

    def append(self, point: Point) -> None:
        """Add a line to the metrics."""
        with self.checkpoints.naming_the_last():
            write_through(self.folder / "metrics.jsonl", lambda file: file.write(_line(point)), "ab")

    def finish(self, outcome: Outcome) -> None:
        with self.checkpoints.naming_the_last():
            self._write("outcome.json", outcome.to_json())

    def _write(self, name: str, plain: dict[str, Any]) -> None:
        text = json.dumps(plain, indent=2).encode()
        replace_file(self.folder / name, lambda file: file.write(text))


def check_same(asked: Training, there: Training, where: str) -> None:
    """Refuse to resume as another training."""
    for field in dataclasses.fields(Training):
        new, old = getattr(asked, field.name), getattr(there, field.name)
        if field.name not in MAY_CHANGE and new != old:
            raise ValueError(f"{where} was trained with {field.name} {old}, not {new}; start anew in another --out")


def _line(point: Point) -> bytes:
    return (json.dumps(point.to_json()) + "\n").encode()
