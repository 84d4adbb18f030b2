"""Every result on one page: ours, the published numbers, what differs and why, command and hardware."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from sparsync_lab.environment import environment
from sparsync_lab.papers.claims.verdicts import answer_table, verdict_table, verdicts
from sparsync_lab.papers.item import Item
from sparsync_lab.papers.store import Stored, results_of
from sparsync_lab.report import Page, Section, Text, write

TITLE = "The papers' figures and tables, made again"
INTRO = (
    "P1: Shi et al., Understanding Top-k Sparsification in Distributed Deep Learning, 2019. "
    "P2: Foroutan Eghlidi and Jaggi, Sparse Communication for Training Deep Networks, 2020. "
    "P3: Shi et al., A Convergence Analysis of Distributed SGD with Communication-Efficient Gradient "
    "Sparsification, 2019 (of which the abstract prints no numbers). Beyond: what the papers do not have.",
    "Every part says which command made it and where. Numbers are ours unless they are called published.",
)
NAMED = 12  # trainings that are missing; of more the number is told
PARTS = {"p1": "P1", "p2": "P2", "p3": "P3", "beyond": "Beyond the papers"}


def write_report(items: Iterable[Item], folder: Path, path: Path) -> tuple[int, int, int]:
    """Write the page from the results in ``folder``; return how many full and quick results are on it, and how many
    items have none."""
    stored = [(item, results_of(item, folder)) for item in items]
    judged = verdicts({item.key: found[0].result for item, found in stored if found and is_full(item, found[0])})
    sections: list[Section] = [Text("Verdicts", []), verdict_table(judged), answer_table(judged)]
    full = quick = left = 0
    for item, found in stored:
        own = [f"{one.sentence} {one.detail}".strip() for one in judged if one.claim.item == item.key]
        sections += [part for one in found for part in _sections(item, one, own)] or _sections(item, None, own)
        quick += sum(one.quick for one in found)
        full += sum(not one.quick for one in found)
        left += not found
    write(Page(TITLE, INTRO, sections, environment(), before_contents=1), path)
    return full, quick, left


def _sections(item: Item, stored: Stored | None, judged: Sequence[str]) -> list[Section]:
    part = PARTS[item.key.split("/")[0]]
    asked = "" if stored is None else _asked(item, stored)
    heading = f"{part}: {item.title}{f' ({asked})' if asked else ''}"
    opening = [*(judged if stored is not None and is_full(item, stored) else ()), item.shows]
    published: list[Section] = [item.published] if item.published is not None else []
    if stored is None:
        opening.append(f"Not run yet: sparsync papers run {item.key}. Needs {needs(item)}.")
        return [Text(heading, opening), *published]
    result = stored.result
    if stored.quick:
        opening.append("Quick: a tiny setting that shows that the command works. It says nothing about the paper.")
    if item.order is not None and len(result.missing) > NAMED:
        every = len(result.runs) + len(result.missing)
        listing = f"sparsync papers list {item.key} names them, with the time that they take"
        opening.append(f"{len(result.missing)} of {every} trainings are not done yet: {listing}.")
    elif result.missing:
        opening.append(f"Trainings that are not done yet: {', '.join(result.missing)}.")
    notes = [Text("What differs from the paper, and why", list(result.notes), level=3)] if result.notes else []
    return [
        Text(heading, opening),
        *result.figures,
        *result.tables,
        *published,
        *notes,
        Text("", [made_by(stored)]),
    ]


def is_full(item: Item, stored: Stored) -> bool:
    """Return whether a result is of the full setting, by which claims are judged."""
    return not stored.quick and not _asked(item, stored)


def _asked(item: Item, stored: Stored) -> str:
    """Return what the command says beside the item."""
    return stored.command.partition(item.key)[2].replace("--quick", "").strip()


def made_by(stored: Stored) -> str:
    """Return which command made a result, from what, where and when."""
    where = stored.where
    data = "".join(f" Data: {name}, SHA-256 {sum_[:12]}…." for name, sum_ in stored.result.data.items())
    trained = bool(stored.result.runs)
    seeds = f"{stored.seed} (others where a table has several)" if trained else str(stored.seed)
    time = f"{stored.seconds:,.0f} s{' of trainings, which may have run side by side' if trained else ''}"
    return (
        f"Command: {stored.command}. Seed {seeds}, {time}, {where['device']} "
        f"({where['cpus']} CPUs), torch {where['torch']}, commit {where['commit'] or '–'}, {where['date']}.{data}"
    )


def needs(item: Item) -> str:
    """Return what the full setting asks for, in words."""
    time = f"about {item.minutes:g} minute{'s' if item.minutes != 1 else ''}" if item.minutes else "seconds"
    return ", ".join([*item.needs, time]) if item.needs else time


def listed(items: Sequence[Item], folder: Path) -> list[tuple[str, str, str, str]]:
    """Return key, title, needs and state of every item."""
    lines = []
    for item in items:
        states = []
        for stored in results_of(item, folder):
            state = "quick" if stored.quick else "partly" if stored.result.missing else "done"
            asked = _asked(item, stored)
            states.append(f"{state}, {asked}" if asked else state)
        lines.append((item.key, item.title, needs(item), "; ".join(states) or "–"))
    return lines
