"""Local steps: ``beyond/outer`` in a table for each number of workers."""

from __future__ import annotations

from dataclasses import replace

from sparsync_lab.docs.sources import Sources, plain, stored_table, table
from sparsync_lab.papers.adamw_tables import fraction, where
from sparsync_lab.papers.outer import OUTER_SETTINGS, Begun, begun_of
from sparsync_lab.papers.tables import NOT_RUN
from sparsync_lab.report import Table

FILE, ITEM = "beyond-outer", "beyond/outer"
COLUMNS = 7  # of a table of scores; the rest is how long it took
SCORES = "to dense"  # a heading of such a table
WAYS = {  # how rows of each kind begin, and what to type for it
    "dense": "DDP alone: every entry in every step",
    "preconditioned": "`sparsync.attach(ddp, optimizer=optimizer, budget=1/40)`: an exchange in every step",
    "OuterLoop": "`sparsync.OuterLoop(model, optimizer=optimizer, every=H, budget=1/40)`",
    "SparseLoCo": "– (the lab alone has it)",
    "DiLoCo": '`sparsync.OuterLoop(model, "none", every=H, outer_lr=0.7, outer_momentum=0.9)`, bf16: `values="bf16"`',
}


def best_of_each(sources: Sources) -> str:
    """Return, for each number of workers, the best finished row of each kind, the best single training if it ended
    below that though its search is not finished, and what is to be known of those rows."""
    if not sources.has_item(FILE):
        return f"Not run yet: `sparsync papers run {ITEM}`."
    result, parts = sources.item(FILE).result, []
    captions = {where(setting, 0): name for name, setting in OUTER_SETTINGS.items()}
    for stored in (_trained(own) for own in result.tables if SCORES in own.headings):
        begun = begun_of(result, captions[stored.caption])[1]
        rows = []
        for begins, way in WAYS.items():
            found = [row.cells for row in stored.rows if row.cells[0].startswith(begins)]
            best = min(found, key=lambda cells: _number(cells[1]), default=None)
            if best is not None:
                rows.append([plain(best[0]), *best[1:4], way])
            singles = [one for one in begun if one.label.startswith(begins)]
            low = min(singles, key=lambda one: one.score, default=None)
            if low is not None and (best is None or low.score < _number(best[1])):
                rows.append(_single(low, way))
        headings = [*stored.headings[:4], "to type"]
        parts += [
            f"**{plain(stored.caption)}**: the best finished row of each kind, and what ended below it",
            table(headings, rows),
        ]
        parts.append("\n".join(f"- {plain(note)}" for note in result.notes if note.startswith(stored.caption)))
    return "\n\n".join(parts)


def _single(one: Begun, way: str) -> list[str]:
    """Return a training of a search that is not finished as a row."""
    told = f"{one.score:.2f} (one seed, rate {one.rate:g}, search not finished)"
    return [plain(one.label), told, "–", fraction(one.share), way]


def _number(score: str) -> float:
    return float(score.split()[0])


def scores(sources: Sources) -> str:
    """Return the scores within a budget of bytes."""
    if not sources.has_item(FILE):
        return f"Not run yet: `sparsync papers run {ITEM}`."
    tables = [_trained(own) for own in sources.item(FILE).result.tables if SCORES in own.headings]
    parts = [part for own in tables for part in (f"**{plain(own.caption)}**", stored_table(own, COLUMNS))]
    notes = "\n".join(f"- {plain(note)}" for note in sources.item(FILE).result.notes)
    return "\n\n".join([*parts, notes])


def _trained(table: Table) -> Table:
    """Return a table without what is not trained yet."""
    return replace(table, rows=[row for row in table.rows if NOT_RUN not in row.cells])
