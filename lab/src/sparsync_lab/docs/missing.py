"""The trainings that the papers' items ask for and nobody has made yet."""

from __future__ import annotations

from sparsync_lab.docs.sources import Sources, plain, table
from sparsync_lab.papers import ITEMS
from sparsync_lab.papers.beyond import ORDER
from sparsync_lab.papers.claims.verdicts import CLAIMS
from sparsync_lab.papers.evidence import gpu_minutes
from sparsync_lab.papers.evidence_questions import EVIDENCE, JOBS, questions
from sparsync_lab.papers.item import RunContext
from sparsync_lab.papers.run import file_of, model_title


def trainings(sources: Sources) -> str:
    """Return tables of them, the most valuable first, with the minutes that they take of a GPU."""
    first, beside = _of_questions(sources)
    others, alone = _of_sweeps(sources)
    parts = [f"No training of `{EVIDENCE}` is missing."]
    if first:
        parts = [
            f"`{EVIDENCE}`, {beside:.0f} minutes in all, with {JOBS} trainings at a time:",
            table(("question", "which asks in all", "missing trainings", "GPU minutes"), first),
        ]
    if not others:
        return "\n\n".join([*parts, "No other item lacks a training."])
    keys = dict.fromkeys(row[0] for row in others)
    parts += [
        f"The others, {alone:.0f} minutes in all, one training at a time; several at a time take less. "
        "What their items judge, which not each of these trainings changes:",
        "\n".join(f"- {key}: {_judged_by(key.strip('`'))}" for key in keys),
        table(("item", "trainings", "GPU minutes"), others),
    ]
    return "\n\n".join(parts)


def _of_questions(sources: Sources) -> tuple[list[list[str]], float]:
    """Return the questions that have trainings which are missing, and what all of these take."""
    context, rows, total = RunContext(output=sources.folder / "papers"), [], 0.0
    for one in questions():
        left = [run for run in one.runs if not file_of(context, run).is_file()]
        by_model = {run.model: [other.label for other in left if other.model == run.model] for run in left}
        minutes = sum(map(gpu_minutes, left))
        names = (f"{model_title(model)}: {'; '.join(labels)}" for model, labels in by_model.items())
        rows += [[one.name, plain(one.asks), plain(". ".join(names)), f"{minutes:.1f}"]] if left else []
        total += minutes
    return rows, total


def _of_sweeps(sources: Sources) -> tuple[list[list[str]], float]:
    """Return the stages of sweeps that are not done, what else items ask for, and what all of the stages take."""
    rows, total = [], 0.0
    for item in ITEMS.values():
        if not sources.has_item(item.file):
            continue
        result = sources.item(item.file).result
        stages = [row.cells for own in result.tables if own.caption == ORDER for row in own.rows]
        if not stages and item.key != EVIDENCE:
            rows += [[f"`{item.key}`", plain(name), "–"] for name in result.missing]
        for _, name, _, done, _, minutes, missing in stages:
            if missing:
                what = f"{name.partition(': ')[0]}: {missing} ({done} done)"
                rows.append([f"`{item.key}`", plain(what), minutes])
                total += float(minutes)
    return rows, total


def _judged_by(key: str) -> str:
    """Return the claims and questions of an item, without those of other items that are judged by some of its
    trainings, too."""
    return plain("; ".join(one.text for one in CLAIMS if one.item == key))
