"""``sparsync bench momentum``: what momentum behind a sparse residual costs."""

from __future__ import annotations

import csv
import statistics
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sparsync_lab.cli.bench_output import Out, bench_file
from sparsync_lab.cli.progress import progress_bar
from sparsync_lab.environment import environment
from sparsync_lab.training.compare import train_all
from sparsync_lab.training.settings import Training

MODES = ("keep", "move", "correct")
HEADINGS = ("steps", "dense", "keep", "move", "correct")


def momentum(
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 4,
    steps: Annotated[list[int], typer.Option(help="Steps of a training; may be given several times.")] = [50, 100, 300],  # noqa: B006
    seeds: Annotated[int, typer.Option(help="Trainings of each kind.")] = 3,
    density: Annotated[float, typer.Option(help="Share of the gradient entries to send, in (0, 1].")] = 0.001,
    rate: Annotated[float, typer.Option(help="Learning rate of SGD, whose momentum is 0.9.")] = 0.05,
    out: Out = None,
) -> None:
    """Train with top-k of the whole model and SGD's momentum of 0.9 kept, moved or corrected; and dense."""
    if seeds < 1:
        raise ValueError(f"seeds must be 1 or more, got {seeds}")
    sparse = Training("topk", density=density, scope="global", rate=rate)
    kinds = [Training("dense", rate=rate), *(replace(sparse, momentum_mode=mode) for mode in MODES)]
    trainings = [replace(kind, steps=n, seed=seed) for n in steps for kind in kinds for seed in range(seeds)]
    out = bench_file(out, "bench-momentum.csv")
    where = environment()
    console = Console()
    with progress_bar(console, f"{workers} workers", sum(training.steps for training in trainings)) as progress:
        outcomes = train_all(trainings, None, workers, progress)
    table = Table(title="test accuracy, %", box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    lines: list[dict[str, Any]] = []
    for n in steps:
        row = [str(n)]
        for kind in kinds:
            mode = kind.momentum_mode or "dense"
            same = replace(kind, steps=n)
            got = [100 * o.accuracy for o in outcomes if replace(o.training, seed=0) == same]
            spread = statistics.stdev(got) if len(got) > 1 else 0.0
            row.append(f"{statistics.fmean(got):.1f} ± {spread:.1f}")
            lines.append(
                {"steps": n, "momentum": mode, "accuracy": f"{statistics.fmean(got):.2f}", "spread": f"{spread:.2f}"}
                | {"seeds": seeds, "workers": workers, "density": density, "rate": rate, "data": "digits"}
                | where
            )
        table.add_row(*row)
    console.print(table)
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    print(f"results: {out}")
