"""A claim of a paper, and the stored numbers by which it is judged."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from sparsync_lab.papers.item import Result
from sparsync_lab.report import Table

REPRODUCED, PARTLY, NOT, MISSING = "reproduced", "partly", "not", "not run"
POINT = 1.0  # points of accuracy: so near to dense is "like dense"
SEVERAL = 3  # seeds: with fewer, a difference of less than a point is not stated
UNDER_A_POINT = "under a point"
SEED = ", seed "  # of a label
SCORE, TO_DENSE = "accuracy, %, last", "to dense"  # columns of tables of trainings


class StoredTables:
    """The tables of stored results, by their captions, rows and headings. What is not there is a ``LookupError``."""

    def __init__(self, results: Mapping[str, Result]) -> None:
        self.results = results

    def table(self, item: str, caption: str) -> Table:
        """Return the first table of an item whose caption begins so."""
        return next((t for t in self.results[item].tables if t.caption.startswith(caption)), None) or none(caption)

    def cell(self, item: str, caption: str, row: str, heading: str) -> str:
        found = self.table(item, caption)
        at = {cells.cells[0]: cells.cells for cells in found.rows}[row]
        return at[list(found.headings).index(heading)] if heading in found.headings else none(heading)

    def number(self, item: str, caption: str, row: str, heading: str) -> float:
        """Return a cell's first number."""
        return first_number(self.cell(item, caption, row, heading))

    def asked(self, caption: str) -> dict[tuple[str, str], list[str]]:
        """Return the rows of a question of ``beyond/evidence`` that were trained, by model and training."""
        rows = (row.cells for row in self.table("beyond/evidence", caption).rows)
        return {(cells[1], cells[0]): list(cells) for cells in rows if cells[2] != MISSING}

    def scores(self, caption: str) -> dict[tuple[str, str], float]:
        """Return their last scores."""
        return {key: float(cells[2]) for key, cells in self.asked(caption).items()}


class Verdict(NamedTuple):
    """A claim, and what became of it."""

    item: str
    claim: str
    published: str
    here: str
    word: str

    @property
    def sentence(self) -> str:
        """Return it in a sentence, with the two numbers."""
        return f"{self.word.capitalize()}: {self.claim}. Published: {self.published}. Here: {self.here}."

    @property
    def cells(self) -> list[str]:
        command = f"sparsync papers run {self.item}"
        return [f"{self.item}: {self.claim}", self.published, self.here, self.word, command]


Judge = Callable[[StoredTables], tuple[str, str]]  # what is so here, and the verdict


@dataclass(frozen=True)
class Claim:
    """What a paper says, and how that is judged."""

    item: str
    text: str
    published: str
    judge: Judge

    def verdict(self, stored: StoredTables) -> Verdict:
        try:
            here, word = self.judge(stored)
        except LookupError:
            here, word = "trainings are missing", MISSING
        return Verdict(self.item, self.text, self.published, here, word)


def first_number(text: str) -> float:
    """Return the first number of a text."""
    found = re.search(r"[-+−]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?", text)
    return float(found[0].replace(",", "").replace("−", "-")) if found else none(text)


def stated_gap(gap: float, seeds: int = 1, digits: int = 2) -> str:
    """Return a difference in points of accuracy; that it is under a point, and no more, where the seeds are too few."""
    return f"{gap:+.{digits}f}" if abs(gap) >= POINT or seeds >= SEVERAL else UNDER_A_POINT


def seeds_by_label(scores: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return scores by label and seed, from those by labels that tell the seed; that of the first seed is empty."""
    found: dict[str, dict[str, float]] = {}
    for each, score in scores.items():
        label, _, seed = each.partition(SEED)
        found.setdefault(label, {})[seed] = score
    return found


def like_dense(gap: str) -> bool:
    """Return whether a stated difference to dense is so small that it ends like dense; "–", what diverged, does not."""
    return gap == UNDER_A_POINT or (gap != "–" and first_number(gap) > -POINT)


def none(what: str) -> NoReturn:
    """Raise, as what was looked for is not stored."""
    raise LookupError(what)


def word_for(held: int, of: int) -> str:
    """Return the verdict on a claim that held so often."""
    return REPRODUCED if held == of else PARTLY if held else NOT


def at_most_partly(word: str, unless: bool = False) -> str:
    """Return the verdict of a claim of which not all was tested, or which has another cause."""
    return PARTLY if word == REPRODUCED and not unless else word
