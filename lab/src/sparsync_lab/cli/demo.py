"""``sparsync demo``: a comparison of a few methods that takes minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsync_lab.cli.compare import run_comparison
from sparsync_lab.training.compare import plan_trainings
from sparsync_lab.training.settings import Training

# topk at 0.1 % of every layer sends less than the default recipe, and more than `paper`: 1-D tensors go dense.
METHODS = ("dense", "paper", "default", "topk@0.001", "random+shared@0.01", "topk+gtopk@0.01")
STEPS = 100  # dense has nearly learned the digits by then
RATE = 0.05  # dense ends higher with it than with 0.02
REMARK = (
    "This is a short training, where methods differ most: with more steps the sparse ones come closer to dense, and "
    "which of them are within a point changes (try --steps {more})."
)


def demo(
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps of each training.")] = STEPS,
    seeds: Annotated[int, typer.Option(help="Trainings of each method.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for report.html.")] = Path("runs/demo"),
) -> None:
    """Train a small network dense and sparse on processes of this machine, and compare."""
    trainings = plan_trainings(METHODS, seeds, Training("dense", steps=steps, rate=RATE))
    run_comparison("Sparsync demo", trainings, workers, None, out, REMARK.format(more=2 * steps))
