"""ResNet-20 with other rates and schedules, from ``beyond/evidence``, as readers look for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import mean, stdev
from typing import NamedTuple

from sparsync_lab.docs.accuracy import NAMES
from sparsync_lab.docs.sources import Sources, table
from sparsync_lab.papers import tuned
from sparsync_lab.papers.claims.stored_tables import StoredTables
from sparsync_lab.papers.differences import in_words
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
    """Return where TopK-SGD ends with weight decay and density warm-up of its authors' code, which sends more."""
    ends, dense = (with_authors_settings(sources, method) for method in ("topk", "dense"))
    if not ends or not dense:
        return ""
    told = [f"{mean_of(own.scores)} % ({in_words(len(own.scores))})" for own in (ends, dense)]
    return (
        f" With weight decay and density warm-up of its authors' code, which sends {ends.density} of the entries, "
        f"TopK-SGD ends at {told[0]}, and dense with that decay at {told[1]}, both with rate 0.1."
    )


class Authors(NamedTuple):
    """What a method reached with settings of the code of P1's authors, seed by seed, and the share it sent."""

    scores: Collection[float]
    density: str


def with_authors_settings(sources: Sources, method: str) -> Authors | None:
    """Return what ResNet-20 reached so, if that is trained."""
    stored, label = StoredTables({EVIDENCE: sources.item(FILE).result}), f"{method}, authors' settings"
    try:
        asked = stored.asked(AUTHORS_ASKED)
        return Authors(stored.by_seed(AUTHORS_MODEL)[label].values(), asked[AUTHORS_MODEL, label][4])
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
    told, higher = [], 0
    for method, rows in tried.items():
        once, cosine = ([one for one in rows if one.schedule == how and one.decay == "0"]
                        for how in (tuned.FALLS_ONCE, tuned.COSINE))  # fmt: skip
        if once and cosine:
            told.append(f"{len(once)} and {len(cosine)} for {NAMES.get(method, method)}")
            higher += score_of(once[0]) > score_of(cosine[0])
    if not told:
        return "No method was trained with both schedules."
    which = (
        f"each of the {len(told)} methods ends" if higher == len(told) else f"{higher} of the {len(told)} methods end"
    )
    return (
        f"With the rates that were tried, and without weight decay, {which} higher with P1's schedule than with cosine "
        f"(rates with P1's and with cosine: {'; '.join(told)})."
    )


def score_of(one: Tried) -> float:
    """Return the mean of a score, without its deviation."""
    return float(one.score.split()[0])
