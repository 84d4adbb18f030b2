"""``sparsync lab auto``: whether 'auto' is ever slower than dense steps, or than a sparse method that is fixed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

NOTE = (
    "Whole steps, the optimizer's included, of worker processes on network namespaces of one machine, which share its "
    "processors; compute is waited for. Medians of turns that are interleaved, of the slowest rank, once auto has "
    "settled; methods that took no part in the comparison, as another sparse one was faster, have one time alone."
)


def auto(
    workers: Annotated[list[int], typer.Option(help="Hosts, one worker each; may be given several times.")] = [2, 4, 8],  # noqa: B006
    rate: Annotated[list[str], typer.Option(help="Of every link; may be given several times.")] = [  # noqa: B006
        "200Mbit",
        "1Gbit",
        "2.5Gbit",
        "10Gbit",
    ],
    model: Annotated[
        list[str],
        typer.Option(help="Number of entries, or a model whose shapes are taken; may be given several times."),
    ] = ["resnet20", "vit", "gpt", "vgg16", "resnet50"],  # noqa: B006
    optimizer: Annotated[str, typer.Option(help="Of all methods: sgd or adamw.")] = "sgd",
    compute: Annotated[str, typer.Option(help="Time of a step that is waited for, as in 120ms or 0.46s.")] = "50ms",
    seconds: Annotated[float, typer.Option(help="After which a cell begins no new round, if it has a few.")] = 6.0,
    resume: Annotated[bool, typer.Option(help="Leave out cells that the file holds.")] = True,
    out: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("results/lab-auto.csv"),
) -> None:
    """Time 'auto' beside dense steps and every fixed sparse method on links of given rates. Needs root."""
    from rich.console import Console

    from sparsync_lab.cli.lab import new_table, parse_seconds
    from sparsync_lab.network.auto_sweep import compare_cells, methods_for, rows_of, summarize
    from sparsync_lab.network.shaping import Rate
    from sparsync_lab.network.steps import StepCell
    from sparsync_lab.network.sweep import SweepFile, missing_cells

    cells = [
        (count, StepCell(Rate.parse(text), name, parse_seconds(compute), seconds=seconds))
        for count in dict.fromkeys(workers)
        for name in dict.fromkeys(model)
        for text in dict.fromkeys(rate)
    ]
    file, console = SweepFile(out, resume), Console()
    left = missing_cells(cells, methods_for(optimizer), file)
    if len(left) < len(cells):
        console.print(f"{len(cells) - len(left)} of {len(cells)} cells are in {out} already", highlight=False)
    for number, result in enumerate(compare_cells(left, optimizer), 1):
        rows = rows_of(result)
        file.put(rows)
        cell = result.cell
        title = f"{number} of {len(left)}: {cell.model}, {result.workers} hosts, {cell.rate}"
        table = new_table(title, ("method", "step ms", "p20-p80", "turns"))
        for row in rows:
            shown = row.to_csv()
            span = f"{float(shown['step_p20_ms']):,.0f}-{float(shown['step_p80_ms']):,.0f}"
            table.add_row(shown["method"], shown["step_p50_ms"], span, str(shown["turns"]))
        outcome = "holds" if result.holds else "SLOWER"
        table.caption = (
            f"{outcome}: {result.ratio:.3f} x {result.rival.method.name}, equal runs {result.equal_runs:.3f}"
        )
        console.print(table)
    if left:
        console.print(NOTE, highlight=False)
    print(summarize(file.rows))
    print(f"results: {out}")
