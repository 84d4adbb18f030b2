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
from sparsync_lab.training.settings import ADAMW, SGD, Outcome, Point
from sparsync_lab.training.slow_link import seconds_on_slow_link

MOMENTUM = (
    "Momentum: keep leaves it in the optimizer, behind the residual; move takes it out, and the optimizer steps with "
    "rate / (1 − momentum); correct puts it before the residual; preconditioned, AdamW's updates are what is exchanged."
)
OPTIMIZERS = {
    SGD: "SGD with rate {0.rate:g} and momentum {0.momentum:g}",
    ADAMW: "AdamW with rate {0.rate:g} and betas {0.momentum:g} and 0.999",
}
ALIKE = 1.1  # times the fewest bytes are about as few
HEADINGS = ("method", "test accuracy", "bytes per step", "less than dense", "entries sent", "step here", "at 1 Gb/s")


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
            f"{1e3 * seconds_on_slow_link(line.training, workers, line.step_s):.1f} ms",
        ]
        rows.append(Row(cells, _warning(line)))
    seeds, images = lines[0].seeds, TEST_IMAGES[training.data]
    notes = [
        f"{training.model} on {training.data}, {workers} workers × {training.batch} images, {training.steps} steps; "
        f"{OPTIMIZERS[training.optimizer].format(training)}. "
        + (f"Mean of {seeds} seeds ± their standard deviation" if seeds > 1 else "One seed only")
        + f"; {images:,} test images, so that one is {100 / images:.2g} points.",
        "Bytes are what one worker puts on the network in a step, headers and indices included, against a dense ring "
        "all-reduce in fp32. Entries sent are counted over the whole model: small tensors, which travel dense, "
        "are among them, so that the share is above the density that a method chooses from the others.",
        "All workers share one machine and its loopback network: steps here show overhead, not what a slow network "
        "would gain. At 1 Gb/s is the planner's forecast: the step here, and what backward does not hide of exchanges "
        "between machines with such links.",
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
    missing = [line for line in sparse if line.misses and not line.diverged]
    diverged = [line for line in lines if line.diverged]
    said = []
    if fine:
        least = min(line.bytes for line in fine)
        near = [line for line in fine if line.bytes <= ALIKE * least]
        best = max(near, key=lambda line: line.accuracy)
        names = " and ".join(line.label for line in near)
        which = f"{names} send about as little, and {best.label} is the most accurate of them"
        said.append(
            f"Of the methods within a point of dense, {which if len(near) > 1 else f'{best.label} sends least'}: "
            f"{_less(best)}, with an accuracy of {100 * best.accuracy:.1f} % against {100 * dense.accuracy:.1f} %."
        )
    if diverged:
        said.append(f"Ended in NaN: {', '.join(line.label for line in diverged)}.")
    if missing:
        each = [f"{line.label} (by {100 * line.gap:.1f} points, {_less(line)})" for line in missing]
        said.append(f"More than {100 * TOLERANCE:g} point under dense: {', '.join(each)}.")
    return said


def charts(lines: Sequence[MethodSummary]) -> list[Chart]:
    """Return charts of accuracy over steps and, if anything travels, over bytes, and of the bytes of a step."""
    # Ends are what is compared: how curves climb there need not be seen from the very bottom.
    shown = (max(0.0, 10 * (min(100 * line.accuracy for line in lines) // 10 - 3)), 101.0)
    over_steps = [_curve(line, lambda point: point.step) for line in lines]
    over_bytes = [_curve(line, lambda point: point.bytes) for line in lines]
    drawn: list[Chart] = [LineChart("Test accuracy over steps", "steps", over_steps, shown, "%")]
    if lines[0].bytes:
        bars = [Bar(line.label, line.ratio, f"{bytes_text(line.bytes)}, {_less(line)}") for line in lines[1:]]
        first = Bar(lines[0].label, 1.0, bytes_text(lines[0].bytes))
        sent = "sent by one worker"
        drawn.append(LineChart("Test accuracy over bytes sent", sent, over_bytes, shown, "%", log_x=True, x_unit="B"))
        drawn.append(BarChart("Bytes a worker sends per step", "times less than dense", [first, *bars], log_x=True))
    return drawn


def page(
    title: str, lines: Sequence[MethodSummary], workers: int, where: Mapping[str, str], remarks: Sequence[str] = ()
) -> Page:
    """Return the report."""
    captions = (
        "Mean over the seeds. The band reaches from the lowest to the highest." if lines[0].seeds > 1 else "One seed.",
        "The same over what one worker has put on the network so far; each number of the axis is ten times the last.",
        "How many times less than dense, on an axis of powers: the same length is the same factor.",
    )
    figures = [Figure(chart, caption) for chart, caption in zip(charts(lines), captions, strict=False)]
    return Page(title, [*findings(lines), *remarks], [table(lines, workers), *figures, methods(lines)], where)


def _warning(line: MethodSummary) -> str:
    if line.diverged:
        return f"{line.diverged} of {line.seeds} trainings ended in NaN"
    return f"misses dense by {100 * line.gap:.1f} points" if line.misses else ""


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
        "optimizer": training.optimizer,
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
        "step_at_1_gbit_ms": f"{1e3 * seconds_on_slow_link(training, workers, line.step_s):.3f}",
    }
