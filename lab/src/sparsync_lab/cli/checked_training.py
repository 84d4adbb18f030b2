"""What is checked of a training before it starts: its settings, its data and its run folder."""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsync_lab.cli.training_progress import summary
from sparsync_lab.data import check_workers, train_size
from sparsync_lab.training.process_group import launch_name
from sparsync_lab.training.run_folder import RunFolder
from sparsync_lab.training.run_lock import check_unlocked
from sparsync_lab.training.settings import Outcome, Training

WORKERS = 4


@dataclass(frozen=True)
class CheckedTraining:
    """A training that has been checked and can start."""

    training: Training
    workers: int
    folder: Path
    data_folder: Path | None
    resume: bool
    launch: str | None = None


def default_folder(given: dict[str, Any]) -> Path:
    """Return the run folder of a training for which none was given."""
    names = [given.get(name, getattr(Training(), name)) for name in ("data", "model", "method")]
    return Path("runs") / "-".join(names)


def check_training(
    given: dict[str, Any], workers: int | None, folder: Path, data_dir: Path | None, resume: bool
) -> CheckedTraining:
    """Check everything that can be checked before a process is started.

    Args:
        given: the fields of ``Training`` that were asked for.
        workers: how many; ``None``: as many as the run had that is resumed, or 4.
    """
    check_unlocked(folder)
    run_folder = RunFolder(folder)
    if resume:
        before, workers_before, _ = run_folder.config()
        training = Training(**(before.to_json() | given))
        workers = workers_before if workers is None else workers
    else:
        training = Training(**given)
    workers = WORKERS if workers is None else workers
    check_workers(workers, train_size(training.data, data_dir), training.batch)
    run_folder.check(training, resume, run_folder.checkpoints.newest_whole()[0] if resume else None)
    return CheckedTraining(training, workers, folder, data_dir, resume)


def refuse_diverged(outcome: Outcome) -> None:
    """Raise if a training has ended in NaN: what it has learned is nothing."""
    if outcome.diverged:
        when = next(point.step for point in outcome.curve if not math.isfinite(point.loss))
        raise ValueError(
            f"the training ended in NaN: loss or weights are not finite, first seen at step {when}; "
            f"lower --rate, which was {outcome.training.rate:g}"
        )


def check_launched(
    given: dict[str, Any], workers: int, folder: Path, data_dir: Path | None, resume: bool
) -> CheckedTraining | None:
    """Check the same for workers that torchrun has started; return ``None`` if there is nothing left to do for them.

    Those that it starts again, after a failure, find the run that they began, and resume it.
    """
    launch, run_folder = launch_name(), RunFolder(folder)
    if launch is not None and (folder / "config.json").exists():
        before, _, begun_by = run_folder.config()
        if launch == begun_by:
            outcome = run_folder.outcome()
            if outcome is not None and outcome.training == Training(**(before.to_json() | given)):
                print(f"{summary(outcome)}\nrun: {folder}", flush=True)
                refuse_diverged(outcome)
                return None
            if not resume:
                said = f"sparsync: started again, going on from the last checkpoint in {folder}"
                print(said, file=sys.stderr, flush=True)
            resume = True
    return dataclasses.replace(check_training(given, workers, folder, data_dir, resume), launch=launch)
