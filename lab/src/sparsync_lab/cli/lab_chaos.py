"""``sparsync lab chaos``: thousands of steps under faults, restarts and changes, and the laws throughout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def chaos(
    steps: Annotated[
        int, typer.Option(help="Of the training; those made again after a restart are not counted.")
    ] = 10_000,
    workers: Annotated[int, typer.Option(help="Processes, mostly: some lives have up to two fewer or one more.")] = 4,
    seed: Annotated[int, typer.Option(help="All that happens follows from it.")] = 0,
    minutes: Annotated[float | None, typer.Option(help="After which no new life begins.", show_default="none")] = None,
    out: Annotated[Path, typer.Option(help="CSV file to write, a row for every life; the log is beside it.")] = Path(
        "results/lab-chaos.csv"
    ),
) -> None:
    """Train while workers are killed, stopped, restarted and changed, and assert the laws throughout. Needs no root."""
    if steps < 1 or workers < 2:
        raise ValueError(f"chaos needs at least a step and 2 workers, got {steps} and {workers}")
    import time

    from rich.console import Console

    from sparsync_lab.chaos.conductor import run_lives
    from sparsync_lab.chaos.report import ChaosReport
    from sparsync_lab.cli.lab import new_table
    from sparsync_lab.cli.progress import progress_bar

    out.parent.mkdir(parents=True, exist_ok=True)
    report, console, farthest = ChaosReport(steps, workers, seed), Console(), 0
    until = time.monotonic() + 60 * (minutes or 1e9)
    log = out.with_suffix(".log")
    with progress_bar(console, lambda _: f"life {len(report.results) + 1}", steps) as bar, log.open("w") as file:

        def advance(step: int) -> None:
            nonlocal farthest
            bar(max(0, step - farthest))
            farthest = max(farthest, step)

        file.write(f"{report.title}\n")
        for result in run_lives(steps, workers, seed, advance):
            report.results.append(result)
            file.write(f"{result.describe()}\n")
            file.flush()
            if time.monotonic() > until:
                break
        if report.broken:
            file.write(f"{report.tail()}\n")
        file.write(f"{report.summary()}\n{report.describe_counts()}\n")
    report.write(out)
    table = new_table(report.title, ("what", "how often"))
    table.columns[0].justify = "left"
    for what, often in report.counts().items():
        table.add_row(what, f"{often:,}")
    console.print(table)
    print(report.summary())
    if report.broken:
        print(report.tail())
    print(f"results: {out}, {log}")
    if report.broken:
        raise typer.Exit(1)
