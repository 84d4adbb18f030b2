"""Local steps: ``beyond/outer`` in a table for each number of workers."""

from __future__ import annotations

from sparsync_lab.docs.sources import Sources, plain, stored_table

FILE, ITEM = "beyond-outer", "beyond/outer"
COLUMNS = 7  # of a table of scores; the rest is how long it took
SCORES = "training"  # the first heading of such a table


def scores(sources: Sources) -> str:
    """Return the scores at equal bytes."""
    if not sources.has_item(FILE):
        return f"Not run yet: `sparsync papers run {ITEM}`."
    tables = [own for own in sources.item(FILE).result.tables if own.headings[0] == SCORES]
    parts = [part for own in tables for part in (f"**{plain(own.caption)}**", stored_table(own, COLUMNS))]
    notes = "\n".join(f"- {plain(note)}" for note in sources.item(FILE).result.notes)
    return "\n\n".join([*parts, notes])
