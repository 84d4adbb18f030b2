"""Histograms of gradient plus residual over a training: P1's figures 2, 7 and 8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparsync import theory
from sparsync_lab.papers.curves import loss_by_step, train_runs
from sparsync_lab.papers.item import Result, RunContext
from sparsync_lab.papers.run import History, Run, model_title
from sparsync_lab.papers.run_queue import train_missing
from sparsync_lab.report import Curve, Figure, LineChart, Row, Table

BESIDE_TOPK = "Deviation beside TopK-SGD's"


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
    headings = ["model, step", "deviation", "largest/deviation", "kurtosis", "π − line", "bend of π²", "excess", "bell"]
    table = Table(
        "The shapes in numbers; a normal distribution has kurtosis 3",
        headings,
        rows,
        [
            "π − line, bend and excess: at most; bell: π below its line and π² convex, which Theorem 1 rests on. A "
            "uniform distribution, of kurtosis 1.8, just meets that."
        ],
    )
    curves = loss_by_step("Training loss", done, "To see that they learn.")
    sent = ", ".join(f"{label} {100 * history.density:.3g} %" for label, history in done.items())
    notes = [
        "LSTM-PTB is trained without momentum and both LSTM are clipped, as in the authors' code.",
        "P1 trains by 16 workers, as here but for the two LSTM, which have 2: what is drawn is one worker's, and the "
        "others matter by the mean alone.",
        *([f"Of the entries was sent: {sent}."] if sent else []),
    ]
    tables = [table, *_beside_topk(context, done, topk)]
    return replace(result, tables=tables, figures=[*figures, curves], notes=[*remarks, *notes, *result.notes])


def _beside_topk(context: RunContext, done: Mapping[str, History], topk: Sequence[Run]) -> list[Table]:
    """Compare deviations with those of TopK-SGD, at the last look at which both are known."""
    others = {history.run.model: history for history in train_missing(context.read_only(), topk)[0].values()}
    rows = []
    for history in done.values():
        pair = [_deviations(one) for one in (history, others.get(history.run.model)) if one is not None]
        both = sorted(set.intersection(*map(set, pair))) if len(pair) == 2 else []
        if both:
            own, other = (found[both[-1]] for found in pair)
            rows.append(
                Row([model_title(history.run.model), str(both[-1]), f"{own:.2e}", f"{other:.2e}", f"{own / other:.2f}"])
            )
    headings = ["model", "step", "here", "TopK-SGD", "times TopK-SGD's"]
    return [Table(BESIDE_TOPK, headings, rows)] if rows else []


def _deviations(history: History) -> dict[int, float]:
    return {snapshot["step"]: snapshot["deviation"] for snapshot in history.snapshots if "x" in snapshot}


def _histogram(label: str, history: History) -> Figure:
    curves = [Curve(f"step {s['step']}", s["x"], s["density"]) for s in history.snapshots if "x" in s]
    return Figure(
        LineChart(label, "gradient + residual", curves, log_y=True),
        f"{label}: density within six deviations, on a logarithmic axis.",
    )


def _shape_row(label: str, snapshot: Mapping[str, Any]) -> Row:
    shape = theory.BellShape(snapshot["above_line"], snapshot["bend"], snapshot["excess"])
    return Row(
        [
            f"{label}, {snapshot['step']}",
            f"{snapshot['deviation']:.2e}",
            f"{snapshot['largest'] / snapshot['deviation']:.1f}",
            f"{snapshot['kurtosis']:.1f}",
            f"{snapshot['above_line']:.2g}",
            f"{snapshot['bend']:.2g}",
            f"{snapshot['excess']:.2g}",
            "yes" if shape.bell else "no",
        ]
    )
