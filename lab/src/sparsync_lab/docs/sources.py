"""The files that blocks are written from, and the Markdown they are written in."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsync_lab.papers import ITEMS
from sparsync_lab.papers.store import Stored, load
from sparsync_lab.report import Table

Line = Mapping[str, str]


@dataclass(frozen=True)
class Sources:
    """The folder of the results.

    Args:
        folder: where it is.
        link: how a page links to it.
    """

    folder: Path
    link: str

    def lines(self, name: str) -> list[Line]:
        """Return the lines of a CSV file."""
        with (self.folder / name).open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def has(self, name: str) -> bool:
        """Return whether a file is there."""
        return (self.folder / name).is_file()

    def item(self, name: str) -> Stored:
        """Return a stored result of the papers."""
        return load(self.folder / "papers" / f"{name}.json")

    def has_item(self, name: str) -> bool:
        """Return whether a result of the papers is stored."""
        return (self.folder / "papers" / f"{name}.json").is_file()

    def items(self) -> dict[str, Stored]:
        """Return the stored results of the papers' items, by their keys."""
        return {item.key: self.item(item.file) for item in ITEMS.values() if self.has_item(item.file)}

    def text(self, name: str) -> str:
        """Return a text file."""
        return (self.folder / name).read_text(encoding="utf-8")

    def linked(self, name: str) -> str:
        """Return a link to a file."""
        return f"[results/{name}]({self.link}/{name})"

    def made(self, name: str, line: Line, command: str) -> str:
        """Return a sentence that says which command wrote a CSV file, where and when."""
        cores = f"{line['cpus']} CPU cores, load {line['load']}"
        return (
            f"From `{command}` ({self.linked(name)}): {line['device']}, {cores}, torch {line['torch']}, "
            f"commit {line['commit']}, {line['date']}."
        )


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def stored_table(stored: Table, columns: int | None = None) -> str:
    """Return a table of a stored result: its first ``columns``, without its caption; its notes below."""
    rows = [[plain(cell) for cell in row.cells[:columns]] for row in stored.rows]
    marked = [row.warning for row in stored.rows if row.warning]
    return "\n\n".join([table(stored.headings[:columns], rows), *map(plain, [*marked, *stored.notes])])


def plain(text: str) -> str:
    """Return text in which nothing is Markdown."""
    for sign in "\\*_`<":
        text = text.replace(sign, "&lt;" if sign == "<" else f"\\{sign}")
    return text


def percent(share: str | float, digits: int = 1) -> str:
    """Return a share as a percentage."""
    return f"{100 * float(share):.{digits}f} %"
