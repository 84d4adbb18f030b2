"""Accuracy over minutes: what ``sparsync lab train`` measures, shows and writes."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from statistics import fmean

from rich.console import Console

from sparsync_lab.cli.lab import measure_cells, new_table, parse_seconds
from sparsync_lab.environment import environment
from sparsync_lab.network.shaping import Rate
from sparsync_lab.network.steps import StepCell
from sparsync_lab.network.sweep import SweepFile, missing_cells, rows_of
from sparsync_lab.network.train import (
    TimedTraining,
    auto_of,
    method_name,
    methods_of,
    near_dense,
    read_training,
    timed,
    timed_auto,
)
from sparsync_lab.papers.run import History, model_title
from sparsync_lab.papers.store import replacing
from sparsync_lab.report import Curve, LineChart, png, write_csv

NOTE = (
    "Scores are those of stored trainings on virtual workers, step for step what as many processes reach. Seconds of a "
    "step were measured on hosts of this machine with compute waited for; all workers share its processors, also for "
    "selecting entries."
)


def show_over_minutes(
    training: list[Path],
    compute: str,
    rate: list[str],
    rounds: int,
    seconds: float,
    target: float | None,
    auto: bool,
    resume: bool,
    out: Path,
) -> None:
    """Time the steps of stored trainings, and show their scores over minutes; arguments are the command's."""
    histories = sorted(map(read_training, training), key=_kind)
    waited, rates = parse_seconds(compute), [Rate.parse(text) for text in dict.fromkeys(rate)]
    file, console = SweepFile(out.with_name(f"{out.stem}-steps.csv"), resume), Console()
    found: list[TimedTraining] = []
    for (model, workers), own in groupby(histories, key=_kind):
        alike = list(own)
        methods = list(dict.fromkeys(method for history in alike for method in methods_of(history)))
        methods += [auto_of(alike)] if auto else []
        cells = [(workers, StepCell(link, model, waited, rounds, seconds)) for link in rates]
        missing = missing_cells(cells, methods, file)
        measure_cells(missing, methods, console, lambda result: file.put(rows_of(result)))
        for _, cell in cells:
            found += [curve for history in alike for curve in timed(history, cell, file)]
            found += timed_auto(alike, cell, file) if auto else []
    targets = near_dense(histories) if target is None else dict.fromkeys((h.run.model for h in histories), target)
    charts = []
    for _, same in groupby(found, key=lambda curve: (*_kind(curve.history), curve.cell.rate)):
        curves = list(same)
        charts.append(_chart(curves))
        _show(console, curves, targets.get(curves[0].history.run.model))
    console.print(NOTE, highlight=False)
    where = environment()
    write_csv(out, [{**row, **where} for curve in found for row in curve.to_csv()])
    with replacing(out.with_suffix(".png")) as part:
        png(charts, part)
    print(f"results: {out}")


def _kind(history: History) -> tuple[str, int]:
    return history.run.model, history.run.workers


def _title(curve: TimedTraining) -> str:
    run, cell = curve.history.run, curve.cell
    return f"{model_title(run.model)}, {run.workers} workers, {cell.rate}, {1e3 * cell.compute:g} ms of compute"


def _chart(curves: list[TimedTraining]) -> LineChart:
    """Return a chart with a curve for each method: the mean of its seeds, and all of them as a band."""
    drawn, run, cell = list[Curve](), curves[0].history.run, curves[0].cell

    def kind(curve: TimedTraining) -> tuple[str, tuple[int, ...]]:
        return method_name(curve.label), tuple(curve.history.points)

    for label, points in dict.fromkeys(map(kind, curves)):
        seeds = [curve for curve in curves if kind(curve) == (label, points)]
        minutes = [fmean(own) for own in zip(*(curve.minutes for curve in seeds), strict=True)]
        scores = list(zip(*(curve.history.scores for curve in seeds), strict=True))
        drawn.append(Curve(label, minutes, [*map(fmean, scores)], [*map(min, scores)], [*map(max, scores)]))
    about = f"{model_title(run.model)}: {curves[0].history.score} over minutes"
    title = f"{run.workers} workers, {cell.rate}, {1e3 * cell.compute:g} ms of compute"
    return LineChart(title, about, drawn, log_x=True)


def _show(console: Console, curves: list[TimedTraining], target: float | None) -> None:
    reached = "to the target" if target is None else f"to {target:.4g}"
    table = new_table(_title(curves[0]), ("method", curves[0].history.score, "minutes", reached))
    for curve in curves:
        needed = None if target is None else curve.minutes_to(target)
        score = f"{curve.history.best:.4g}"
        table.add_row(curve.label, score, _number(curve.minutes[-1]), "-" if needed is None else _number(needed))
    console.print(table)


def _number(minutes: float) -> str:
    return f"{minutes:,.1f}" if minutes >= 10 else f"{minutes:.2f}"
