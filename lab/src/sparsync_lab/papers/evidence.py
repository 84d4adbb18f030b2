"""Trainings that test claims where they can fail: listed with what they cost, shown as far as they are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from sparsync_lab.papers import tuned
from sparsync_lab.papers.curves import base_result, display_score, quick_changes
from sparsync_lab.papers.evidence_figures import question_figures
from sparsync_lab.papers.evidence_questions import (
    EVIDENCE,
    JOBS,
    TREE,
    TUNED,
    questions,
)
from sparsync_lab.papers.item import Item, Result, RunContext
from sparsync_lab.papers.p2_learned import learned, learned_notes
from sparsync_lab.papers.p3 import OTHERS, on_other_models
from sparsync_lab.papers.random_forms import fallen_note
from sparsync_lab.papers.run import History, Run, file_of, model_title
from sparsync_lab.papers.run_queue import check_only, process_queue
from sparsync_lab.papers.vgg16_gap import ASKED
from sparsync_lab.papers.vgg16_notes import change_tables, early_note, spread_note
from sparsync_lab.report import Figure, Row, Table


def evidence(context: RunContext) -> Result:
    """Train what is missing, in the order of the questions; show what is there."""
    asked = [(one, made(context, one.runs), made(context, one.beside)) for one in questions()]
    done: dict[str, History] = {}
    every = [run for _, runs, _ in asked for run in runs]
    check_only(context, every)
    process_queue(context, lambda: every, done)
    tables, figures, histories = [], list[Figure](), []
    process_queue(context.read_only(), lambda: [run for _, _, beside in asked for run in beside], done)
    for one, runs, beside in asked:
        tables.append(Table(one.asks, HEADINGS, [_row(run, done.get(run.name)) for run in (*runs, *beside)]))
        histories += [done[run.name] for run in (*runs, *beside) if run.name in done]
        figures += question_figures(one.name, (*beside, *runs), done)
        if one.asks == ASKED:
            tables += change_tables(context)
        if one.name == TUNED and not context.quick:
            tables.append(tuned.comparison((*runs, *beside), done))
        if one.name == TREE and not context.quick:
            tables += on_other_models(_by_model((*beside, *runs), done))
    notes = [f"{ONE_SEED}{spread_note(context)}", *early_note(context)]
    if not context.quick:
        trained = {run.label: done[run.name] for run in every if run.name in done}
        tables.append(learned(trained))
        notes += [*learned_notes(trained), *fallen_note(done[run.name] for run in every if run.name in done)]
    histories = list({history.run.name: history for history in histories}.values())
    result = base_result(context, histories, [run.name for run in every if run.name not in done])
    return replace(result, tables=tables, figures=figures, notes=[*notes, *result.notes])


def _by_model(runs: Iterable[Run], done: Mapping[str, History]) -> dict[str, dict[str, History]]:
    """Return dense, TopK-SGD and gTop-k of the other models of P3, by what they are called in its tables."""
    found: dict[str, dict[str, History]] = {model: {} for model in OTHERS}
    for run in runs:
        if run.model in OTHERS and run.name in done:
            label = run.method if run.method in ("dense", "topk") else run.label
            found[run.model][label] = done[run.name]
    return found


HEADINGS = ["training", "model", "last score", "unit", "density", "fell back", "steps"]
ONE_SEED = (
    "Rows at the end of a table are of other items. One seed each, but where a label or a table says otherwise: what "
    "differs by less than a point is no ranking."
)


def _row(run: Run, history: History | None) -> Row:
    if history is None:
        return Row([run.label, model_title(run.model), "not run", *[""] * 4])
    seen = [snapshot for snapshot in history.snapshots if "fallbacks" in snapshot]
    fell = f"{100 * seen[-1]['fallbacks'] / (seen[-1]['step'] * run.workers):.2g} %" if seen else "–"
    unit = "%" if history.score == "accuracy" else history.score
    shown = [f"{display_score(history.last, history.score):.2f}", unit, f"{100 * history.density:.4g} %", fell]
    return Row([run.label, model_title(run.model), *shown, f"{len(history.losses):,}"])


def made(context: RunContext, runs: Sequence[Run]) -> list[Run]:
    """Return the trainings as they are asked for; in a tiny setting the first alone, of LeNet-5."""
    if not context.quick:
        return [run.made(context) for run in runs]
    own = [replace(run, **quick_changes(run, model="lenet5", autocast=False, watch_every=2)) for run in runs[:1]]
    return [run.made(context) for run in own]


def order(context: RunContext) -> Table:
    """Return the trainings in their order, with what they take and whether they are done; train nothing."""
    rows, total = [], 0.0
    for one in questions():
        for run in one.runs:
            done = file_of(context, run.made(context)).is_file()
            total += 0 if done else gpu_minutes(run)
            rows.append(Row([one.name, f"{model_title(run.model)}: {run.label}", run.name, f"{gpu_minutes(run):.1f}",
                             f"{run.seconds / 60:.0f}", "done" if done else "missing"]))  # fmt: skip
    missing = f"training, {total:.0f} GPU minutes missing"
    headings = ["question", missing, "--only", "GPU minutes", f"minutes beside {JOBS - 1} others", ""]
    return Table("Trainings that test claims", headings, rows)


def gpu_minutes(run: Run) -> float:
    """Return what a training takes of a GPU, with as many others beside it."""
    return run.seconds / 60 / JOBS


ITEMS = (
    Item(
        EVIDENCE,
        "claims tested where they can fail",
        "Trainings that separate causes, baselines with other rates, and P2's table 1 without momentum.",
        evidence,
        ("CIFAR-10", "MNIST", "PTB", "a GPU"),
        45,
        order=order,
        trains=True,
    ),
)
