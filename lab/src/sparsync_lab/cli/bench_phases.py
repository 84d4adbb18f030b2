"""``sparsync bench phases``: where the CPU time of an exchange goes."""

from __future__ import annotations

import csv
from dataclasses import asdict
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sparsync_lab.bench.phases import WARM_UP, PhaseRow, PhasesBench, measure
from sparsync_lab.cli.bench_output import Out, bench_file
from sparsync_lab.cli.progress import progress_bar
from sparsync_lab.environment import environment


def phases(
    entries: Annotated[int, typer.Option(help="Entries of the model.")] = 8_388_608,
    workers: Annotated[int, typer.Option(help="Processes on this machine.")] = 4,
    rounds: Annotated[int, typer.Option(help="Steps of every method.")] = 25,
    out: Out = None,
) -> None:
    """Measure the CPU time of exchanges phase by phase, beside what moving their bytes alone would take."""
    where, bench = environment(), PhasesBench(entries, workers, rounds)
    out, console = bench_file(out, "bench-phases-cpu.csv"), Console()
    with progress_bar(console, f"{workers} workers", WARM_UP + rounds) as progress:
        rows = measure(bench, progress)
    console.print(_table(rows))
    console.print("Milliseconds of CPU time per step and worker; floor: moving the phase's bytes in a plain loop.")
    lines = [_line(row, bench) | where for row in rows]
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    print(f"results: {out}")


def _table(rows: list[PhaseRow]) -> Table:
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for heading in ("method", "optimizer", "phase", "CPU ms", "MB", "floor"):
        table.add_column(heading, justify="right" if heading in ("CPU ms", "MB", "floor") else "left", no_wrap=True)
    for row in rows:
        floor = (f"{row.bytes / 1e6:.1f}", f"{row.floor_ms:.2f}") if row.bytes else ("", "")
        table.add_row(row.method, row.optimizer, row.phase, f"{row.cpu_ms:.2f}", *floor)
    return table


def _line(row: PhaseRow, bench: PhasesBench) -> dict[str, str]:
    made = {name: str(value) for name, value in asdict(row).items()}
    small = {"density": f"{row.density:.6f}", "cpu_ms": f"{row.cpu_ms:.3f}", "floor_ms": f"{row.floor_ms:.3f}"}
    sizes = {"entries": bench.entries, "workers": bench.workers, "rounds": bench.rounds}
    return {**made, **small, "bytes": f"{row.bytes:.0f}", **{name: str(value) for name, value in sizes.items()}}
