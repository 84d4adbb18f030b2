"""``sparsync lab``: steps on hosts of this machine whose links are as slow as asked."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sparsync_lab.cli.progress import progress_bar
from sparsync_lab.environment import environment
from sparsync_lab.network.methods import HOOKS, OPTIMIZERS, NetworkMethod
from sparsync_lab.network.shaping import Rate
from sparsync_lab.network.steps import WARM_UP, CellResult, Change, StepCell
from sparsync_lab.network.sweep import TOLERANCE, SweepFile, SweepRow, missing_cells, rows_of, run_cells

# Every collective by itself, with the same selection where it goes with one; and our recipes.
METHODS = (
    "dense", "bf16", "default", "balanced", "topk+allgather@bucket", "topk+gtopk@bucket", "topk+balanced@bucket",
    "random+shared@bucket",
)  # fmt: skip
HEADINGS = ("method", "step ms", "p20-p80", "of dense", "parts", "MB", "counted")
SECONDS = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s)")
NOTE = (
    "Worker processes on network namespaces of one machine, links held to the rate in both directions; they share its "
    "processors. Compute is waited for, not computed. A step ends with its slowest rank; parts: milliseconds of "
    "compressing, exchanging and decoding in it. MB: what a worker's interface sent in a step, headers taken off; "
    "counted: that over what the library says."
)

MethodOption = Annotated[
    list[str],
    typer.Option(
        help=f"{', '.join(HOOKS)} (DDP's own hooks); a recipe; a compressor; or with collective and scope, as in "
        "topk+gtopk@bucket. May be given several times.",
        show_default=", ".join(METHODS),
    ),
]
DensityOption = Annotated[float, typer.Option(help="Share of the entries to send, of compressors.")]
OptimizerOption = Annotated[str, typer.Option(help=f"Of recipes: {' or '.join(OPTIMIZERS)}.")]
ComputeOption = Annotated[str, typer.Option(help="Time of a step that is waited for, as in 120ms or 0.46s.")]


def collectives(
    workers: Annotated[list[int], typer.Option(help="Hosts, one worker each; may be given several times.")] = [4],  # noqa: B006
    rate: Annotated[list[str], typer.Option(help="Of every link; may be given several times.")] = [  # noqa: B006
        "100Mbit",
        "1Gbit",
        "10Gbit",
    ],
    model: Annotated[
        list[str],
        typer.Option(help="Number of entries, or a model whose shapes are taken; may be given several times."),
    ] = ["8000000"],  # noqa: B006
    method: MethodOption = [],  # noqa: B006
    density: DensityOption = 0.001,
    optimizer: OptimizerOption = "sgd",
    compute: ComputeOption = "0ms",
    rounds: Annotated[int, typer.Option(help="Steps of every method, interleaved.")] = 15,
    seconds: Annotated[float, typer.Option(help="After which a cell begins no new round, if it has a few.")] = 120.0,
    resume: Annotated[bool, typer.Option(help="Leave out cells that the file holds.")] = True,
    out: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("results/lab-collectives.csv"),
) -> None:
    """Time steps by every collective, and dense in fp32 and bf16, on links of given rates. Needs root."""
    methods = [NetworkMethod(name, density, optimizer) for name in method or METHODS]
    waited = parse_seconds(compute)
    cells = [
        (count, StepCell(Rate.parse(text), name, waited, rounds, seconds))
        for count in dict.fromkeys(workers)
        for name in dict.fromkeys(model)
        for text in dict.fromkeys(rate)
    ]
    file, console = SweepFile(out, resume), Console()
    left = missing_cells(cells, methods, file)
    if len(left) < len(cells):
        console.print(f"{len(cells) - len(left)} of {len(cells)} cells are in {out} already", highlight=False)
    measure_cells(left, methods, console, lambda result: file.put(rows_of(result)))
    print(f"results: {out}")


def step(
    workers: Annotated[int, typer.Option(help="Hosts, one worker each.")] = 4,
    rate: Annotated[str, typer.Option(help="Of every link.")] = "1Gbit",
    model: Annotated[str, typer.Option(help="Number of entries, or a model whose shapes are taken.")] = "8000000",
    method: MethodOption = ["dense", "bf16", "default"],  # noqa: B006
    density: DensityOption = 0.001,
    optimizer: OptimizerOption = "sgd",
    compute: ComputeOption = "0ms",
    steps: Annotated[int, typer.Option(help="Of every method, interleaved.")] = 30,
    change_to: Annotated[str, typer.Option(help="Rate that all links have from a step on.")] = "",
    change_at: Annotated[int | None, typer.Option(help="That step.", show_default="in the middle")] = None,
    out: Annotated[Path, typer.Option(help="CSV file to write, a row for every step.")] = Path("results/lab-step.csv"),
) -> None:
    """Time every step on links whose rate may change in the middle. Needs root."""
    if change_at is not None and not change_to:
        raise ValueError("--change-at needs --change-to, the rate that links change to")
    change = Change(Rate.parse(change_to), steps // 2 if change_at is None else change_at) if change_to else None
    cell = StepCell(Rate.parse(rate), model, parse_seconds(compute), steps, 3600.0, change)
    methods = [NetworkMethod(name, density, optimizer) for name in method]
    measure_cells([(workers, cell)], methods, Console(), lambda result: _write_steps(result, out))
    print(f"results: {out}")


def parse_seconds(text: str) -> float:
    """Return seconds from words such as ``120ms`` and ``0.46s``."""
    found = SECONDS.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"a time is a number and ms or s, as in 120ms, got {text!r}")
    return float(found[1]) * (1e-3 if found[2] == "ms" else 1.0)


def measure_cells(
    cells: list[tuple[int, StepCell]],
    methods: list[NetworkMethod],
    console: Console,
    keep: Callable[[CellResult], None],
) -> None:
    """Measure the cells, keep and show each as soon as it is there."""
    if not cells:
        return
    each = WARM_UP + cells[0][1].rounds
    with progress_bar(console, lambda done: f"cell {1 + int(done) // each} of {len(cells)}", each * len(cells)) as bar:
        done = 0

        def advance(new: int) -> None:
            nonlocal done
            new = min(new, each - done)  # methods that do not fit into memory at once take more rounds
            done += new
            bar(new)

        for result in run_cells(cells, methods, advance):
            keep(result)
            bar(each - done)
            done = 0
            console.print(_change_table(result) if result.cell.change else _table(rows_of(result)))
    console.print(NOTE, highlight=False)


def new_table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for heading in headings:
        named = heading == "method"
        table.add_column(heading, justify="left" if named else "right", no_wrap=not named, overflow="fold")
    return table


def _title(result: CellResult, rates: str) -> str:
    cell = result.cell
    what = f"{int(cell.model):,} entries" if cell.model.isdigit() else cell.model
    waits = f", {1e3 * cell.compute:g} ms of compute" if cell.compute else ""
    return f"{what}, {result.workers} hosts, {rates} (a transfer reached {result.link / 1e6:,.0f} Mbit){waits}"


def _table(rows: list[SweepRow]) -> Table:
    table = new_table(_title(rows[0].result, str(rows[0].result.cell.rate)), HEADINGS)
    for row in rows:
        low, median, high = row.step_ms
        table.add_row(
            row.method.label,
            f"{median:,.1f}",
            f"{low:,.0f}-{high:,.0f}",
            "" if row.ratio is None else f"{row.ratio:.3f}",
            "/".join(f"{part:.0f}" for part in row.parts_ms) if any(row.parts_ms) else "",
            f"{row.payload / 1e6:,.3f}",
            f"{row.counted:.3f}",
            style=None if row.agrees else "red",
        )
    if not all(row.agrees for row in rows):
        table.caption = (
            f"red: over {TOLERANCE:.0%} more or less was counted; small messages weigh little beside Gloo's 144 bytes"
        )
    return table


def _change_table(result: CellResult) -> Table:
    change = result.cell.change
    assert change is not None
    rates = f"{result.cell.rate}, {change.rate} from step {change.at} on"
    table = new_table(_title(result, rates), ("method", "ms before", "ms after", "MB before", "MB after"))
    for own in result.methods:
        halves = own.steps[: change.at], own.steps[change.at :]
        times = (1e3 * statistics.median(record.seconds for record in half) for half in halves)
        sizes = (statistics.fmean(record.payload for record in half) / 1e6 for half in halves)
        table.add_row(own.method.label, *(f"{ms:,.1f}" for ms in times), *(f"{size:,.3f}" for size in sizes))
    return table


def _write_steps(result: CellResult, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    where, cell, lines = environment(), result.cell, []
    for own in result.methods:
        for number, record in enumerate(own.steps):
            lines.append(
                {
                    "workers": result.workers,
                    "model": cell.model,
                    "compute_ms": f"{1e3 * cell.compute:g}",
                    "compute": "waited for, not computed",
                    "method": own.method.name,
                    "step": number,
                    "rate_mbit": f"{cell.rate_at(number).mbit:g}",
                    "step_ms": f"{1e3 * record.seconds:.2f}",
                    "interface_bytes": f"{record.payload:.0f}",
                    "traffic_bytes": f"{record.traffic:.0f}",
                    **where,
                }
            )
    from sparsync_lab.report import write_csv  # which brings matplotlib

    write_csv(out, lines)
