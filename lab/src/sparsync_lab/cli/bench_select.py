"""``sparsync bench select``: what selecting entries costs beside adding the gradient to the residual."""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sparsync.kernels import cpu
from sparsync_lab.bench.bench_methods import FLOOR
from sparsync_lab.bench.model_shapes import MODELS
from sparsync_lab.bench.preconditioned_methods import PRECONDITIONED_FLOOR
from sparsync_lab.bench.select import DTYPES, SelectBench, SelectRow, TimeBudget, fits, measure, quantile
from sparsync_lab.bench.select_figure import draw
from sparsync_lab.cli.bench_output import Out, bench_file
from sparsync_lab.cli.progress import progress_bar
from sparsync_lab.environment import environment
from sparsync_lab.packages import require

HEADINGS = ("method", "ms", "ratio", "topk/", "count/k", "energy", "syncs", "allocs")
SIZES, GPU_SIZES = (1_000_000, 25_600_000), (100_000_000, 400_000_000)
PLAIN_TOPK = "topk (PyTorch)"


def select(
    device: Annotated[str, typer.Option(help="cpu or cuda; by default cuda, if there is one.")] = "",
    size: Annotated[
        list[int],
        typer.Option(help="Length of the gradient; by default 1 and 25.6, on a GPU 100 and 400 million; repeatable."),
    ] = [],  # noqa: B006
    density: Annotated[list[float], typer.Option(help="Share of the entries to send; may be given several times.")] = [  # noqa: B006
        0.0001,
        0.001,
        0.01,
    ],
    dtype: Annotated[list[str], typer.Option(help="Of the gradient; may be given several times.")] = list(DTYPES),  # noqa: B006
    rounds: Annotated[int, typer.Option(help="How often every method is timed.")] = 30,
    threads: Annotated[int, typer.Option(help="Threads of torch, on a CPU.")] = 1,
    shapes: Annotated[bool, typer.Option(help="Also compare scopes over the tensors of two models.")] = False,
    alone: Annotated[
        bool, typer.Option("--alone", help="Time selection alone, in plain PyTorch and without error feedback.")
    ] = False,
    budget: Annotated[float, typer.Option(help="Seconds after which no new method is started.")] = 3600,
    out: Out = None,
) -> None:
    """Time every method with error feedback against the bare addition e += g, in one run."""
    clock = TimeBudget(budget)
    require("matplotlib")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    benches = [
        SelectBench(device, n, share, kind, rounds, threads=threads, alone=alone)
        for n in size or [*SIZES, *(n for n in GPU_SIZES if device == "cuda" and fits(n))]
        for kind in dtype
        for share in density
    ]
    if alone and shapes:
        raise ValueError("shapes must be left out with alone")
    for model in MODELS if shapes else ():
        benches += [SelectBench(device, 1000, d, t, rounds, model, threads) for t in dtype for d in density]
    out = bench_file(out, f"bench-select-{'alone-' if alone else ''}{'gpu' if device == 'cuda' else 'cpu'}.csv")
    where, console = _where(device, threads), Console()
    measured: list[SelectRow] = []
    lines: list[dict[str, Any]] = []
    missed: list[str] = []
    for bench in benches:
        with progress_bar(console, _title(bench), 2 * len(bench.entries)) as progress:
            rows, unreached = measure(bench, clock, progress)
        missed += [f"{name}, {_title(bench)}" for name in unreached]
        if rows:
            console.print(_table(bench, rows))
            measured += rows
            lines += [_line(row, rows) | where for row in rows]
            _write(out, lines)  # after every table: a run that is broken off leaves what it has
    for note in _notes(missed):
        console.print(note, highlight=False)
    flat = [row for row in measured if not (row.bench.model or row.bench.alone)]
    if flat:
        draw(flat, out.with_suffix(".png"), f"{where['device']}, torch {where['torch']}, {where['date']}")
        print(f"figure: {out.with_suffix('.png')}")
    if measured:
        print(f"results: {out}")


def _where(device: str, threads: int) -> dict[str, str]:
    where = environment()
    if device == "cuda":
        where["device"] = torch.cuda.get_device_name()
    triton = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else ""
    numba = importlib.metadata.version("numba") if cpu.available() else ""
    return where | {"triton": triton, "threads": str(threads), "numba": numba}


def _title(bench: SelectBench) -> str:
    return f"{bench.model or 'gradient'} of {bench.numel:,} entries, {bench.dtype}, density {bench.density:g}"


def _table(bench: SelectBench, rows: Sequence[SelectRow]) -> Table:
    table = Table(title=_title(bench), box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for heading in HEADINGS:
        name = heading == "method"  # a long one takes two lines, so that numbers are whole
        table.add_column(heading, justify="left" if name else "right", no_wrap=not name)
    for row in rows:
        table.add_row(
            f"{row.method} {row.scope}" if bench.model else row.method,
            f"{row.ms():.3f}",
            f"{row.ratio:.2f}",
            _over(row, rows, ".1f"),
            _known(row.count, ".3f"),
            _known(row.energy, ".3f"),
            row.syncs,
            _known(row.allocations, "d"),
        )
    return table


def _known(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _over(row: SelectRow, rows: Sequence[SelectRow], form: str) -> str:
    """Return how many times longer plain PyTorch's top-k takes."""
    return next((format(other.ms() / row.ms(), form) for other in rows if other.method == PLAIN_TOPK), "")


def _notes(missed: Sequence[str]) -> list[str]:
    notes = [
        f"ratio: to {FLOOR}; of what zeroes the gradient to the addition that zeroes it too; of AdamW's rows, which "
        f"are preconditioned, to {PRECONDITIONED_FLOOR}: as many bytes. topk/: how many times longer torch.topk with "
        "error feedback takes. energy: of what is sent, over that of the k largest."
    ]
    if missed:
        notes.append(f"The budget was spent before {len(missed)} rows: {'; '.join(missed)}.")
    return notes


def _write(out: Path, lines: Sequence[dict[str, Any]]) -> None:
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def _line(row: SelectRow, rows: Sequence[SelectRow]) -> dict[str, Any]:
    bench = row.bench
    return {
        "method": row.method,
        "family": row.family,
        "model": bench.model,
        "scope": row.scope,
        "size": bench.numel,
        "density": bench.density,
        "dtype": bench.dtype,
        "settling_steps": row.warmed_up,
        "rounds": len(row.times),
        "p20_ms": f"{row.ms(0.2):.4f}",
        "p50_ms": f"{row.ms():.4f}",
        "p80_ms": f"{row.ms(0.8):.4f}",
        "host_p50_ms": f"{quantile(row.host, 0.5):.4f}",
        "floor": row.floor,
        "floor_p50_ms": f"{quantile(row.floors, 0.5):.4f}",
        "ratio_to_floor": f"{row.ratio:.4f}",
        "pytorch_topk_to_this": _over(row, rows, ".3f"),
        "count_over_k": _known(row.count, ".4f"),
        "energy_over_topk": _known(row.energy, ".4f"),
        "syncs": row.syncs,
        "allocations_5_steps": _known(row.allocations, "d"),
    }
