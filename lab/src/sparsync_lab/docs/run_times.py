"""How long the trainings of the papers' items took."""

from __future__ import annotations

from sparsync_lab.docs.sources import Sources, plain, table


def of_items(sources: Sources) -> str:
    """Return how many trainings each item has, how many of them other items have too, and how long they took."""
    results = sources.items()
    rows = []
    for key, stored in results.items():
        others = {run for other, one in results.items() if other != key for run in one.result.runs}
        own = stored.result.runs
        counted = [str(len(own)), str(len(others.intersection(own)))] if own else ["none", "–"]
        each = _time(stored.seconds / len(own)) if own else "–"
        rows.append([f"`{key}`", *counted, each, _time(stored.seconds), plain(stored.where["device"])])
    return table(["item", "trainings", "also of others", "each", "in all", "on"], rows)


def _time(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 60
        else f"{seconds / 60:.1f} min"
        if seconds < 3600
        else f"{seconds / 3600:.1f} h"
    )
