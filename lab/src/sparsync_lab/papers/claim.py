"""A claim of a paper or a question about it, and the stored numbers by which it is judged."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple, NoReturn

from sparsync_lab.papers.item import Result
from sparsync_lab.report import Table

REPRODUCED, PARTLY, NOT, UNDECIDED, MISSING = "reproduced", "partly", "not", "not decided", "not run"
OPENINGS = {PARTLY: "partly reproduced", NOT: "not reproduced"}  # of sentences
ANSWERS = {REPRODUCED: "yes", NOT: "no"}  # to questions
POINT = 1.0  # points of accuracy: so near to dense is "like dense"
PERCENT = 0.01  # of a perplexity: so near to dense is "like dense" there
SEVERAL = 3  # seeds: with fewer, a difference of less than a point is not stated, and decides nothing
UNDER_A_POINT, DIVERGED = "under a point", "diverged"
NO_PAIR = "–"  # in place of a difference: no seed is common to both
LEARNS = 20.0  # % of accuracy: a training with more has learned; 10 is chance
SEED = ", seed "  # of a label
SCORE, TO_DENSE = "accuracy, %, last", "to dense"  # columns of tables of trainings
Held = bool | None  # whether a part of a claim holds; ``None``: too few seeds to say


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


class Judgement(NamedTuple):
    """How a claim is judged.

    Args:
        here: the numbers that decide, in a few words.
        word: the verdict.
        detail: what else the results say of it, in sentences.
    """

    here: str
    word: str
    detail: str = ""


Judge = Callable[[StoredTables], Judgement]


@dataclass(frozen=True)
class Claim:
    """What a paper says and how that is judged.

    Args:
        item: which it is about.
        text: what is claimed; of a question, which no paper asks, the question.
        published: the paper's numbers, or how it says it; empty of a question.
        judge: judges it by the stored results.
        also: other items whose results that takes.
    """

    item: str
    text: str
    published: str
    judge: Judge
    also: Sequence[str] = ()

    def verdict(self, stored: StoredTables) -> Verdict:
        try:
            return Verdict(self, *self.judge(stored))
        except MissingResult:
            return Verdict(self, "trainings are missing", MISSING)


def question(item: str, asks: str, judge: Judge, also: Sequence[str] = ()) -> Claim:
    """Return what no paper claims and we ask."""
    return Claim(item, asks, "", judge, also)


class Verdict(NamedTuple):
    """A claim and what became of it: the fields of ``Judgement``."""

    claim: Claim
    here: str
    word: str
    detail: str = ""

    @property
    def is_question(self) -> bool:
        """Return whether we ask it and no paper claims it."""
        return not self.claim.published

    @property
    def answer(self) -> str:
        """Return the verdict, to a question as yes or no."""
        return ANSWERS.get(self.word, self.word) if self.is_question else self.word

    @property
    def sentence(self) -> str:
        """Return it in a sentence that begins with the verdict and has the numbers that decide."""
        if self.is_question:
            return f"{self.answer.capitalize()}: {self.claim.text} ({self.here})"
        word = OPENINGS.get(self.word, self.word)
        return f"{word.capitalize()}: {self.claim.text} (published: {self.claim.published}; here: {self.here})."

    @property
    def commands(self) -> list[str]:
        """Return the commands that make its results again."""
        return [f"sparsync papers run {item}" for item in (self.claim.item, *self.claim.also)]


def first_number(text: str) -> float:
    """Return the first number of a text; "nan" is that of a training that diverged."""
    found = re.search(r"[-+−]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?|\bnan\b", text)
    return float(found[0].replace(",", "").replace("−", "-")) if found else raise_missing(text)


def stated_gap(gap: float, seeds: int = 1, digits: int = 2) -> str:
    """Return a difference in points of accuracy; that it is under a point, and no more, where the seeds are too few."""
    if not isfinite(gap):
        return DIVERGED
    return f"{gap:+.{digits}f}" if abs(gap) >= POINT or seeds >= SEVERAL else UNDER_A_POINT


def seeds_by_label(scores: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return scores by label and seed, from those by labels that tell the seed; that of the first seed is empty."""
    found: dict[str, dict[str, float]] = {}
    for each, score in scores.items():
        label, _, seed = each.partition(SEED)
        found.setdefault(label, {})[seed] = score
    return found


def near(gap: float, seeds: int = 1, spread: float = POINT) -> Held:
    """Return whether what ends so many points from another ends like it, or higher.

    Args:
        seeds: that both have.
        spread: by which trainings of one seed differ anyway.
    """
    return None if seeds < SEVERAL and abs(gap) < spread else gap > -POINT


def near_perplexity(own: float, other: float, seeds: int = 1) -> Held:
    """Return whether one perplexity is like another, or lower; arguments as in ``near``."""
    return None if seeds < SEVERAL and abs(own - other) < PERCENT * other else own < other * (1 + PERCENT)


def like_dense(gap: str, seeds: int = SEVERAL, spread: float = POINT) -> Held:
    """Return whether a stated difference to dense is so small that it ends like dense; what diverged does not.

    Args:
        seeds: that both have, as of ``near``.
        spread: as of ``near``.
    """
    return None if gap in (NO_PAIR, UNDER_A_POINT) else gap != DIVERGED and near(first_number(gap), seeds, spread)


def from_dense(gap: str) -> str:
    """Return a stated difference in points to dense in words."""
    if gap in (UNDER_A_POINT, DIVERGED):
        return gap if gap == DIVERGED else f"{gap} from dense"
    if gap == NO_PAIR:
        return f"dense {MISSING} with its seed"
    return f"{gap.lstrip('+-')} points {'above' if gap.startswith('+') else 'below'} dense"


def raise_missing(what: str) -> NoReturn:
    """Raise, as what was looked for is not stored."""
    raise MissingResult(what)


def word_for(held: int, of: int) -> str:
    """Return the verdict on a claim that held so often."""
    if not of:
        raise_missing("where it was tested")
    return REPRODUCED if held == of else PARTLY if held else NOT


def any_of(parts: Iterable[Held]) -> Held:
    """Return whether any part holds; where none does, one that is not decided leaves that open."""
    every = list(parts)
    return True in every or (None if None in every else False)


def word_of(parts: Iterable[Held], of: int = 0) -> str:
    """Return the verdict on a claim of several parts. One that is not decided leaves it open whether the claim holds
    anywhere, unless another part holds.

    Args:
        of: how many parts there are, if some may be missing: these are not decided.
    """
    every = list(parts) or raise_missing("its parts")
    every += [None] * (of - len(every))
    return UNDECIDED if None in every and True not in every else word_for(every.count(True), len(every))


def in_words(seeds: int) -> str:
    """Return a number of seeds in words."""
    return {1: "one seed", 2: "two seeds", 3: "three seeds"}.get(seeds, f"{seeds} seeds")


def at_most_partly(word: str, complete: bool = False) -> str:
    """Return the verdict on a claim that is reproduced only if it was tested completely."""
    return PARTLY if word == REPRODUCED and not complete else word


def sentences(*told: str) -> str:
    """Join what is told to sentences; what is empty is left out."""
    return " ".join(f"{one[0].upper()}{one[1:]}." for one in told if one)
