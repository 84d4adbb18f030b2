"""The fault matrix: how many cells were run, and came out as expected."""

from __future__ import annotations

from collections.abc import Sequence

from sparsync_lab.docs.sources import Line, Sources, table

FILE = "fault-matrix.csv"
COMMANDS = {"immediate": "python -m tests.matrix", "deferred": "TRITON_INTERPRET=1 python -m tests.matrix"}


def matrix(sources: Sources) -> str:
    """Return, by collective and fault, how many cells were run; those that came out otherwise are marked."""
    lines, parts = sources.lines(FILE), []
    faults = list(dict.fromkeys(line["fault"] for line in lines))
    for completion in dict.fromkeys(line["completion"] for line in lines):
        own = [line for line in lines if line["completion"] == completion]
        found = {(line["collective"], line["fault"]): line for line in own}
        rows = [
            [f"`{name}`", *(_count(found.get((name, fault))) for fault in faults)]
            for name in dict.fromkeys(line["collective"] for line in own)
        ]
        ran, right, cells, unnoticed = (_sum(own, key) for key in ("ran", "as_expected", "cells", "unnoticed"))
        made = sources.made(FILE, own[0], COMMANDS[completion])
        said = f"`{completion.title()}`: {right:,} of {ran:,} cells that were run came out as expected; there are "
        said += f"{cells:,}, and in {unnoticed:,} of them a flipped bit is known not to be noticed (case 71)."
        parts += [table(["collective", *faults], rows), f"{said} {made}"]
    return "\n\n".join(parts)


def _count(line: Line | None) -> str:
    """Return how many of the cells of a collective and a fault were run."""
    if line is None:
        return "–"
    wrong = int(line["ran"]) - int(line["as_expected"])
    return f"{line['ran']} of {line['cells']}" + (f", **{wrong} not as expected**" if wrong else "")


def _sum(lines: Sequence[Line], key: str) -> int:
    return sum(int(line[key]) for line in lines)
