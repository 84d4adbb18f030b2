"""What the papers claim and what we asked, and what became of it: judged by the numbers of stored results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparsync_lab.papers.claims import (
    p1,
    p1_gaussian,
    p1_gradients,
    p1_selection,
    p1_times,
    p2,
    p2_scopes,
    p2_times,
    p3,
    questions_beyond,
    questions_p1,
    questions_p3,
)
from sparsync_lab.papers.claims.claim import ANSWERS, NOT, PARTLY, REPRODUCED, UNDECIDED, Verdict
from sparsync_lab.papers.claims.stored_tables import StoredTables
from sparsync_lab.papers.differences import MISSING
from sparsync_lab.papers.item import Result
from sparsync_lab.report import Row, Table

CLAIM_HEADINGS = ("claim", "published", "here", "verdict", "command")
QUESTION_HEADINGS = ("question", "here", "answer", "command")
QUESTIONS = (*questions_p1.QUESTIONS, *p3.QUESTIONS, *questions_p3.QUESTIONS, *questions_beyond.QUESTIONS)
CLAIMS = (
    *p1.CLAIMS, *p1_gaussian.CLAIMS, *p1_gradients.CLAIMS, *p1_selection.CLAIMS, *p1_times.CLAIMS,
    *p2_scopes.CLAIMS, *p2.CLAIMS, *p2_times.CLAIMS, *p3.CLAIMS, *QUESTIONS,
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
