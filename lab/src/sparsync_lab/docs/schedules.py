"""ResNet-20 with other rates and schedules, from ``beyond/evidence``, as readers look for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import mean, stdev
from typing import NamedTuple

from sparsync_lab.docs.accuracy import NAMES
from sparsync_lab.docs.sources import Sources, table
from sparsync_lab.papers import tuned
from sparsync_lab.papers.claims.stored_tables import StoredTables, first_number
from sparsync_lab.papers.differences import POINT, SEVERAL, UNDER_A_POINT, Held, in_words
from sparsync_lab.papers.evidence_questions import AUTHORS_ASKED, EVIDENCE
from sparsync_lab.report import Table

FILE = "beyond-evidence"
AUTHORS_MODEL = "ResNet-20"  # as its tables name it


def schedules(sources: Sources) -> str:
    """Return what ResNet-20 reaches with each rate in two schedules."""
    own = schedules_table(sources)
    shown = table(own.headings, [[NAMES[row.cells[0]], *row.cells[1:]] for row in own.rows])
    return f"{_beside_cosine(tried_of(own))}{_authors_topk(sources)}\n\n{shown}"


def _authors_topk(sources: Sources) -> str:
    """Return where TopK-SGD ends with weight decay and density warm-up of its authors' code, which sends more; of the
    seeds that dense has with that decay, too."""
    ends, dense = (with_authors_settings(sources, method) for method in ("topk", "dense"))
    if not ends or not dense or not (both := sorted(ends.scores.keys() & dense.scores.keys())):
        return ""
    told = [f"{mean_of([own.scores[seed] for seed in both])} % ({in_words(len(both))})" for own in (ends, dense)]
    every = f"of all its {in_words(len(dense.scores))} dense has {mean_of(dense.scores.values())} %"
    more = f"; {every}" if len(dense.scores) > len(both) else ""
    return (
        f" With weight decay and density warm-up of its authors' code, which sends {ends.density} of the entries, "
        f"TopK-SGD ends at {told[0]}, and dense with that decay at {told[1]}, both with rate 0.1{more}."
    )


class Authors(NamedTuple):
    """What a method reached with settings of the code of P1's authors, seed by seed, and the share it sent."""

    scores: Mapping[str, float]
    density: str


def with_authors_settings(sources: Sources, method: str) -> Authors | None:
    """Return what ResNet-20 reached so, if that is trained."""
    stored, label = StoredTables({EVIDENCE: sources.item(FILE).result}), f"{method}, authors' settings"
    try:
        asked = stored.asked(AUTHORS_ASKED)
        density = f"{first_number(asked[AUTHORS_MODEL, label][4]):.3g} %"
        return Authors(stored.by_seed(AUTHORS_MODEL)[label], density)
    except LookupError:
        return None


def mean_of(scores: Collection[float]) -> str:
    """Return the mean, and the deviation of several."""
    return f"{mean(scores):.2f}" + (f" ± {stdev(scores):.2f}" if len(scores) > 1 else "")


def schedules_table(sources: Sources) -> Table:
    """Return what ResNet-20 reached with each rate in two schedules, as it is stored."""
    return next(own for own in sources.item(FILE).result.tables if own.caption == tuned.CAPTION)


class Tried(NamedTuple):
    """What a method reached with a rate in a schedule: a row of the table of schedules, without the method."""

    schedule: str
    rate: str
    decay: str
    score: str
    seeds: str
    sent: str


def tried_of(own: Table) -> dict[str, list[Tried]]:
    """Return what each method reached, the best first, by method: ours first."""
    rows = [(row.cells[0], Tried(*row.cells[1:])) for row in own.rows]
    methods = sorted({method for method, _ in rows}, key=tuned.METHODS.index)
    return {method: [tried for other, tried in rows if other == method] for method in methods}


def _beside_cosine(tried: Mapping[str, Sequence[Tried]]) -> str:
    """Return which methods end higher with P1's schedule than with cosine, and how many rates were tried with each."""
    told, ends, held = [], [], list[Held]()
    for method, rows in tried.items():
        once, cosine = ([one for one in without_decay(rows) if one.schedule == how]
                        for how in (tuned.FALLS_ONCE, tuned.COSINE))  # fmt: skip
        if once and cosine:
            told.append(f"{len(once)} and {len(cosine)} for {NAMES.get(method, method)}")
            held.append(_is_higher(shown_of(once), shown_of(cosine)))
            rates = [float(one.rate) for one in cosine]
            if float(shown_of(cosine).rate) in (min(rates), max(rates)):
                ends.append(f"{NAMES.get(method, method)} {shown_of(cosine).rate}")
    if not told:
        return "No method was trained with both schedules."
    methods, higher, unclear = len(held), held.count(True), held.count(None)
    which = f"each of the {methods} methods ends" if higher == methods else f"{higher} of the {methods} methods end"
    undecided = f", and {unclear} differ by {UNDER_A_POINT} with too few seeds to say" if unclear else ""
    return (
        f"With the rates that were tried, and without weight decay, {which} higher with P1's schedule than with cosine"
        f"{undecided} (rates with P1's and with cosine: {'; '.join(told)})."
        + (f" With cosine the best rate is an end of those tried: {'; '.join(ends)}." if ends else "")
    )


def _is_higher(own: Tried, other: Tried) -> Held:
    """Return whether a training ends higher than another; ``None``: too few seeds to say."""
    gap = score_of(own) - score_of(other)
    return None if min(int(own.seeds), int(other.seeds)) < SEVERAL and abs(gap) < POINT else gap > 0


def without_decay(tried: Sequence[Tried]) -> list[Tried]:
    """Return those without weight decay, in their order."""
    return [one for one in tried if one.decay == "0"]


def shown_of(tried: Sequence[Tried]) -> Tried:
    """Return the best of those with enough seeds; if there are none, the best.

    Args:
        tried: the best first.
    """
    return next((one for one in tried if int(one.seeds) >= SEVERAL), tried[0])


def score_of(one: Tried) -> float:
    """Return the mean of a score, without its deviation."""
    return float(one.score.split()[0])
