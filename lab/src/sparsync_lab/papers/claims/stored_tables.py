"""The stored numbers by which claims are judged."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from sparsync_lab.papers.differences import MISSING, Held, seeds_by_label
from sparsync_lab.papers.item import Result
from sparsync_lab.report import Table

SCORE, TO_DENSE = "accuracy, %, last", "to dense"  # columns of tables of trainings


class MissingResult(LookupError):
    """What a judge needs is not stored."""


class StoredTables:
    """The tables of stored results, by their captions, rows and headings. What is not there is a ``MissingResult``."""

    def __init__(self, results: Mapping[str, Result]) -> None:
        self.results = results

    def result(self, item: str) -> Result:
        return self.results.get(item) or raise_missing(item)

    def table(self, item: str, caption: str) -> Table:
        """Return the first table of an item whose caption begins so."""
        tables = self.result(item).tables
        return next((t for t in tables if t.caption.startswith(caption)), None) or raise_missing(caption)

    def row(self, item: str, caption: str, row: str) -> Sequence[str]:
        rows = self.table(item, caption).rows
        return next((own.cells for own in rows if own.cells[0] == row), None) or raise_missing(row)

    def device(self, item: str) -> str:
        """Return on what an item was measured."""
        return self.results[item].where.get("device", "the device here").removeprefix("NVIDIA ")

    def cell(self, item: str, caption: str, row: str, heading: str) -> str:
        headings = list(self.table(item, caption).headings)
        return self.row(item, caption, row)[headings.index(heading) if heading in headings else raise_missing(heading)]

    def find(self, item: str, caption: str, row: str, heading: str) -> str | None:
        """Return a cell, or nothing where it is not stored."""
        with suppress(MissingResult):
            return self.cell(item, caption, row, heading)
        return None

    def number(self, item: str, caption: str, row: str, heading: str) -> float:
        """Return a cell's first number."""
        return first_number(self.cell(item, caption, row, heading))

    def untested(self, *items: str) -> list[Held]:
        """Return as many parts that are not decided as trainings of these items are missing."""
        return [None] * sum(len(self.results[item].missing) for item in items if item in self.results)

    def asked(self, caption: str) -> dict[tuple[str, str], list[str]]:
        """Return the rows of a question of ``beyond/evidence`` that were trained, by model and training."""
        rows = (row.cells for row in self.table("beyond/evidence", caption).rows)
        return {(cells[1], cells[0]): list(cells) for cells in rows if cells[2] != MISSING}

    def last_scores(self, model: str) -> dict[str, float]:
        """Return the last scores of all trainings of a model in ``beyond/evidence``, by their labels."""
        rows = (row.cells for table in self.result("beyond/evidence").tables for row in table.rows)
        return {own[0]: float(own[2]) for own in rows if own[1] == model and own[2] != MISSING}

    def by_seed(self, model: str) -> dict[str, dict[str, float]]:
        """Return the same by training and seed."""
        return seeds_by_label(self.last_scores(model))

    def scores(self, caption: str) -> dict[tuple[str, str], float]:
        """Return their last scores."""
        return {key: float(cells[2]) for key, cells in self.asked(caption).items()}


def first_number(text: str) -> float:
    """Return the first number of a text; "nan" is that of a training that diverged."""
    found = re.search(r"[-+−]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?|\bnan\b", text)
    return float(found[0].replace(",", "").replace("−", "-")) if found else raise_missing(text)


def raise_missing(what: str) -> NoReturn:
    """Raise, as what was looked for is not stored."""
    raise MissingResult(what)
