"""Every figure and table of the papers, as it is stored."""

from __future__ import annotations

from collections.abc import Sequence

from sparsync_lab.docs import accuracy
from sparsync_lab.docs.provenance import days
from sparsync_lab.docs.sources import Sources, plain, stored_table, table
from sparsync_lab.papers import ITEMS
from sparsync_lab.papers.claims import questions_p3
from sparsync_lab.papers.claims.claim import Verdict
from sparsync_lab.papers.claims.verdicts import answer_table, verdict_table, verdicts
from sparsync_lab.papers.evidence_questions import EVIDENCE
from sparsync_lab.papers.item import Item
from sparsync_lab.papers.report_page import PARTS, is_full, needs
from sparsync_lab.papers.store import Stored
from sparsync_lab.report import Figure, Table

LONG = 12  # rows; a longer table is folded
MANY = 2  # charts; more with the same caption are not named, but "all others"
ABOVE = (accuracy.FIRST, "Ablations: ")  # captions of tables that the page has already


def papers(sources: Sources) -> str:
    """Return a section for every item, below a list of them."""
    found = _verdicts(sources)
    listed = "\n".join(_entry(item, found) for item in ITEMS.values())
    return "\n\n".join([listed, *(part for item in ITEMS.values() for part in _section(item, sources, found))])


def judged(sources: Sources) -> str:
    """Return the tables of the papers' claims and of our questions."""
    found = _verdicts(sources)
    return "\n\n".join(_linked(own) for own in (verdict_table(found), answer_table(found)))


def of_gtopk(sources: Sources) -> str:
    """Return what became of our questions on gTop-k at 0.1 %."""
    asked = [one for one in _verdicts(sources) if one.claim in questions_p3.QUESTIONS and one.claim.item == EVIDENCE]
    return "\n\n".join(map(_opening, asked))


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
    results = sources.items().items()
    return verdicts({key: stored.result for key, stored in results if is_full(ITEMS[key], stored)})


def _heading(item: Item) -> str:
    return f"{PARTS[item.key.split('/')[0]]}: {plain(item.title)}"


def _anchor(item: Item) -> str:
    """Return the name that a page's reader gives to the heading of an item."""
    kept = "".join(sign for sign in _heading(item).lower() if sign.isalnum() or sign in " -_")
    return kept.strip().replace(" ", "-")


def _entry(item: Item, found: list[Verdict]) -> str:
    """Return a line of contents: a link to an item, and its verdicts."""
    words = dict.fromkeys(_word(one).lower() for one in found if one.claim.item == item.key)
    return f"- [{_heading(item)}](#{_anchor(item)})" + (f": {', '.join(words)}" if words else "")


def _section(item: Item, sources: Sources, found: list[Verdict]) -> list[str]:
    own = [_opening(one) for one in found if one.claim.item == item.key]
    parts = [f"### {_heading(item)}", *own, plain(item.shows)]
    if not sources.has_item(item.file):
        return [*parts, f"Not run yet: `sparsync papers run {item.key}`. Needs {plain(needs(item))}."]
    stored = sources.item(item.file)
    if stored.result.figures:
        parts += [f"![{item.title}]({sources.link}/papers/{item.file}.png)", _captions(stored.result.figures)]
    tables = [own for own in stored.result.tables if not own.caption.startswith(ABOVE)]
    parts += [_folded(own) for own in tables]
    if item.published is not None:
        parts.append(_folded(item.published))
    return [*parts, _notes(stored), _made(stored, sources.linked(f"papers/{item.file}.json"))]


def _captions(figures: Sequence[Figure]) -> str:
    """Return what is told of the charts of a picture, once where it is the same of several; and of which, where it is
    not that of all and does not begin with what the chart's title begins with."""
    charts: dict[str, list[str]] = {}
    for figure in figures:
        title = figure.chart.title
        charts.setdefault(figure.caption.removeprefix(f"{title}: "), []).append(title)
    most = max(charts, key=lambda caption: len(charts[caption]))
    if len(charts) > 1 and len(charts[most]) > MANY:
        del charts[most]
        charts[most] = ["All others"]
    told = [
        caption
        if len(charts) == 1 or _first_word(caption) == _first_word(titles[0])
        else f"{'; '.join(titles)}: {caption}"
        for caption, titles in charts.items()
    ]
    return plain(" ".join(told))


def _first_word(text: str) -> str:
    return text.split()[0].strip(",:;")


def _made(stored: Stored, file: str) -> str:
    """Return which command made a result, on what and when; its commits are on a page of their own."""
    where = f"{plain(stored.where['device'])}, {days(stored.where['date'])}"
    return f"Command: `{stored.command}`. {where}. File: {file}. [Commits and data](papers-provenance.md)."


def _opening(one: Verdict) -> str:
    """Return a verdict in a sentence whose first words are bold, and what else is known."""
    word = _word(one)
    return f"**{word}**{plain(one.sentence.removeprefix(word))} {plain(one.detail)}".strip()


def _word(one: Verdict) -> str:
    return one.sentence.partition(":")[0]


def _folded(own: Table) -> str:
    body = stored_table(own)
    if len(own.rows) <= LONG:
        return f"**{plain(own.caption)}**\n\n{body}"
    return f'<details markdown="1"><summary>{plain(own.caption)}</summary>\n\n{body}\n\n</details>'


def _notes(stored: Stored) -> str:
    return "\n".join(f"- {plain(note)}" for note in stored.result.notes)
