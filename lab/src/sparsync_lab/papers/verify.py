"""Whether what is stated follows from what is stored: results from their trainings, pages from results."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from sparsync_lab.papers.item import Item, RunContext
from sparsync_lab.papers.store import place, read_json, rounded


def differences(items: Iterable[Item], context: RunContext) -> Iterator[tuple[Item, list[str]]]:
    """Make the result of every item anew from its stored trainings; yields what is stated otherwise in its file.

    An item that measures is made from what it measured, as that is stored. One that can do neither is left out, as is
    one without a result.
    """
    for item in items:
        path = place(context, item)
        if (item.trains or item.redraw) and path.is_file():
            yield item, list(_compare(item, path, context))


def _compare(item: Item, path: Path, context: RunContext) -> Iterator[str]:
    stated = read_json(path)
    result = item.redraw(stated["rows"]) if item.redraw else item.run(context.read_only())
    if list(result.runs) != stated["runs"]:
        odd = sorted(set(result.runs) ^ set(stated["runs"]))
        yield f"it names other trainings: {', '.join(odd[:3])}{' …' if len(odd) > 3 else ''}"
    tables = [json.loads(json.dumps(rounded(dataclasses.asdict(table)))) for table in result.tables]
    if [t["caption"] for t in tables] != [t["caption"] for t in stated["tables"]]:
        yield "it has other tables"
        return
    for table, fresh in zip(stated["tables"], tables, strict=True):
        for old, new in zip(_cells(table), _cells(fresh), strict=False):
            if old != new:
                yield f"{table['caption']}: {' | '.join(old)} is {' | '.join(new)}"
        if len(table["rows"]) != len(fresh["rows"]):
            yield f"{table['caption']}: {len(table['rows'])} rows are {len(fresh['rows'])}"


def _cells(table: dict[str, list[dict[str, list[str]]]]) -> list[list[str]]:
    return [row["cells"] for row in table["rows"]]


def stale_pages(root: Path, results: Path) -> list[Path]:
    """Return the pages of README and docs/ whose blocks are not what the results give."""
    from sparsync_lab.docs.__main__ import pages
    from sparsync_lab.docs.blocks import fill

    found = []
    for path in pages(root):
        text = path.read_text(encoding="utf-8")
        if fill(text, results, path.relative_to(root)) != text:
            found.append(path)
    return found
