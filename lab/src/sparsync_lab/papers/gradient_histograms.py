"""Histograms of gradient plus residual over a training: P1's figures 2, 7 and 8."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparsync import theory
from sparsync_lab.models import CATALOGUE
from sparsync_lab.papers.curves import loss_by_step, train_runs
from sparsync_lab.papers.item import Result, RunContext
from sparsync_lab.papers.run import History, Run, model_title
from sparsync_lab.papers.run_queue import train_missing
from sparsync_lab.report import Curve, Figure, LineChart, Row, Table
from sparsync_lab.training.methods import DENSE

BESIDE_TOPK, SHAPES = "Deviation beside TopK-SGD's", "The shapes in numbers"  # tables
TIMES, CLIPPED_LOOKS = "times TopK-SGD's", "clipped"  # headings
THIS_ONE = "this one too"  # of clipped looks
KURTOSIS, WITHIN, LARGEST, HOLDS = "kurtosis", "within a deviation", "in the k largest", "holds"
# Shares of distributions within a deviation of their mean.
UNIFORM_WITHIN, NORMAL_WITHIN, LAPLACE_WITHIN = (
    1 / math.sqrt(3),
    math.erf(1 / math.sqrt(2)),
    1 - math.exp(-math.sqrt(2)),
)
NEARLY = 0.999  # of the norm at which a gradient is clipped: its deviation is stored in five digits


def draw_histograms(
    context: RunContext, runs: Sequence[Run], topk: Sequence[Run], remarks: Sequence[str] = ()
) -> Result:
    """Draw histograms of the first worker's gradient plus residual.

    Args:
        topk: trainings of figure 2 that they are compared with.
    """
    done, result = train_runs(context, runs)
    figures, rows = [], []
    for label, history in done.items():
        figures.append(_histogram(label, history))
        rows += [_shape_row(label, snapshot) for snapshot in history.snapshots if "x" in snapshot]
    headings = [
        "model, step", "deviation", "largest/deviation", KURTOSIS, WITHIN, LARGEST, "π − line", "bend of π²", "excess",
        HOLDS,
    ]  # fmt: skip
    table = Table(
        f"{SHAPES}; a normal distribution has kurtosis 3, and {100 * NORMAL_WITHIN:.1f} % within a deviation",
        headings,
        rows,
        [
            "In the k largest: the share of the squared norm in the largest 0.1 % of the entries. π − line, bend and "
            "excess: at most. Holds: π below its line and π² convex, what Theorem 1's proof takes; a uniform "
            f"distribution (kurtosis 1.8, {100 * UNIFORM_WITHIN:.1f} % within a deviation) just meets that. Laplace's "
            f"has 6 and {100 * LAPLACE_WITHIN:.1f} %."
        ],
    )
    curves = loss_by_step("Training loss", done, "To see that they learn.")
    sent = ", ".join(f"{label} {100 * history.density:.3g} %" for label, history in done.items())
    notes = [
        "LSTM-PTB is trained without momentum, as in the authors' code. Both LSTM are clipped: in that code the "
        "gradient after the exchange, here each worker's before its residual is added. Where that strikes, the limit "
        "sets the norm of a dense gradient, and so its deviation.",
        "P1 trains by 16 workers, as here but for the two LSTM, which have 2: what is drawn is one worker's, and the "
        "others matter by the mean alone. P1 says that different workers have very close distributions: not tested, "
        "as one worker's are stored.",
        *([f"Share of entries sent: {sent}."] if sent else []),
    ]
    clipped = {} if context.quick else clipped_looks(done.values())
    tables = [table, *_beside_topk(done, _stored(context, topk), clipped)]
    return replace(result, tables=tables, figures=[*figures, curves], notes=[*remarks, *notes, *result.notes])


def clipped_looks(histories: Iterable[History]) -> dict[str, dict[int, bool]]:
    """Return by model and step whether the gradient of Dense-SGD had the norm at which it is clipped; of those that are
    never clipped, and of other methods, whose residual is not, nothing."""
    found = {}
    for history in histories:
        run, looks = history.run, _deviations(history)
        if run.method == DENSE and run.clip is not None:
            limit = NEARLY * run.clip / math.sqrt(CATALOGUE[run.model].parameters)
            found[run.model] = {step: own >= limit for step, own in looks.items()}
    return found


def _stored(context: RunContext, runs: Sequence[Run]) -> dict[str, History]:
    """Return those trainings that are stored, by model."""
    return {history.run.model: history for history in train_missing(context.read_only(), runs)[0].values()}


def _beside_topk(
    done: Mapping[str, History], topk: Mapping[str, History], clipped: Mapping[str, Mapping[int, bool]]
) -> list[Table]:
    """Compare deviations with those of TopK-SGD, at the last look at which both are known."""
    rows = []
    for history in done.values():
        model = history.run.model
        pair = [_deviations(one) for one in (history, topk.get(model)) if one is not None]
        both = sorted(set.intersection(*map(set, pair))) if len(pair) == 2 else []
        if both:
            own, other = (found[both[-1]] for found in pair)
            cells = [model_title(model), str(both[-1]), f"{own:.2e}", f"{other:.2e}", f"{own / other:.2f}"]
            rows.append(Row([*cells, _clipped(clipped.get(model, {}), both[-1])] if clipped else cells))
    notes = (
        ["Clipped: at how many looks the limit set the norm of the gradient; whether at this step."] if clipped else []
    )
    headings = ["model", "step", "here", "TopK-SGD", TIMES, *([CLIPPED_LOOKS] if clipped else [])]
    return [Table(BESIDE_TOPK, headings, rows, notes)] if rows else []


def _clipped(looks: Mapping[int, bool], step: int) -> str:
    """Return at how many looks a gradient was clipped, and that it was at this step."""
    here = f", {THIS_ONE}" if looks.get(step) else ""
    return f"{sum(looks.values())} of {len(looks)} looks{here}" if looks else "–"


def _deviations(history: History) -> dict[int, float]:
    return {snapshot["step"]: snapshot["deviation"] for snapshot in history.snapshots if "x" in snapshot}


def _histogram(label: str, history: History) -> Figure:
    curves = [Curve(f"step {s['step']}", s["x"], s["density"]) for s in history.snapshots if "x" in s]
    return Figure(
        LineChart(label, "gradient + residual", curves, log_y=True),
        f"{label}: density within six deviations, on a logarithmic axis.",
    )


def within_a_deviation(snapshot: Mapping[str, Any]) -> float:
    """Return the share of the entries within a deviation of their mean, by the histogram."""
    x, mean, deviation = snapshot["x"], snapshot["mean"], snapshot["deviation"]
    half = (x[-1] - x[0]) / (len(x) - 1) / 2
    overlaps = (min(at + half, mean + deviation) - max(at - half, mean - deviation) for at in x)
    return math.fsum(max(0.0, own) * density for own, density in zip(overlaps, snapshot["density"], strict=True))


def _shape_row(label: str, snapshot: Mapping[str, Any]) -> Row:
    shape = theory.BellShape(snapshot["above_line"], snapshot["bend"], snapshot["excess"])
    return Row(
        [
            f"{label}, {snapshot['step']}",
            f"{snapshot['deviation']:.2e}",
            f"{snapshot['largest'] / snapshot['deviation']:.1f}",
            f"{snapshot['kurtosis']:.1f}",
            f"{100 * within_a_deviation(snapshot):.1f} %",
            f"{100 * (1 - snapshot['errors'][0]):.2g} %",
            f"{snapshot['above_line']:.2g}",
            f"{snapshot['bend']:.2g}",
            f"{snapshot['excess']:.2g}",
            "yes" if shape.bell else "no",
        ]
    )
