"""Beyond the papers: local steps (the outer loop) against per-step exchange, within a budget of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from sparsync_lab.papers import beyond
from sparsync_lab.papers.adamw_sweep import GPT, LOCO, MAIN, ROWS, SETTINGS
from sparsync_lab.papers.adamw_tables import fraction, score_table, share_of, where
from sparsync_lab.papers.beyond import Sweep, order_of
from sparsync_lab.papers.claims.stored_tables import raise_missing
from sparsync_lab.papers.curves import by_epoch, display_score, first_seed, spread_caption, with_their_seeds
from sparsync_lab.papers.item import Item, Result, RunContext
from sparsync_lab.papers.lr_search import LearningRateSearch
from sparsync_lab.papers.sweep import Method, Stage
from sparsync_lab.papers.tables import NOT_RUN, columns, over_bytes, rate_search_table
from sparsync_lab.papers.trainings import OUTER as OUTER_LOOP
from sparsync_lab.report import Figure, Table

# Published: an outer SGD of rate 0.7 with Nesterov momentum of 0.9. With all entries, H follows from the bytes.
AS_DILOCO = {"compressor": "none", "outer_lr": 0.7, "outer_momentum": 0.9}
DILOCO = {values: f"DiLoCo, {values}, every {steps} steps" for values, steps in (("fp32", 40), ("bf16", 20))}
OUTER = {steps: f"OuterLoop, every {steps} steps, 1/40" for steps in (2, 4, 8, 15)}
OWN = "OuterLoop, every 8 steps, own moments, 1/40"
STREAMED = "OuterLoop, every 8 steps in 4 fragments, applied 2 later, 1/40"


LOW = 400  # a budget below what sketches of every step take
LOW_OUTER, LOW_LOCO = (f"{name}, every 30 steps, 1/{LOW}" for name in ("OuterLoop", "SparseLoCo"))


def _at(every: int, **options: Any) -> dict[str, Any]:
    return {"budget": 1 / 40, **options, "every": every}


def _shared(every: int, **options: Any) -> dict[str, Any]:
    return _at(every, share_moments=True, **options)


OUTER_ROWS: Mapping[str, Method] = {
    **{label: ROWS[label] for label in ("dense", MAIN, *LOCO.values())},
    **{
        m.label: m
        for m in (
            Method(DILOCO["fp32"], OUTER_LOOP, {**AS_DILOCO, "every": 40}),
            Method(DILOCO["bf16"], OUTER_LOOP, {**AS_DILOCO, "every": 20, "options": {"values": "bf16"}}),
            *(Method(label, OUTER_LOOP, _shared(every)) for every, label in OUTER.items()),
            Method(OWN, OUTER_LOOP, _at(8)),
            Method(STREAMED, OUTER_LOOP, _shared(8, fragments=4, overlap=2), like=OUTER[8]),
            Method(LOW_OUTER, OUTER_LOOP, _shared(30, budget=1 / LOW)),
            Method(LOW_LOCO, "sparse-loco", {"budget": 1 / LOW, "local_steps": 30}),
        )
    },
}
OUTER_SETTINGS = {name: SETTINGS[name] for name in ("gpt", "gpt-w4-own")}
FIRST, OTHERS = (0,), (1, 2)
STORED = ("dense", MAIN, *LOCO.values())  # trained for beyond/adamw
OUTER_STAGES = (
    Stage("gpt", 0, FIRST, STORED),
    Stage("gpt", 0, FIRST, (OUTER[8], DILOCO["fp32"])),
    Stage("gpt", 0, FIRST, (OUTER[4], OWN)),
    Stage("gpt-w4-own", 0, FIRST, ("dense", MAIN, OUTER[8], DILOCO["fp32"], LOCO[15])),
    Stage("gpt", 0, OTHERS, (*STORED, OUTER[8], DILOCO["fp32"])),
    Stage("gpt", 0, FIRST, (STREAMED,)),
    Stage("gpt", 0, FIRST, (LOW_OUTER, LOW_LOCO)),
    Stage("gpt", 0, FIRST, (OUTER[2],)),
    Stage("gpt", 0, FIRST, (OUTER[15], DILOCO["bf16"])),
    Stage("gpt-w4-own", 0, OTHERS, ("dense", MAIN, OUTER[8])),
)
_TINY: dict[str, Any] = {"workers": 2, "batch": 2, "lengths": (24,), "limit": 32, "factors": (1.0,), "further": ()}
QUICK = {
    "settings": {"gpt": replace(GPT, **_TINY)},
    "stages": (Stage("gpt", 0, FIRST, ("dense", OUTER[8], OWN, DILOCO["bf16"], LOCO[15], STREAMED)),),
}
RATES = (
    "Rates are searched for alike: 0.5 to 2 times the same rate (4 workers: 1 to 2 times), further at the edge, with "
    "the first seed."
)
# What is to be known of rows, if any of them is trained.
ABOUT: tuple[tuple[frozenset[str], str], ...] = (
    (
        frozenset(DILOCO.values()),
        "DiLoCo sends every entry in a round; its outer optimizer is the published one, of rate 0.7 with Nesterov "
        "momentum 0.9.",
    ),
    (frozenset(LOCO.values()), "SparseLoCo is as published, written from its paper."),
    (frozenset({LOCO[30]}), "SparseLoCo every 30 steps sends every entry, in two bits, which is less than it may."),
    (
        frozenset({*OUTER.values(), OWN, STREAMED, LOW_OUTER}),
        "OuterLoop sends the largest entries of the whole model with feedback, as many and as exact as a round has "
        "bytes for, summed in parts; an outer rate of 1 without momentum. Adam's second moments are shared in every "
        "round, as means of rows and columns, whose bytes are within the budget.",
    ),
    (frozenset({OWN}), "Own moments: each worker keeps its own, as DiLoCo's and SparseLoCo's do."),
    (frozenset({STREAMED}), "Fragments take the rate of what they change."),
    (
        frozenset({LOW_OUTER, LOW_LOCO}),
        f"A {LOW}th is less than preconditioned feedback can send here: its sketches alone take a 210th.",
    ),
)


def notes_of(search: LearningRateSearch) -> list[str]:
    """Return what is to be known of the rows that are trained, and of no others."""
    trained = {name: [m for m in search.methods(name) if search.repeats(name, m, 0)] for name in search.settings}
    rows = {label for labels in trained.values() for label in labels}
    sent = [bytes_note(search, name, labels) for name, labels in trained.items() if labels]
    return [*sent, " ".join(text for labels, text in ABOUT if labels & rows), RATES, *begun_notes(search)]


def bytes_note(search: LearningRateSearch, name: str, labels: Sequence[str]) -> str:
    """Return how much rows have sent, which is not the same for all."""
    dense = search.repeats(name, "dense", 0)
    shares = {label: share_of(search.repeats(name, label, 0), dense) for label in labels if label != "dense"}
    sent = sorted({share for share in shares.values() if share is not None}, reverse=True)
    about = where(search.settings[name], 0)
    if not sent:
        return f"{about}: nothing but dense is trained."
    if fraction(sent[0]) == fraction(sent[-1]):
        return f"{about}: rows but dense have sent {fraction(sent[0])} of dense's bytes."
    return (
        f"{about}: rows but dense have sent from {fraction(sent[-1])} to {fraction(sent[0])} of dense's bytes, as the "
        "column says: what a row's name has is what it may send, and one that sent less is not held against another "
        "at equal bytes."
    )


def begun_notes(search: LearningRateSearch) -> list[str]:
    """Return the rows of which some rates alone are trained, so that they are in no table of scores."""
    found = []
    for name, setting in search.settings.items():
        begun = {
            label: search.tried(name, label)
            for label in search.methods(name)
            if not search.method(label).like and not search.repeats(name, label, 0)
        }
        dense = search.repeats(name, "dense", 0)
        listed = [
            f"{label} {display_score(history.last, history.score):.2f} (rate {history.run.rate:g}, "
            f"{fraction(share_of([history], dense))} of dense's bytes)"
            for label, tried in begun.items()
            for _, history in sorted(tried.items())
            if history is not None
        ]
        if listed:
            found.append(f"{where(setting, 0)}, searches that are not done: {'; '.join(listed)}.")
    return found


class Begun(NamedTuple):
    """A training, of one seed, of a search that is not done."""

    label: str
    score: float
    rate: float
    share: float  # of dense's bytes


def begun_of(result: Result, name: str) -> tuple[dict[str, dict[str, str]], list[Begun]]:
    """Return a setting's rows that have a score, with their cells by heading; and what is trained of the others."""
    caption = where(OUTER_SETTINGS[name], 0)
    table = next((own for own in result.tables if own.caption == caption), None)
    if table is None:
        raise_missing(caption)
    headings = ["training", "score", *table.headings[2:]]
    rows = [dict(zip(headings, row.cells, strict=True)) for row in table.rows]
    done = {cells["training"]: cells for cells in rows if cells["score"] != NOT_RUN}
    columns = (result.rows[each] for each in ("model", "method", "score", "rate", "bytes"))
    trained = [own[1:] for own in zip(*columns, strict=True) if own[0] == name]
    sent_by = {str(label): float(sent or 0) for label, _, _, sent in trained}
    dense = sent_by.get("dense") or raise_missing("dense")
    begun = [
        Begun(str(label), float(score), float(rate or 0), float(sent or 0) / dense)
        for label, score, rate, sent in trained
        if label not in done and score is not None
    ]
    return done, begun


def sweep_of(context: RunContext) -> Sweep:
    """Return the trainings: the full ones, or tiny ones."""
    compared: dict[str, Any] = {"settings": OUTER_SETTINGS, "stages": OUTER_STAGES, **(QUICK if context.quick else {})}
    return Sweep(context, rows=OUTER_ROWS, ablations={}, equal_bytes=False, **compared)


def outer(context: RunContext) -> Result:
    """Compare scores within a budget of bytes, from all that is trained so far."""
    sweep = sweep_of(context)
    sweep.train_missing()
    search, result, tables = sweep.search, sweep.result(), list[Table]()
    for name, setting in search.settings.items():
        tables += [
            score_table(search, name, 0, search.methods(name), where(setting, 0)),
            rate_search_table(search, name, search.methods(name)),
        ]
    tables.append(order_of(sweep))
    notes = [*notes_of(search), *result.notes]
    return replace(result, tables=tables, figures=figures(search), rows=columns(search), notes=notes)


def figures(search: LearningRateSearch) -> list[Figure]:
    """Draw perplexities over the bytes that a worker has sent, in a chart for each setting."""
    made = []
    for name, setting in search.settings.items():
        seeds = with_their_seeds({label: search.repeats(name, label, 0) for label in search.methods(name)})
        first = first_seed(seeds)
        if len(first) > 1:
            caption = f"{where(setting, 0)}, with its chosen rate each: {spread_caption(seeds)}."
            chart = over_bytes(f"Perplexity, {setting.workers} workers", by_epoch("", seeds, ""), first)
            made.append(Figure(chart, caption))
    return made


ITEMS = (
    Item(
        "beyond/outer",
        "local steps and per-step exchange within a budget of bytes",
        "OuterLoop against DiLoCo, SparseLoCo and preconditioned feedback in every step, tuned alike, with at most the "
        "same bytes in all.",
        outer,
        ("PTB", "a GPU"),
        10,
        order=partial(beyond.order, sweep_of=sweep_of),
        trains=True,
    ),
)
