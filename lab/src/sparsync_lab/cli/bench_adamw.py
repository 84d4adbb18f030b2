"""``sparsync bench adamw``: what preconditioned feedback costs beside backward, against torch's own AdamW step."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sparsync_lab.bench.adamw_step import WARM_UP, AdamWRow, measure
from sparsync_lab.bench.select import quantile
from sparsync_lab.cli.bench_output import Out, bench_file
from sparsync_lab.cli.progress import progress_bar
from sparsync_lab.environment import environment

HEADINGS = ("hook + update", "ms", "p20-p80", "ratio", "host ms", "launches", "state")


def adamw(
    size: Annotated[list[int], typer.Option(help="Parameters; may be given several times.")] = [  # noqa: B006
        25_600_000,
        100_000_000,
    ],
    density: Annotated[float, typer.Option(help="Share of the entries to send, in (0, 1].")] = 0.001,
    rounds: Annotated[int, typer.Option(help="How often every method is timed.")] = 30,
    device: Annotated[str, typer.Option(help="cpu or cuda; by default cuda, if there is one.")] = "",
    out: Out = None,
    profile: Annotated[
        Path | None, typer.Option(help="Text file for the ten calls that take the host longest.")
    ] = None,
) -> None:
    """Time hook and update of a single worker, whose messages go nowhere, against AdamW's fused step alone.

    Beside the times of a step: kernels and copies, blocks of memory asked for, whether the host waits, and the bytes
    that are kept for the next step over those of the parameters.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    out = bench_file(out, f"bench-adamw-{'gpu' if device == 'cuda' else 'cpu'}.csv")
    console, where = Console(), environment()
    if device == "cuda":
        where["device"] = torch.cuda.get_device_name()
    lines, profiles = list[dict[str, Any]](), list[str]()
    for numel in size:
        with progress_bar(console, f"{numel:,} parameters", WARM_UP + rounds) as progress:
            rows = measure(numel, density, rounds, torch.device(device), progress, profile is not None)
        console.print(_table(rows))
        lines += [_line(row, rows[0]) | where for row in rows]
        profiles += [f"{row.method}, {row.parameters:,} parameters\n{row.profile}\n" for row in rows]
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    print(f"results: {out}")
    if profile is not None:
        profile.write_text("\n".join(profiles), encoding="utf-8")


def _table(rows: list[AdamWRow]) -> Table:
    title = f"{rows[0].parameters:,} parameters, density {rows[0].density:g}; ratio to {rows[0].method} alone"
    table = Table(title=title, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == HEADINGS[0] else "right", no_wrap=True)
    for row in rows:
        low, median, high = (quantile(row.times, share) for share in (0.2, 0.5, 0.8))
        ratio, host = median / quantile(rows[0].times, 0.5), quantile(row.host, 0.5)
        asked = [_number(value) for value in (row.launches, row.state)]
        table.add_row(row.method, f"{median:.3f}", f"{low:.3f}-{high:.3f}", f"{ratio:.2f}", f"{host:.3f}", *asked)
    return table


def _number(value: float | None) -> str:
    """Return what was counted, on a GPU alone."""
    return "" if value is None else f"{value:.4g}"


def _line(row: AdamWRow, floor: AdamWRow) -> dict[str, Any]:
    p20, p50, p80 = (quantile(row.times, share) for share in (0.2, 0.5, 0.8))
    own = quantile(floor.times, 0.5)
    return {
        "method": row.method,
        "size": row.parameters,
        "density": row.density,
        "dtype": "fp32",
        "settling_steps": WARM_UP,
        "rounds": len(row.times),
        "p20_ms": f"{p20:.4f}",
        "p50_ms": f"{p50:.4f}",
        "p80_ms": f"{p80:.4f}",
        "host_p50_ms": f"{quantile(row.host, 0.5):.4f}",
        "launches": _number(row.launches),
        "allocations": _number(row.allocated),
        "host_waits": _number(row.waits),
        "state_over_parameters": _number(row.state),
        "floor": floor.method,
        "floor_p50_ms": f"{own:.4f}",
        "ratio_to_floor": f"{p50 / own:.4f}",
    }
