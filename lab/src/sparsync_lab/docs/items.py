"""Every figure and table of the papers, as it is stored."""

from __future__ import annotations

from sparsync_lab.docs import accuracy
from sparsync_lab.docs.sources import Sources, plain, stored_table, table
from sparsync_lab.papers import ITEMS
from sparsync_lab.papers.claim import Verdict
from sparsync_lab.papers.item import Item
from sparsync_lab.papers.report_page import PARTS, made_by, needs
from sparsync_lab.papers.store import Stored
from sparsync_lab.papers.verdicts import HEADINGS, verdict_table, verdicts
from sparsync_lab.report import Table

LONG = 12  # rows; a longer table is folded
ABOVE = (accuracy.FIRST, "Ablations: ")  # captions of tables that the page has already


def papers(sources: Sources) -> str:
    """Return a section for every item."""
    found = _verdicts(sources)
    return "\n\n".join(part for item in ITEMS.values() for part in _section(item, sources, found))


def judged(sources: Sources) -> str:
    """Return the table of all verdicts."""
    found = _verdicts(sources)
    rows = [
        [f"[`{one.item}`](results.md#{_anchor(ITEMS[one.item])}): {plain(one.claim)}", plain(one.published),
         plain(one.here), f"**{one.word}**", f"`sparsync papers run {one.item}`"]
        for one in found
    ]  # fmt: skip
    return f"{verdict_table(found).caption.removeprefix('Verdicts: ').capitalize()}.\n\n{table(HEADINGS, rows)}"


def _verdicts(sources: Sources) -> list[Verdict]:
    results = {item.key: sources.item(item.file) for item in ITEMS.values() if sources.has_item(item.file)}
    return verdicts({key: stored.result for key, stored in results.items() if not stored.quick})


def _heading(item: Item) -> str:
    return f"{PARTS[item.key.split('/')[0]]}: {plain(item.title)}"


def _anchor(item: Item) -> str:
    """Return the name that a page's reader gives to the heading of an item."""
    kept = "".join(sign for sign in _heading(item).lower() if sign.isalnum() or sign in " -_")
    return kept.strip().replace(" ", "-")


def _section(item: Item, sources: Sources, found: list[Verdict]) -> list[str]:
    own = [f"**{one.word.capitalize()}**{plain(one.sentence.removeprefix(one.word.capitalize()))}"
           for one in found if one.item == item.key]  # fmt: skip
    parts = [f"### {_heading(item)}", *own, plain(item.shows)]
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
