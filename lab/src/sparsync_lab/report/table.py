"""A table of results: text in cells, ready for a terminal, a page or a file."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONG = 32  # characters: a cell with more holds words


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Args:
        cells: text of each column; the first names the row.
        warning: what is wrong with this row, in words; empty if nothing is.
    """

    cells: Sequence[str]
    warning: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under headings.

    Args:
        caption: what the table shows, in a sentence.
        headings: one for each column.
        rows: each with as many cells as there are headings.
        notes: sentences below the table.
    """

    caption: str
    headings: Sequence[str]
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.headings):
                raise ValueError(f"rows must have {len(self.headings)} cells, as many as headings, got {row.cells}")

    def is_text(self, column: int) -> bool:
        """Return whether a column holds words rather than numbers: one of its cells is long."""
        return any(len(row.cells[column]) > LONG for row in self.rows)

    def has_digits(self, column: int) -> bool:
        """Return whether a cell of a column has a digit: a column of short words has none."""
        return any(sign.isdigit() for row in self.rows for sign in row.cells[column])


def mean_and_std_text(mean: float, deviation: float | None, unit: str = "") -> str:
    """Return ``97.3 ± 0.2 %``; a deviation that is not known is left out."""
    spread = "" if deviation is None else f" ± {deviation:.1f}"
    return f"{mean:.1f}{spread}{unit and f' {unit}'}"


def times(factor: float) -> str:
    """Return ``21.6 ×``, ``498 ×``: three digits, or all before the point."""
    return f"{factor:,.1f} ×" if round(factor, 1) < 100 else f"{factor:,.0f} ×"


def write_csv(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write lines with the same keys as a CSV file with a header."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
