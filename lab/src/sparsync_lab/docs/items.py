"""Every figure and table of the papers, as it is stored."""

from __future__ import annotations

from sparsync_lab.docs import accuracy
from sparsync_lab.docs.sources import Sources, plain, stored_table
from sparsync_lab.papers import ITEMS
from sparsync_lab.papers.item import Item
from sparsync_lab.papers.report_page import PARTS, made_by, needs
from sparsync_lab.papers.store import Stored
from sparsync_lab.report import Table

LONG = 12  # rows; a longer table is folded
ABOVE = (accuracy.FIRST, "Ablations: ")  # captions of tables that the page has already


def papers(sources: Sources) -> str:
    """Return a section for every item."""
    return "\n\n".join(part for item in ITEMS.values() for part in _section(item, sources))


def _section(item: Item, sources: Sources) -> list[str]:
    parts = [f"### {PARTS[item.key.split('/')[0]]}: {plain(item.title)}", plain(item.shows)]
    if not sources.has_item(item.file):
        return [*parts, f"Not run yet: `sparsync papers run {item.key}`. Needs {plain(needs(item))}."]
    stored = sources.item(item.file)
    if stored.result.figures:
        parts.append(f"![{item.title}]({sources.link}/papers/{item.file}.png)")
    tables = [own for own in stored.result.tables if not own.caption.startswith(ABOVE)]
    parts += [_folded(own) for own in tables]
    if item.published is not None:
        parts.append(_folded(item.published))
    return [*parts, _notes(stored), f"{plain(made_by(stored))} File: {sources.linked(f'papers/{item.file}.json')}."]


def _folded(own: Table) -> str:
    body = stored_table(own)
    if len(own.rows) <= LONG:
        return f"**{plain(own.caption)}**\n\n{body}"
    return f'<details markdown="1"><summary>{plain(own.caption)}</summary>\n\n{body}\n\n</details>'


def _notes(stored: Stored) -> str:
    return "\n".join(f"- {plain(note)}" for note in stored.result.notes)
