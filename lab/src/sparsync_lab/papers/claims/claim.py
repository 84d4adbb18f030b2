"""A claim of a paper or a question about it, and its verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sparsync_lab.papers.claims.stored_tables import MissingResult, StoredTables, raise_missing
from sparsync_lab.papers.differences import MISSING, Held

REPRODUCED, PARTLY, NOT, UNDECIDED = "reproduced", "partly", "not", "not decided"  # or MISSING
OPENINGS = {PARTLY: "partly reproduced", NOT: "not reproduced"}  # of sentences
ANSWERS = {REPRODUCED: "yes", NOT: "no"}  # to questions
NOT_TRAINED = "trainings are missing"  # in place of numbers
LEARNS = 20.0  # % of accuracy: a training with more has learned; 10 is chance


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
            return Verdict(self, NOT_TRAINED, MISSING)


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


def at_most_partly(word: str, complete: bool = False) -> str:
    """Return the verdict on a claim that is reproduced only if it was tested completely."""
    return PARTLY if word == REPRODUCED and not complete else word


def partly_as(cause: str, found: Judgement) -> Judgement:
    """Return a judgement that a cause keeps from "reproduced"; its row names the cause."""
    word = at_most_partly(found.word)
    here = found.here if word == found.word else f"{found.here}; partly: {cause}"
    return found._replace(here=here, word=word)


def undecided_as(cause: str, found: Judgement) -> Judgement:
    """Return a judgement that a cause keeps from "not", as it may be why the claim fails; its row names the cause."""
    if found.word != NOT:
        return found
    return found._replace(here=f"{found.here}; {UNDECIDED}: {cause}", word=UNDECIDED)


def sentences(*told: str) -> str:
    """Join what is told to sentences; what is empty is left out."""
    return " ".join(f"{one[0].upper()}{one[1:]}." for one in told if one)
