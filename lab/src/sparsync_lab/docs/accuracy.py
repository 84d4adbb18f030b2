"""Accuracy at equal bytes: ``beyond/accuracy`` in the tables that readers look for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sparsync_lab.docs import adamw
from sparsync_lab.docs.sources import Sources, plain, stored_table, table
from sparsync_lab.papers import tuned
from sparsync_lab.papers.evidence_questions import AUTHORS_ASKED
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
NAMES_HERE = {EARLY: "ours", "dense": "dense", tuned.TOPK: tuned.TOPK}  # of README
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
    """Return which bests stand at the edge of their search for a rate, and of longer trainings at an end of those that
    they were made with."""
    return f"{_edges_of_searches(sources)}{_edges_of_longer(sources)}"


def _edges_of_searches(sources: Sources) -> str:
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
        return "Rates are searched for at the shortest lengths, and no best one stands at the edge of its search."
    return f"At the edge of its search stands a best rate, and a better one may lie beyond: {'; '.join(told)}."


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


def schedules(sources: Sources) -> str:
    """Return what ResNet-20 reaches with each rate in two schedules."""
    own = _schedules(sources)
    shown = table(own.headings, [[NAMES[row.cells[0]], *row.cells[1:]] for row in own.rows])
    return f"{_beside_cosine(_tried(own))}{_authors_topk(sources)}\n\n{shown}"


def _authors_topk(sources: Sources) -> str:
    """Return where TopK-SGD ends with weight decay and density warm-up of its authors' code, which sends more."""
    asked = next((own for own in sources.item("beyond-evidence").result.tables if own.caption == AUTHORS_ASKED), None)
    rows = {row.cells[0]: row.cells for row in asked.rows if row.cells[1] == "ResNet-20"} if asked else {}
    ends, dense = (rows.get(f"{method}, authors' settings") for method in ("topk", "dense"))
    if not ends or not dense or NOT_RUN in (ends[2], dense[2]):
        return ""
    return (
        f" With weight decay and density warm-up of its authors' code, which sends {ends[4]} of the entries, TopK-SGD "
        f"ends at {ends[2]} %, and dense with that decay at {dense[2]} % (one seed each, rate 0.1)."
    )


def _schedules(sources: Sources) -> Table:
    return next(own for own in sources.item("beyond-evidence").result.tables if own.caption == tuned.CAPTION)


class Tried(NamedTuple):
    """What a method reached with a rate in a schedule: a row of the table of schedules, without the method."""

    schedule: str
    rate: str
    decay: str
    score: str
    seeds: str
    sent: str


def _tried(own: Table) -> dict[str, list[Tried]]:
    """Return what each method reached, the best first, by method: ours first."""
    rows = [(row.cells[0], Tried(*row.cells[1:])) for row in own.rows]
    methods = sorted({method for method, _ in rows}, key=tuned.METHODS.index)
    return {method: [tried for other, tried in rows if other == method] for method in methods}


def _beside_cosine(tried: Mapping[str, Sequence[Tried]]) -> str:
    """Return which methods end higher with P1's schedule than with cosine, and how many rates were tried with each."""
    told, higher = [], 0
    for method, rows in tried.items():
        once, cosine = ([one for one in rows if one.schedule == how and one.decay == "0"]
                        for how in (tuned.FALLS_ONCE, tuned.COSINE))  # fmt: skip
        if once and cosine:
            told.append(f"{len(once)} and {len(cosine)} for {NAMES.get(method, method)}")
            higher += _first(once[0].score) > _first(cosine[0].score)
    if not told:
        return "No method was trained with both schedules."
    which = (
        f"each of the {len(told)} methods ends" if higher == len(told) else f"{higher} of the {len(told)} methods end"
    )
    return (
        f"With the rates that were tried, and without weight decay, {which} higher with P1's schedule than with cosine "
        f"(rates with P1's and with cosine: {'; '.join(told)})."
    )


def _first(score: str) -> float:
    """Return a mean without its deviation."""
    return float(score.split()[0])


def gains(sources: Sources) -> str:
    """Return what the library gains, in two sentences."""
    tried = {method: rows for method, rows in _tried(_schedules(sources)).items() if method in NAMES_HERE}
    found = {method: _best(rows) for method, rows in tried.items()}
    shown = {method: _shown(rows) for method, rows in tried.items()}
    sent = {method: _megabytes(one.sent) for method, one in shown.items()}
    without = "" if any(one.decay != "0" for one in shown.values()) else ", without weight decay"
    select = next(line for line in sources.lines("bench-select-gpu.csv") if _is_floor_case(line))
    return (
        f"At **{sent['dense'] / sent[EARLY]:.0f} times fewer bytes** ResNet-20 on CIFAR-10, with 16 workers, ends at "
        f"**{found[EARLY]}** with `default` and nothing sent dense, where dense training ends at {found['dense']} and "
        f"TopK-SGD, as published and at {_beside(sent[tuned.TOPK], sent[EARLY])} bytes, at {found[tuned.TOPK]}; 120 "
        f"epochs{without}, virtual workers, the best of the rates and schedules with three seeds{_edges(tried)}. "
        f"{adamw.gains(sources)}"
        f"\nSelecting entries out of 100 million on an {select['device']} takes {float(select['p50_ms']):.2f} ms, "
        f"{float(select['ratio_to_floor']):.2f} times the addition that error feedback needs anyway."
    )


def _shown(tried: Sequence[Tried]) -> Tried:
    """Return the best of those with several seeds; if there are none, the best."""
    return next((one for one in tried if one.seeds != "1"), tried[0])


def _best(tried: Sequence[Tried]) -> str:
    """Return the score of the best, and a higher one of a single seed, if there is one."""
    best, shown = tried[0], _shown(tried)
    if shown.seeds == "1":
        return f"{best.score} % (one seed)"
    higher = f" ({best.score} with rate {best.rate}, one seed)" if best.seeds == "1" else ""
    return f"{shown.score} %{higher}"


def _beside(sent: float, other: float) -> str:
    """Return in words how much was sent beside another."""
    alike = "the same" if sent == other else "about the same"
    return alike if abs(sent / other - 1) < 0.01 else f"{sent / other:.2f} times the"


def _edges(own: Mapping[str, Sequence[Tried]]) -> str:
    """Return of which methods the best rate is the lowest or the highest that was tried in its schedule."""
    at = []
    for method, (best, *others) in own.items():
        rates = [float(one.rate) for one in others if (one.schedule, one.decay) == (best.schedule, best.decay)]
        ends = {"below": all(rate > float(best.rate) for rate in rates),
                "above": all(rate < float(best.rate) for rate in rates)}  # fmt: skip
        at += [f"{NAMES_HERE[method]} {beyond} {best.rate}" for beyond, is_edge in ends.items() if is_edge]
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
