"""Every figure and table of the papers, as it is stored."""

from __future__ import annotations

from sparsync_lab.docs import accuracy
from sparsync_lab.docs.sources import Sources, plain, stored_table, table
from sparsync_lab.papers import ITEMS
from sparsync_lab.papers.claim import Verdict
from sparsync_lab.papers.item import Item
from sparsync_lab.papers.report_page import PARTS, is_full, made_by, needs
from sparsync_lab.papers.store import Stored
from sparsync_lab.papers.verdicts import answer_table, verdict_table, verdicts
from sparsync_lab.report import Table

LONG = 12  # rows; a longer table is folded
ABOVE = (accuracy.FIRST, "Ablations: ")  # captions of tables that the page has already


def papers(sources: Sources) -> str:
    """Return a section for every item."""
    found = _verdicts(sources)
    return "\n\n".join(part for item in ITEMS.values() for part in _section(item, sources, found))


def judged(sources: Sources) -> str:
    """Return the tables of the papers' claims and of our questions."""
    found = _verdicts(sources)
    return "\n\n".join(_linked(own) for own in (verdict_table(found), answer_table(found)))


def _linked(own: Table) -> str:
    """Return a table of verdicts, whose first cells name an item, with links to the items."""
    rows = []
    for row in own.rows:
        key, _, text = row.cells[0].partition(": ")
        claim = f"[`{key}`](results.md#{_anchor(ITEMS[key])}): {plain(text)}"
        *told, word, commands = map(plain, row.cells[1:])
        rows.append([claim, *told, f"**{word}**", ", ".join(f"`{one}`" for one in commands.split("; "))])
    return f"{own.caption}.\n\n{table(own.headings, rows)}"


def _verdicts(sources: Sources) -> list[Verdict]:
    results = {item.key: sources.item(item.file) for item in ITEMS.values() if sources.has_item(item.file)}
    return verdicts({key: stored.result for key, stored in results.items() if is_full(ITEMS[key], stored)})


def _heading(item: Item) -> str:
    return f"{PARTS[item.key.split('/')[0]]}: {plain(item.title)}"


def _anchor(item: Item) -> str:
    """Return the name that a page's reader gives to the heading of an item."""
    kept = "".join(sign for sign in _heading(item).lower() if sign.isalnum() or sign in " -_")
    return kept.strip().replace(" ", "-")


def _section(item: Item, sources: Sources, found: list[Verdict]) -> list[str]:
    own = [_opening(one) for one in found if one.claim.item == item.key]
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


def _opening(one: Verdict) -> str:
    """Return a verdict in a sentence whose first words are bold, and what else is known."""
    word, _, told = one.sentence.partition(":")
    return f"**{word}**:{plain(told)} {plain(one.detail)}".strip()


def _folded(own: Table) -> str:
    body = stored_table(own)
    if len(own.rows) <= LONG:
        return f"**{plain(own.caption)}**\n\n{body}"
    return f'<details markdown="1"><summary>{plain(own.caption)}</summary>\n\n{body}\n\n</details>'


def _notes(stored: Stored) -> str:
    return "\n".join(f"- {plain(note)}" for note in stored.result.notes)
