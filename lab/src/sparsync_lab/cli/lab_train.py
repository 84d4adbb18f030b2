"""``sparsync lab train``: accuracy over minutes, from stored trainings and steps that are measured on a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    training: Annotated[list[Path], typer.Argument(help="Files of stored trainings: results/papers/runs/….json.gz.")],
    compute: Annotated[str, typer.Option(help="Time a step computes, which is waited for, as in 120ms.")],
    rate: Annotated[list[str], typer.Option(help="Of every link; may be given several times.")] = [  # noqa: B006
        "100Mbit",
        "1Gbit",
        "10Gbit",
    ],
    rounds: Annotated[int, typer.Option(help="Steps that are timed of every method, interleaved.")] = 15,
    seconds: Annotated[float, typer.Option(help="After which a cell begins no new round, if it has a few.")] = 120.0,
    target: Annotated[
        float | None, typer.Option(help="Score to reach.", show_default="1 % short of the best dense training")
    ] = None,
    auto: Annotated[bool, typer.Option("--auto", help="Also 'auto', with the scores of what it settles on.")] = False,
    resume: Annotated[bool, typer.Option(help="Keep the steps that were timed before.")] = True,
    out: Annotated[Path, typer.Option(help="CSV file of the curves; steps and picture go beside it.")] = Path(
        "results/lab-train.csv"
    ),
) -> None:
    """Show accuracy over minutes: scores of stored trainings, steps timed on links of given rates. Needs root."""
    from sparsync_lab.cli.lab_train_report import show_over_minutes

    show_over_minutes(training, compute, rate, rounds, seconds, target, auto, resume, out)
