"""Accuracy at equal bytes: ``beyond/accuracy`` in the tables that readers look for."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sparsync_lab.docs import adamw
from sparsync_lab.docs.sources import Sources, plain, stored_table, table
from sparsync_lab.papers import tuned
from sparsync_lab.papers.sweep import BALANCED, BASE, EARLY, LEVELS, WARM
from sparsync_lab.papers.tables import NOT_RUN
from sparsync_lab.report import Table

FILE = "beyond-accuracy"
FIRST = "Where the recipe stands"
SEARCH = "The search for rates: "
# A method of the trainings as users write it.
NAMES = {
    "dense": "dense",
    EARLY: "`default`, nothing dense, momentum corrected, bytes spent early",
    BASE: "`default`, nothing dense",
    "recipe default": "`default`",
    BALANCED: "`balanced`, nothing dense",
    WARM: "`balanced`, nothing dense, bytes spent early",
    LEVELS: '`balanced`, nothing dense, `values="levels"`',
    "GaussianK-SGD": "GaussianK-SGD, its count held near k",
    "TopK-SGD": "TopK-SGD (`paper`)",
    "DGC": "DGC (`dgc`), nothing dense",
}
LENGTHS = "ResNet-20 on CIFAR-10"
MODELS = ("LeNet-5 on MNIST", "VGG-16 on CIFAR-10", "LSTM-PTB", "LSTM-AN4", "GPT on PTB, AdamW")


def tables_of(sources: Sources) -> dict[str, Table]:
    """Return the tables of the result by caption."""
    return {table.caption: table for table in sources.item(FILE).result.tables}


def score_tables(sources: Sources, model: str) -> dict[str, Table]:
    """Return a model's tables by length."""
    pattern = re.compile(rf"{re.escape(model)}, \d+ workers of \d+, (?P<steps>[\d,]+) steps")
    found = ((pattern.fullmatch(caption), table) for caption, table in tables_of(sources).items())
    return {match["steps"]: table for match, table in found if match}


def scores(table: Table) -> Mapping[str, str]:
    """Return what each method of a table reached."""
    return {row.cells[0]: row.cells[1] for row in table.rows}


def by_length(sources: Sources) -> str:
    """Return ResNet-20's accuracy at every length."""
    lengths = score_tables(sources, LENGTHS)
    found = [scores(own) for own in lengths.values()]
    rows = [[shown, *(own.get(label, "–") for own in found)] for label, shown in NAMES.items()]
    shown = table(["accuracy, %", *(f"{steps} steps" for steps in lengths)], rows)
    return f"{shown}\n\n{_rates_by_length(lengths)}"


def _rates_by_length(lengths: Mapping[str, Table]) -> str:
    """Return the rates of rows that have another at another length: longer trainings were made when that was the best,
    or with several."""
    rates: dict[str, dict[str, str]] = {}
    for steps, own in lengths.items():
        for label, rate in _rates(own).items():
            rates.setdefault(label, {})[steps] = rate
    told = [
        f"{NAMES[label]} {', '.join(f'{rate} ({steps} steps)' for steps, rate in own.items())}"
        for label, own in rates.items()
        if label in NAMES and len(set(own.values())) > 1
    ]
    return f"Rates that are not the same at all lengths: {'; '.join(told)}." if told else ""


def edges(sources: Sources) -> str:
    """Return which bests stand at the edge of their search for a rate, and of ablations and longer trainings at an end
    of those that they were made with."""
    return f"{_edges_of_searches(sources)}{_edges_of_longer(sources)}"


def _edges_of_searches(sources: Sources) -> str:
    """Return the bests at the edge of their search; and those of ablations that take another's rate, and so have no
    search, but were made with several."""
    told, taken = [], []
    for caption, own in tables_of(sources).items():
        if caption.startswith(SEARCH):
            model = caption.removeprefix(SEARCH).rpartition(" steps")[0].rpartition(", ")[0]
            for row in own.rows:
                made = [(heading, cell) for heading, cell in zip(own.headings[1:], row.cells[1:], strict=True)
                        if cell not in ("–", NOT_RUN)]  # fmt: skip
                name = f"{NAMES.get(row.cells[0], row.cells[0])}: {model}"
                told += [f"{name}, {heading}" for heading, cell in made if cell.endswith("* edge")]
                if len(made) > 1 and any(cell.endswith(" *") for _, cell in (made[0], made[-1])):
                    rates = " and ".join(heading.removeprefix("rate ") for heading, _ in made)
                    lowest = made[0][1].endswith(" *")
                    taken.append(f"{name}, the {'lowest' if lowest else 'highest'} of {rates}")
    ablations = (
        f" Ablations that were not searched for, whose best rate is at an end of those tried: {'; '.join(taken)}."
    )
    return (
        f"At the edge of its search stands a best rate, and a better one may lie beyond: {'; '.join(told)}."
        if told
        else "Rates are searched for at the shortest lengths, and no best one stands at the edge of its search."
    ) + (ablations if taken else "")


def _edges_of_longer(sources: Sources) -> str:
    """Return the longer trainings whose best rate is the lowest or the highest of several, and those that were made
    with one alone that is not the best of the shortest length."""
    bests = {steps: _rates(own) for steps, own in score_tables(sources, LENGTHS).items()}
    shortest, ends, alone = next(iter(bests), ""), [], []
    for steps, label in ((steps, label) for steps, own in bests.items() if steps != shortest for label in own):
        best, made = bests[steps][label], _made_with(sources, label, steps)
        name = f"{NAMES.get(label, label)}, {steps} steps: {best}"
        if len(made) > 1 and best in (made[0], made[-1]):
            ends.append(f"{name}, the {'lowest' if best == made[0] else 'highest'} of {' and '.join(made)}")
        elif made == [best] and best != bests[shortest].get(label):
            alone.append(name)
    told = " Longer trainings whose best rate is at an end of those tried, so that a better one may lie beyond: "
    other = f" Longer ones made with one rate that is not the best of the shortest length: {'; '.join(alone)}."
    return (f"{told}{'; '.join(ends)}." if ends else "") + (other if alone else "")


def _made_with(sources: Sources, label: str, steps: str) -> list[str]:
    """Return the rates that trainings of a method and a length were made with, the lowest first."""
    rows = sources.item(FILE).result.rows
    made = zip(rows["model"], rows["method"], rows["steps"], rows["rate"], strict=True)
    of = tuned.MODEL, label, int(steps.replace(",", ""))
    return [f"{rate:g}" for rate in sorted({float(row[-1] or 0) for row in made if row[:-1] == of})]


def _rates(own: Table) -> dict[str, str]:
    """Return the rates of what was run of a table, by method."""
    at = own.headings.index("rate")
    return {row.cells[0]: row.cells[at] for row in own.rows if row.cells[1] != NOT_RUN}


def other_models(sources: Sources) -> str:
    """Return every other model's score with each method."""
    found = {model: next(iter(score_tables(sources, model).items())) for model in MODELS}
    headings = [f"{model}, {steps} steps, {own.headings[1]}" for model, (steps, own) in found.items()]
    rows = [[shown, *(scores(own).get(label, "–") for _, own in found.values())] for label, shown in NAMES.items()]
    return table(["", *headings], rows)


def standing(sources: Sources) -> str:
    """Return where the best recipe stands against dense."""
    return stored_table(next(own for caption, own in tables_of(sources).items() if caption.startswith(FIRST)))


def ablations(sources: Sources) -> str:
    """Return one table for everything that is changed."""
    parts = []
    for caption, own in tables_of(sources).items():
        if caption.startswith("Ablations: "):
            parts += [f"**{plain(caption.removeprefix('Ablations: '))}**", stored_table(own, 5)]
    return "\n\n".join(parts)


def losses(sources: Sources) -> str:
    """Return the settings in which the library loses to dense."""
    if sources.has_item(adamw.FILE):
        return adamw.losses(sources)
    steps, own = next(iter(score_tables(sources, "GPT on PTB, AdamW").items()))
    found = scores(own)
    return (
        f"- Adam *behind* the residual (`precondition=False`): a small GPT ends at a perplexity of {found[EARLY]} "
        f"instead of dense's {found['dense']} ({steps} steps, less is better)."
    )
