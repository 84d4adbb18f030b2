"""What the papers claim and what we asked, and what became of it: judged by the numbers of stored results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparsync_lab.papers import (
    claims_p1,
    claims_p1_gaussian,
    claims_p1_gradients,
    claims_p1_times,
    claims_p2,
    claims_p2_scopes,
    claims_p2_times,
    claims_p3,
    questions_beyond,
    questions_p1,
    questions_p3,
)
from sparsync_lab.papers.claim import ANSWERS, MISSING, NOT, PARTLY, REPRODUCED, UNDECIDED, StoredTables, Verdict
from sparsync_lab.papers.item import Result
from sparsync_lab.report import Row, Table

CLAIM_HEADINGS = ("claim", "published", "here", "verdict", "command")
QUESTION_HEADINGS = ("question", "here", "answer", "command")
QUESTIONS = (*questions_p1.QUESTIONS, *questions_p3.QUESTIONS, *questions_beyond.QUESTIONS)
CLAIMS = (
    *claims_p1_gradients.CLAIMS, *claims_p1.CLAIMS, *claims_p1_gaussian.CLAIMS, *claims_p1_times.CLAIMS,
    *claims_p2_scopes.CLAIMS, *claims_p2.CLAIMS, *claims_p2_times.CLAIMS, *claims_p3.CLAIMS, *QUESTIONS,
)  # fmt: skip


def verdicts(results: Mapping[str, Result]) -> list[Verdict]:
    """Return what became of every claim and question.

    Args:
        results: by key of their item; items may be missing.
    """
    stored = StoredTables(results)
    return [claim.verdict(stored) for claim in CLAIMS]


def verdict_table(found: Sequence[Verdict]) -> Table:
    """Return what became of the papers' claims."""
    own = [one for one in found if not one.is_question]
    rows = [Row([*_named(one), one.claim.published, one.here, one.answer, _commands(one)]) for one in own]
    return Table(f"Verdicts: {_counted(own)}", list(CLAIM_HEADINGS), rows)


def answer_table(found: Sequence[Verdict]) -> Table:
    """Return what became of our questions."""
    own = [one for one in found if one.is_question]
    rows = [Row([*_named(one), one.here, one.answer, _commands(one)]) for one in own]
    return Table(f"What no paper claims and we asked: {_counted(own)}", list(QUESTION_HEADINGS), rows)


def _named(one: Verdict) -> list[str]:
    return [f"{one.claim.item}: {one.claim.text}"]


def _commands(one: Verdict) -> str:
    return "; ".join(one.commands)


def _counted(own: Sequence[Verdict]) -> str:
    words = [one.answer for one in own]
    order = (REPRODUCED, ANSWERS[REPRODUCED], PARTLY, NOT, ANSWERS[NOT], UNDECIDED, MISSING)
    return ", ".join(f"{words.count(word)} {word}" for word in order if word in words)
