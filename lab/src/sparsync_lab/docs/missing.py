"""The trainings that the papers' items ask for and nobody has made yet."""

from __future__ import annotations

from sparsync_lab.docs.sources import Sources, plain, table
from sparsync_lab.papers import ITEMS
from sparsync_lab.papers.beyond import ORDER
from sparsync_lab.papers.evidence import order
from sparsync_lab.papers.item import RunContext

EVIDENCE = "beyond/evidence"


def trainings(sources: Sources) -> str:
    """Return a table of them, the most valuable of each item first, with the minutes that they take."""
    asked = [row.cells for row in order(RunContext(output=sources.folder / "papers")).rows]
    rows = [[EVIDENCE, what, minutes] for _, what, _, minutes, _, state in asked if state == "missing"]
    for item in ITEMS.values():
        if not sources.has_item(item.file):
            continue
        for own in sources.item(item.file).result.tables:
            stages = [row.cells for row in own.rows] if own.caption == ORDER else []
            rows += [[item.key, f"{what} ({done} done)", left] for _, what, _, done, _, left in stages if float(left)]
    minutes = sum(float(left) for *_, left in rows)
    listed = [[f"`{key}`", plain(what), left] for key, what, left in rows]
    return f"{minutes:.0f} minutes in all.\n\n{table(('item', 'trainings', 'GPU minutes'), listed)}"
