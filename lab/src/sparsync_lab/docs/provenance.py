"""Which commit trained and measured what, from the files of trainings and results."""

from __future__ import annotations

from collections import Counter

from sparsync_lab.docs.sources import Sources, plain, table
from sparsync_lab.papers.run import SUFFIX, model_title
from sparsync_lab.papers.store import read_json


def commits(sources: Sources) -> str:
    """Return how many trainings of which models were made with each commit, where and when; the latest first."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for path in sorted((sources.folder / "papers" / "runs").glob(f"*{SUFFIX}")):
        training = read_json(path)
        where = training["environment"]
        own = where["date"], where["device"], model_title(training["run"]["model"])
        found.setdefault(where["commit"], []).append(own)
    rows = []
    for commit in sorted(found, key=lambda name: (max(found[name])[0], len(found[name])), reverse=True):
        dates, devices, models = zip(*found[commit], strict=True)
        listed = ", ".join(f"{model} {number}" for model, number in Counter(models).most_common())
        rows.append([f"`{commit}`", str(len(dates)), listed, ", ".join(sorted(set(devices))), days(", ".join(dates))])
    total = sum(len(own) for own in found.values())
    headings = ["commit", "trainings", "of", "on", "when"]
    return f"{total:,} trainings, {len(found)} commits.\n\n{table(headings, rows)}"


def measured(sources: Sources) -> str:
    """Return with which commits, where and when each item was trained, or measured where it trains nothing."""
    rows = []
    for key, stored in sources.items().items():
        made = f"trained {len(stored.result.runs)}" if stored.result.runs else "measured or computed"
        where = stored.where
        cells = [", ".join(f"`{one}`" for one in where["commit"].split(", ")), plain(where["device"]), where["torch"]]
        rows.append([f"`{key}`", made, *cells, days(where["date"])])
    return table(["item", "how", "commits", "on", "torch", "when"], rows)


def data(sources: Sources) -> str:
    """Return the checksum of every data set, with the items that were trained on it."""
    found: dict[tuple[str, str], list[str]] = {}
    for key, stored in sources.items().items():
        for name, checksum in stored.result.data.items():
            found.setdefault((name, checksum), []).append(f"`{key}`")
    rows = [[plain(name), f"`{checksum}`", ", ".join(items)] for (name, checksum), items in found.items()]
    return table(["data", "SHA-256", "items"], rows)


def days(dates: str) -> str:
    """Return the first and the last of dates that are joined by commas, or the only one."""
    first, *_, last = sorted(2 * dates.split(", "))
    return first if first == last else f"{first} to {last}"
