"""Local steps: ``beyond/outer`` in a table for each number of workers."""

from __future__ import annotations

from dataclasses import replace

from sparsync_lab.docs.sources import Sources, plain, stored_table
from sparsync_lab.papers.tables import NOT_RUN
from sparsync_lab.report import Table

FILE, ITEM = "beyond-outer", "beyond/outer"
COLUMNS = 7  # of a table of scores; the rest is how long it took
SCORES = "to dense"  # a heading of such a table


def scores(sources: Sources) -> str:
    """Return the scores at equal bytes."""
    if not sources.has_item(FILE):
        return f"Not run yet: `sparsync papers run {ITEM}`."
    tables = [_trained(own) for own in sources.item(FILE).result.tables if SCORES in own.headings]
    parts = [part for own in tables for part in (f"**{plain(own.caption)}**", stored_table(own, COLUMNS))]
    notes = "\n".join(f"- {plain(note)}" for note in sources.item(FILE).result.notes)
    return "\n\n".join([*parts, notes])


def _trained(table: Table) -> Table:
    """Return a table without what is not trained yet."""
    return replace(table, rows=[row for row in table.rows if NOT_RUN not in row.cells])
