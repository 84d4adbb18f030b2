"""``sparsync demo``: a small training, dense and sparse, on worker processes of this machine."""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sparsync.cli.progress import bar
from sparsync.experiments.data import check_workers, count
from sparsync.experiments.environment import environment
from sparsync.experiments.training import Outcome, Training, train_all

PLAIN = "plain DDP"
METHODS = (PLAIN, "topk", "threshold")
HEADINGS = ("method", "test accuracy", "bytes sent per step", "less than dense", "density", "step time", "")
TOLERANCE = 0.01  # a row this far under dense, or more, is shown as missing it


@dataclass(frozen=True)
class Line:
    """One row of the table: means over the seeds."""

    method: str
    accuracy: float
    bytes: float
    density: float
    step_s: float

    @classmethod
    def of(cls, method: str, outcomes: Sequence[Outcome]) -> Line:
        mean = statistics.fmean
        return cls(
            method,
            mean(o.accuracy for o in outcomes),
            mean(o.bytes for o in outcomes),
            mean(o.density for o in outcomes),
            statistics.median(o.step_s for o in outcomes),
        )

    def misses(self, dense: Line) -> bool:
        return self.accuracy < dense.accuracy - TOLERANCE

    def cells(self, dense: Line) -> list[str]:
        ratio = f"{dense.bytes / self.bytes:.1f} x" if self.bytes else "-"
        return [
            self.method,
            f"{self.accuracy:.1%}",
            f"{self.bytes:,.0f}",
            ratio,
            f"{self.density:.2%}",
            f"{1e3 * self.step_s:.1f} ms",
            f"misses dense by {100 * (dense.accuracy - self.accuracy):.1f} points" if self.misses(dense) else "",
        ]


def demo(
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps of each training.")] = 300,
    seeds: Annotated[int, typer.Option(help="Trainings of each method.")] = 3,
    density: Annotated[float, typer.Option(help="Share of the gradient entries to send, in (0, 1].")] = 0.01,
    out: Annotated[Path, typer.Option(help="Folder for report.html.")] = Path("runs/demo"),
) -> None:
    """Train a small network dense and sparse on processes of this machine, and compare."""
    if seeds < 1:
        raise ValueError(f"seeds must be 1 or more, got {seeds}")
    trainings = [_training(method, density, seed, steps) for method in METHODS for seed in range(seeds)]
    check_workers(workers, count("digits"), trainings[0].batch)
    out.mkdir(parents=True, exist_ok=True)

    console = Console()
    title = f"{len(trainings)} trainings on {workers} workers"
    with bar(console, title, steps * len(trainings)) as progress:
        outcomes = train_all(trainings, None, workers, progress)
    lines = [Line.of(method, outcomes[i * seeds : (i + 1) * seeds]) for i, method in enumerate(METHODS)]
    notes = _notes(workers, steps, seeds, density, trainings[0], lines)

    table = Table(*HEADINGS)
    for line in lines:
        table.add_row(*line.cells(lines[0]), style="red" if line.misses(lines[0]) else None)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)
    report = out / "report.html"
    report.write_text(_page(lines, notes), encoding="utf-8")
    print(f"report: {report}")


def _training(method: str, density: float, seed: int, steps: int) -> Training:
    """Plain SGD for every row: behind sparse error feedback momentum of 0.9 harms short trainings."""
    sgd = Training("topk", density=density, seed=seed, steps=steps, rate=0.2, momentum=0.0)
    return replace(sgd, method="dense", density=None) if method == PLAIN else replace(sgd, method=method)


def _notes(
    workers: int, steps: int, seeds: int, density: float, training: Training, lines: Sequence[Line]
) -> list[str]:
    notes = [
        f"MLP 64-256-256-10 on scikit-learn's digits, 450 test images; {workers} workers x {training.batch} images, "
        f"{steps} steps, mean of {seeds} seed(s); plain SGD without momentum, rate {training.rate:g}, for every row.",
        f"Asked for density {density:g}; biases travel dense and are counted in the density shown. Bytes are what one "
        "worker puts on the network in ring collectives, headers and indices included.",
        "All workers share this machine and its loopback network: step times show overhead, not what a slow network "
        "would gain.",
    ]
    if any(line.misses(lines[0]) for line in lines):
        notes.append("A sparse row misses dense by more than a point: train longer or send more (--steps, --density).")
    return notes


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Sparsync demo</title>
<style>
body {{ font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }}
table {{ border-collapse: collapse }} th, td {{ border-bottom: 1px solid #ccc; padding: .3em .8em; text-align: right }}
th:first-child, td:first-child {{ text-align: left }} .misses {{ color: #b00 }}
</style>
<h1>Sparsync demo</h1>
<table><tr>{head}</tr>
{rows}
</table>
{notes}
<p>{machine}</p>
</html>
"""


def _page(lines: Sequence[Line], notes: Sequence[str]) -> str:
    """The report: one file, nothing loaded from elsewhere."""
    rows = []
    for line in lines:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in line.cells(lines[0]))
        style = ' class="misses"' if line.misses(lines[0]) else ""
        rows.append(f"<tr{style}>{cells}</tr>")
    where = environment()
    machine = (
        f"{where['cpus']} CPU cores ({where['device']}), {where['system']}; python {where['python']}, "
        f"torch {where['torch']}, sparsync {where['sparsync']} {where['commit']}; {where['date']}"
    )
    return PAGE.format(
        head="".join(f"<th>{heading}</th>" for heading in HEADINGS),
        rows="\n".join(rows),
        notes="\n".join(f"<p>{html.escape(note)}</p>" for note in notes),
        machine=html.escape(machine),
    )
