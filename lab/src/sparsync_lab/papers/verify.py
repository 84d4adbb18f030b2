"""Whether what is stated follows from what is stored: results from their trainings, pages from results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from sparsync_lab.papers.item import Item, RunContext
from sparsync_lab.papers.run import SUFFIX, model_title
from sparsync_lab.papers.store import identity, of_trainings, place, read_json, rounded, stated


def differences(items: Iterable[Item], context: RunContext) -> Iterator[tuple[Item, list[str]]]:
    """Make the result of every item anew, from its stored trainings or by itself; yields what is stated otherwise in
    its file, and which models were trained with different data, so that their scores must not be compared.

    An item that measures is made from what it measured, as that is stored. One without a result is left out.
    """
    for item in items:
        path = place(context, item)
        if path.is_file():
            yield item, list(_compare(item, read_json(path), context))


def _compare(item: Item, old: dict[str, Any], context: RunContext) -> Iterator[str]:
    result = item.redraw(old["rows"]) if item.redraw else item.run(context.read_only())
    new = json.loads(json.dumps(rounded(stated(result))))
    trained = of_trainings(result) if result.runs else {}
    for name, value in rounded(identity(context, item) | trained).items():
        if old[name] != value:
            yield f"{name}: {old[name]} is {value}"
    if new["runs"] != old["runs"]:
        odd = sorted(set(new["runs"]) ^ set(old["runs"])) or ["their order"]
        yield f"it names other trainings: {', '.join(odd[:3])}{' …' if len(odd) > 3 else ''}"
    yield from _mixed_data(context.output / "runs", new["runs"])
    for name in ("missing", "notes"):
        yield from _listed(name, old[name], new[name])
    for name in ("data", "rows"):
        for key in sorted(old[name].keys() | new[name].keys()):
            if old[name].get(key) != new[name].get(key):
                yield f"{name}: {key} differs"
    yield from _listed("tables", [t["caption"] for t in old["tables"]], [t["caption"] for t in new["tables"]])
    for table, fresh in zip(old["tables"], new["tables"], strict=False):
        yield from _table(table, fresh)
    yield from _listed("figures", [f["caption"] for f in old["figures"]], [f["caption"] for f in new["figures"]])
    for figure, fresh in zip(old["figures"], new["figures"], strict=False):
        if figure["chart"] != fresh["chart"]:
            yield f"figure {figure['chart']['title']!r}: other data"


def _mixed_data(folder: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield the models whose trainings are not all of the same data, by its checksum; resized images are others."""
    found: dict[tuple[str, int | None], dict[str, str]] = {}
    for name in names:
        plain = read_json(folder / f"{name}{SUFFIX}")
        data = plain["data"]
        of = plain["run"]["model"], plain["run"].get("resized")
        found.setdefault(of, {})[data["sha256"]] = f"{data['name']} ({data['size']})"
    for (model, _), sets in found.items():
        if len(sets) > 1:
            yield f"{model_title(model)} was trained with different data: {' and '.join(sets.values())}"


def _table(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for name in ("headings", "notes"):
        yield from _listed(f"{old['caption']}, {name}", old[name], new[name])
    rows, fresh = ([[*row["cells"], row["warning"]] for row in table["rows"]] for table in (old, new))
    yield from _listed(old["caption"], [" | ".join(row).rstrip(" |") for row in rows],
                       [" | ".join(row).rstrip(" |") for row in fresh])  # fmt: skip


def _listed(what: str, old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    """Yield what is in one of two lists alone, side by side."""
    gone, come = ([one for one in own if one not in other] for own, other in ((old, new), (new, old)))
    for before, now in zip_longest(gone, come, fillvalue="not there"):
        yield f"{what}: {before} is {now}"
    if old != new and not (gone or come):
        yield f"{what}: in another order, or more than once"


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
