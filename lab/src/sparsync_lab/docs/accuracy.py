"""Accuracy at equal bytes: ``beyond/accuracy`` in the tables that readers look for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

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
        for row in own.rows:
            if row.cells[1] != NOT_RUN:
                rates.setdefault(row.cells[0], {})[steps] = row.cells[own.headings.index("rate")]
    told = [
        f"{NAMES[label]} {', '.join(f'{rate} ({steps} steps)' for steps, rate in own.items())}"
        for label, own in rates.items()
        if label in NAMES and len(set(own.values())) > 1
    ]
    return f"Rates that are not the same at all lengths: {'; '.join(told)}." if told else ""


def edges(sources: Sources) -> str:
    """Return which bests stand at the edge of their search for a rate."""
    told = []
    for caption, own in tables_of(sources).items():
        if caption.startswith(SEARCH):
            model = caption.removeprefix(SEARCH).rpartition(" steps")[0].rpartition(", ")[0]
            told += [
                f"{NAMES.get(row.cells[0], row.cells[0])}: {model}, {heading}"
                for row in own.rows
                for heading, cell in zip(own.headings, row.cells, strict=True)
                if cell.endswith("* edge")
            ]
    if not told:
        return "No best rate stands at the edge of its search."
    return f"At the edge of its search stands a best rate, and a better one may lie beyond: {'; '.join(told)}."


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


def schedules(sources: Sources) -> str:
    """Return what ResNet-20 reaches with each rate in two schedules."""
    own = _schedules(sources)
    return table(own.headings, [[NAMES[row.cells[0]], *row.cells[1:]] for row in own.rows])


def _schedules(sources: Sources) -> Table:
    return next(own for own in sources.item("beyond-evidence").result.tables if own.caption == tuned.CAPTION)


def gains(sources: Sources) -> str:
    """Return what the library gains, in two sentences."""
    *_, own = score_tables(sources, LENGTHS).values()
    sent = {row.cells[0]: row.cells[5] for row in own.rows}
    rows = [row.cells for row in _schedules(sources).rows]  # each method's best first
    tried = {method: [cells[1:] for cells in rows if cells[0] == method] for method in (EARLY, "dense", tuned.TOPK)}
    found = {method: _best([cells[1:] for cells in own]) for method, own in tried.items()}
    less = _megabytes(sent["dense"]) / _megabytes(sent[EARLY])
    select = next(line for line in sources.lines("bench-select-gpu.csv") if _is_floor_case(line))
    return (
        f"At **{less:.0f} times fewer bytes** ResNet-20 on CIFAR-10, with 16 workers, ends at **{found[EARLY]}** "
        f"where dense training ends at {found['dense']} and TopK-SGD, as published and at the same bytes, at "
        f"{found[tuned.TOPK]}; 120 epochs, virtual workers, the best of the rates and schedules with three seeds"
        f"{_edges(tried)}. {adamw.gains(sources)}"
        f"\nSelecting entries out of 100 million on an {select['device']} takes {float(select['p50_ms']):.2f} ms, "
        f"{float(select['ratio_to_floor']):.2f} times the addition that error feedback needs anyway."
    )


def _best(tried: Sequence[Sequence[str]]) -> str:
    """Return the best score of several seeds, and a higher one of a single seed, if there is one.

    Args:
        tried: rate, score and number of seeds, the best first.
    """
    several = [cells for cells in tried if cells[2] != "1"]
    (rate, score, _), *_ = tried
    if not several:
        return f"{score} % (one seed)"
    higher = f" ({score} with rate {rate}, one seed)" if tried[0] != several[0] else ""
    return f"{several[0][1]} %{higher}"


def _edges(own: Mapping[str, Sequence[Sequence[str]]]) -> str:
    """Return of which methods the best rate is the lowest or the highest that was tried in its schedule.

    Args:
        own: schedule, rate, score and number of seeds, the best first, by method.
    """
    names, at = {EARLY: "ours", "dense": "dense", tuned.TOPK: tuned.TOPK}, []
    for method, ((schedule, best, *_), *others) in own.items():
        rates = [float(rate) for other, rate, *_ in others if other == schedule]
        ends = {"below": all(rate > float(best) for rate in rates), "above": all(rate < float(best) for rate in rates)}
        at += [f"{names[method]} {beyond} {best}" for beyond, is_edge in ends.items() if is_edge]
    return f" (not tried in its schedule: {', '.join(at)})" if at else ""


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


def _megabytes(cell: str) -> float:
    return float(cell.removesuffix(" MB").replace(",", ""))


def _is_floor_case(line: Mapping[str, str]) -> bool:
    wanted = {"method": "threshold", "size": "100000000", "density": "0.001", "dtype": "fp32"}
    return all(line[key] == value for key, value in wanted.items())
