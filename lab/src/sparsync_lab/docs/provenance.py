"""Which commit trained what, from the files of the trainings."""

from __future__ import annotations

from collections import Counter

from sparsync_lab.docs.sources import Sources, table
from sparsync_lab.papers.run import SUFFIX, model_title
from sparsync_lab.papers.store import read_json


def commits(sources: Sources) -> str:
    """Return how many trainings of which models were made with each commit, where and when; the latest first."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for path in sorted((sources.folder / "papers" / "runs").glob(f"*{SUFFIX}")):
        plain = read_json(path)
        where = plain["environment"]
        own = where["date"], where["device"], model_title(plain["run"]["model"])
        found.setdefault(where["commit"], []).append(own)
    rows = []
    for commit in sorted(found, key=lambda name: (max(found[name])[0], len(found[name])), reverse=True):
        dates, devices, models = zip(*found[commit], strict=True)
        listed = ", ".join(f"{model} {number}" for model, number in Counter(models).most_common())
        when = min(dates) if min(dates) == max(dates) else f"{min(dates)} to {max(dates)}"
        rows.append([f"`{commit}`", str(len(dates)), listed, ", ".join(sorted(set(devices))), when])
    total = sum(len(own) for own in found.values())
    headings = ["commit", "trainings", "of", "on", "when"]
    return f"{total:,} trainings, {len(found)} commits.\n\n{table(headings, rows)}"
