"""``sparsync lab predict``: the planner's predictions beside measured steps."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer


def predict(
    workers: Annotated[list[int], typer.Option(help="Hosts, one worker each; may be given several times.")] = [2, 4],  # noqa: B006
    rate: Annotated[list[str], typer.Option(help="Of every link; may be given several times.")] = [  # noqa: B006
        "200Mbit",
        "1Gbit",
        "10Gbit",
    ],
    model: Annotated[
        list[str],
        typer.Option(help="Number of entries, or a model whose shapes are taken; may be given several times."),
    ] = ["vit", "gpt", "vgg16"],  # noqa: B006
    optimizer: Annotated[str, typer.Option(help="Of recipes: sgd or adamw.")] = "sgd",
    compute: Annotated[str, typer.Option(help="Time of a step that is waited for, as in 120ms or 0.46s.")] = "100ms",
    rounds: Annotated[int, typer.Option(help="Steps of every method, interleaved.")] = 9,
    seconds: Annotated[float, typer.Option(help="After which a cell begins no new round, if it has a few.")] = 10.0,
    resume: Annotated[bool, typer.Option(help="Leave out cells that the file holds.")] = True,
    out: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("results/lab-predict.csv"),
) -> None:
    """Predict steps on links of given rates from steps on links that hold nothing back, and time them. Needs root."""
    from rich.console import Console

    from sparsync_lab.cli.lab import new_table, parse_seconds
    from sparsync_lab.network.auto_comparison import SettledMethod
    from sparsync_lab.network.host_workers import host_workers
    from sparsync_lab.network.namespace import check_requirements
    from sparsync_lab.network.predict import COMPARED, Calibration, calibrate, check_cell, summarize
    from sparsync_lab.network.shaping import Rate
    from sparsync_lab.network.star import star
    from sparsync_lab.network.steps import StepCell
    from sparsync_lab.network.sweep import SweepFile, missing_cells

    cells = [
        (count, StepCell(Rate.parse(text), name, parse_seconds(compute), rounds, seconds))
        for count in dict.fromkeys(workers)
        for name in dict.fromkeys(model)
        for text in dict.fromkeys(rate)
    ]
    file, console = SweepFile(out, resume), Console()
    left = missing_cells(cells, [SettledMethod(name, optimizer=optimizer) for name in COMPARED.values()], file)
    check_requirements()
    for count, own in groupby(left, key=lambda pair: pair[0]):
        of_size, known = [cell for _, cell in own], dict[str, Calibration]()
        with star(count, of_size[0].rate) as network, host_workers(network) as processes:
            for cell in of_size:
                if cell.model not in known:
                    known[cell.model] = calibrate(processes, network, cell, optimizer)
                rows = check_cell(processes, network, cell, known[cell.model])
                file.put(rows)
                table = new_table(
                    f"{cell.model}, {count} hosts, {cell.rate}", ("method", "predicted ms", "measured ms", "error")
                )
                for row in rows:
                    times = (f"{1e3 * one:,.1f}" for one in (row.predicted, row.measured))
                    table.add_row(row.method.label, *times, f"{row.error:+.1%}")
                console.print(table)
    print(summarize(file.rows))
    print(f"results: {out}")
