"""What ``compare`` and ``demo`` show of their outcomes: a table, a page, files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Printed
from rich.text import Text as Written

from sparsync_lab.cli.training_progress import bytes_text
from sparsync_lab.data import TEST_IMAGES
from sparsync_lab.report import (
    Bar,
    BarChart,
    Chart,
    Curve,
    Figure,
    LineChart,
    Page,
    Row,
    Table,
    mean_and_std_text,
    png,
    times,
    write,
    write_csv,
)
from sparsync_lab.training.compare import TOLERANCE, MethodSummary, options
from sparsync_lab.training.settings import Outcome, Point

MOMENTUM = (
    "Momentum: keep leaves it in the optimizer, behind the residual; move takes it out, and the optimizer steps with "
    "rate / (1 − momentum); correct puts it before the residual."
)
HEADINGS = ("method", "test accuracy", "bytes per step", "less than dense", "density", "step time")


def show(console: Console, lines: Sequence[MethodSummary], workers: int, remarks: Sequence[str] = ()) -> None:
    """Print the table and its findings on a terminal."""
    made = table(lines, workers)
    printed = Printed(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for i, heading in enumerate(made.headings):
        longest = max(len(row.cells[i]) for row in made.rows)
        printed.add_column(heading.replace(" ", "\n", 1), justify="right" if i else "left", min_width=longest)
    for row in made.rows:
        first = Written(row.cells[0] + (row.warning and f"\n{row.warning}"))
        printed.add_row(first, *row.cells[1:], style="red" if row.warning else None)
    console.print(printed)
    for sentence in (*made.notes, *findings(lines), *remarks):
        console.print(sentence, highlight=False)


def save(
    out: Path,
    title: str,
    outcomes: Sequence[Outcome],
    lines: Sequence[MethodSummary],
    workers: int,
    where: Mapping[str, str],
    remarks: Sequence[str] = (),
) -> Path:
    """Write ``outcomes.json``, ``table.csv``, ``compare.png`` and ``report.html`` into ``out``; return the path of the
    last."""
    content = {"environment": dict(where), "outcomes": [outcome.to_json() for outcome in outcomes]}
    (out / "outcomes.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    write_csv(out / "table.csv", [_csv_line(line, workers) | dict(where) for line in lines])
    png(charts(lines)[:2], out / "compare.png")
    write(page(title, lines, workers, where, remarks), out / "report.html")
    return out / "report.html"


def table(lines: Sequence[MethodSummary], workers: int) -> Table:
    """Return the comparison as a table."""
    training = lines[0].training
    rows = []
    for line in lines:
        cells = [
            line.label,
            mean_and_std_text(100 * line.accuracy, None if line.deviation is None else 100 * line.deviation, "%"),
            f"{line.bytes:,.0f}",
            times(line.ratio) if line.bytes else "–",
            f"{100 * line.density:.3g} %",
            f"{1e3 * line.step_s:.1f} ms",
        ]
        rows.append(Row(cells, f"misses dense by {100 * line.gap:.1f} points" if line.misses else ""))
    seeds, images = lines[0].seeds, TEST_IMAGES[training.data]
    notes = [
        f"{training.model} on {training.data}, {workers} workers × {training.batch} images, {training.steps} steps; "
        f"SGD with rate {training.rate:g} and momentum {training.momentum:g}. "
        + (f"Mean of {seeds} seeds ± their standard deviation" if seeds > 1 else "One seed only")
        + f"; {images:,} test images, so that one is {100 / images:.2g} points.",
        "Bytes are what one worker puts on the network in a step, headers and indices included, against a dense ring "
        "all-reduce in fp32. Small tensors that travel dense count in the density.",
        "All workers share one machine and its loopback network: step times show overhead, not what a slow network "
        "would gain.",
    ]
    return Table(f"Accuracy and traffic of {len(lines)} methods", HEADINGS, rows, notes)


def methods(lines: Sequence[MethodSummary]) -> Table:
    """Return what each method is, as a table of the options of ``attach``."""
    content = [options(line.training) for line in lines]
    rows = [Row([line.label, *chosen.values()]) for line, chosen in zip(lines, content, strict=True)]
    return Table("The methods, as options of sparsync.attach", ["method", *content[0]], rows, [MOMENTUM])


def findings(lines: Sequence[MethodSummary]) -> list[str]:
    """Return what the table shows, in a sentence or two."""
    dense, sparse = lines[0], [line for line in lines[1:] if line.bytes]
    fine = [line for line in sparse if not line.misses and line.ratio > 1]
    missing = [line for line in sparse if line.misses]
    said = []
    if fine:
        best = max(fine, key=lambda line: line.ratio)
        said.append(
            f"Of the methods within a point of dense, {best.label} sends least: {_less(best)}, with an "
            f"accuracy of {100 * best.accuracy:.1f} % against {100 * dense.accuracy:.1f} %."
        )
    if missing:
        names = [f"{line.label} (by {100 * line.gap:.1f} points, {_less(line)})" for line in missing]
        said.append(f"More than {100 * TOLERANCE:g} point under dense: {', '.join(names)}.")
    return said


def charts(lines: Sequence[MethodSummary]) -> list[Chart]:
    """Return charts of accuracy over steps and, if anything travels, over bytes, and of the bytes of a step."""
    # Ends are what is compared: how curves climb there need not be seen from the very bottom.
    shown = (max(0.0, 10 * (min(100 * line.accuracy for line in lines) // 10 - 3)), 101.0)
    over_steps = [_curve(line, lambda point: point.step) for line in lines]
    over_bytes = [_curve(line, lambda point: point.bytes) for line in lines]
    drawn: list[Chart] = [LineChart("Test accuracy over steps", "steps", over_steps, shown, "%")]
    if lines[0].bytes:
        bars = [Bar(line.label, line.bytes, f"{bytes_text(line.bytes)}, {_less(line)}") for line in lines[1:]]
        first = Bar(lines[0].label, lines[0].bytes, bytes_text(lines[0].bytes))
        sent = "sent by one worker"
        drawn.append(LineChart("Test accuracy over bytes sent", sent, over_bytes, shown, "%", log_x=True, x_unit="B"))
        drawn.append(BarChart("Bytes a worker sends per step", "bytes per step", [first, *bars], x_unit="B"))
    return drawn


def page(
    title: str, lines: Sequence[MethodSummary], workers: int, where: Mapping[str, str], remarks: Sequence[str] = ()
) -> Page:
    """Return the report."""
    captions = (
        "Mean over the seeds. The band reaches from the lowest to the highest." if lines[0].seeds > 1 else "One seed.",
        "The same over what one worker has put on the network so far; each number of the axis is ten times the last.",
        "From 0, so that lengths compare; numbers tell short bars apart.",
    )
    figures = [Figure(chart, caption) for chart, caption in zip(charts(lines), captions, strict=False)]
    return Page(title, [*findings(lines), *remarks], [table(lines, workers), *figures, methods(lines)], where)


def _less(line: MethodSummary) -> str:
    return f"{times(line.ratio)} less" if line.ratio >= 1 else f"{times(1 / line.ratio)} more"


def _curve(line: MethodSummary, x: Callable[[Point], float]) -> Curve:
    """Return the mean over the seeds, point by point, and the band of all of them."""
    points = list(zip(*line.curves, strict=True))
    accuracies = [[100 * point.accuracy for point in same] for same in points]
    return Curve(
        line.label,
        [fmean(x(point) for point in same) for same in points],
        [fmean(values) for values in accuracies],
        [min(values) for values in accuracies] if line.seeds > 1 else (),
        [max(values) for values in accuracies] if line.seeds > 1 else (),
    )


def _csv_line(line: MethodSummary, workers: int) -> dict[str, Any]:
    training, asked = line.training, options(line.training)
    return {
        "method": line.label,
        "data": training.data,
        "model": training.model,
        "workers": workers,
        "batch": training.batch,
        "steps": training.steps,
        "rate": training.rate,
        "momentum": training.momentum,
        "momentum_mode": asked["momentum"],
        **{name: asked[name] for name in ("compressor", "collective", "scope", "values", "indices")},
        "asked_density": asked["density"],
        "seeds": line.seeds,
        "accuracy_mean": f"{line.accuracy:.5f}",
        "accuracy_std": "" if line.deviation is None else f"{line.deviation:.5f}",
        "points_under_dense": f"{100 * line.gap:.2f}",
        "misses_dense": "yes" if line.misses else "no",
        "bytes_per_step": f"{line.bytes:.0f}",
        "dense_bytes_per_step": f"{line.dense_bytes:.0f}",
        "times_less_than_dense": f"{line.ratio:.2f}",
        "density": f"{line.density:.6f}",
        "step_p50_ms": f"{1e3 * line.step_s:.3f}",
    }
