"""P2's table 1 as claims read it: the accuracies that are printed, and those that were trained here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import isfinite

from sparsync_lab.papers.claims.claim import Judgement, partly_as, sentences, undecided_as
from sparsync_lab.papers.claims.stored_tables import StoredTables, raise_missing
from sparsync_lab.papers.differences import DIVERGED
from sparsync_lab.papers.p2 import LEARNED, LONG, SCOPES
from sparsync_lab.papers.published import P2_ACCURACY, P2_WORKERS

MODEL = "ResNet-18"  # as beyond/evidence names it
TITLES = {scheme: own[0] for scheme, own in P2_ACCURACY.items()}
SPARSE = tuple(scheme for scheme in TITLES if scheme != "standard")
LIKEWISE = f"P2, table 1, {LONG} epochs without momentum:"
FAR = 10.0  # points: so far below what P2 prints, what is compared is not what it trained
BELOW_P2 = "far below P2"
Cells = Mapping[tuple[str, str, int], float]  # accuracy in %, by scheme, scope and workers
Setting = tuple[str, int]  # scope and workers


def _places() -> Iterator[tuple[str, str, int]]:
    """Yield scheme, scope and workers of the table's cells. With one worker the two ways to exchange are the same, and
    there once."""
    for scheme in TITLES:
        for scope in SCOPES:
            for workers in P2_WORKERS[1:] if scheme.endswith("shared") else P2_WORKERS:
                yield scheme, scope, workers


def printed_cells() -> Cells:
    """Return what P2 prints."""
    by_scope = {scheme: dict(zip(SCOPES, own, strict=True)) for scheme, (_, *own) in P2_ACCURACY.items()}
    return {(how, scope, w): by_scope[how][scope][P2_WORKERS.index(w)] for how, scope, w in _places()}


PRINTED = printed_cells()


def ours(stored: StoredTables, item: str, caption: str) -> Cells:
    """Return what was trained of a table in P2's form. A cell is "ours (published)", and "– (published)" if it was not
    trained."""
    table = stored.table(item, caption)
    rows = {row.cells[0]: row.cells for row in table.rows}
    found = {}
    for scheme, scope, workers in _places():
        cell = rows[TITLES[scheme]][table.headings.index(f"{scope}, W = {workers}")].split(" (")[0]
        if cell != "–":
            found[scheme, scope, workers] = float(cell)
    return found or raise_missing(caption)


def both_scopes(cells: Cells) -> dict[tuple[str, int], tuple[float, float]]:
    """Return accuracies layer by layer and globally, by scheme and workers, of what was trained both ways."""
    return {
        (scheme, workers): (cells[scheme, "layer", workers], cells[scheme, "global", workers])
        for scheme in SPARSE
        for workers in P2_WORKERS
        if {(scheme, "layer", workers), (scheme, "global", workers)} <= cells.keys()
    }


def settings(cells: Cells, *schemes: str) -> dict[Setting, list[float]]:
    """Return the accuracies of these schemes by the settings in which all of them were trained."""
    return {
        (scope, workers): [cells[scheme, scope, workers] for scheme in schemes]
        for scope in SCOPES
        for workers in P2_WORKERS
        if all((scheme, scope, workers) in cells for scheme in schemes)
    }


def compared(stored: StoredTables, *schemes: str, least: int = 1) -> tuple[Cells, dict[Setting, list[float]]]:
    """Return all cells of the trainings that learn, and ``settings`` with at least so many workers."""
    cells = ours(stored, "beyond/evidence", LEARNED)
    own = {(scope, w): scores for (scope, w), scores in settings(cells, *schemes).items() if w >= least}
    return cells, own or raise_missing(LEARNED)


def cells_at(cells: Cells, own: Iterable[Setting], *schemes: str) -> Cells:
    """Return the accuracies of these schemes in these settings."""
    return {(scheme, *at): cells[scheme, *at] for at in own for scheme in schemes}


def named(key: tuple[str, int], pair: tuple[float, float]) -> str:
    """Return a scheme with its accuracies layer by layer and globally."""
    return f"{TITLES[key[0]]} {listed([*pair])} % (W = {key[1]})"


def listed(scores: list[float]) -> str:
    """Return accuracies with two digits, as many as P2 prints."""
    *first, last = (f"{score:.2f}" if isfinite(score) else DIVERGED for score in scores)
    return f"{', '.join(first)} and {last}"


def at_most_workers(own: Mapping[Setting, list[float]]) -> tuple[str, str]:
    """Return the accuracies with the most workers of each scope, and all others."""
    most = {scope: max(w for at, w in own if at == scope) for scope in dict.fromkeys(scope for scope, _ in own)}

    def told(wanted: bool) -> str:
        return ", ".join(
            f"{listed(scores)} % ({scope}, W = {w})"
            for (scope, w), scores in own.items()
            if (most[scope] == w) is wanted
        )

    return told(True), told(False)


def as_far_as_p2(found: Judgement, cells: Cells) -> Judgement:
    """Return the judgement with where trainings end far below what P2 prints: such a claim is reproduced in part, and
    where it fails, that may be as they are so far from their end.

    Args:
        found: the judgement.
        cells: what is compared, and nothing else.
    """
    below = {at: [PRINTED[place] - score for place, score in cells.items() if place[1] == at] for at in SCOPES}
    far = {scope: max(gaps) for scope, gaps in below.items() if gaps and max(gaps) >= FAR}
    if not far:
        return found
    told = ", ".join(f"{scope} up to {gap:.0f}" for scope, gap in far.items())
    ends = sentences(f"what is compared ends far below P2, which has 300 epochs: {told} points")
    told_so = found._replace(detail=f"{found.detail} {ends}".lstrip())
    return partly_as(BELOW_P2, undecided_as(BELOW_P2, told_so))
