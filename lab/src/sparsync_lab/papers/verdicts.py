"""What the papers claim, and whether it holds here: every claim is judged by the numbers of stored results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparsync_lab.papers import claims_p1, claims_p2, claims_p3
from sparsync_lab.papers.claim import MISSING, NOT, PARTLY, REPRODUCED, StoredTables, Verdict
from sparsync_lab.papers.item import Result
from sparsync_lab.report import Row, Table

HEADINGS = ("claim", "published", "here", "verdict", "command")
CLAIMS = (*claims_p1.CLAIMS, *claims_p2.CLAIMS, *claims_p3.CLAIMS)


def verdicts(results: Mapping[str, Result]) -> list[Verdict]:
    """Return what became of every claim.

    Args:
        results: by key of their item; items may be missing.
    """
    stored = StoredTables(results)
    return [claim.verdict(stored) for claim in CLAIMS]


def verdict_table(found: Sequence[Verdict]) -> Table:
    """Return all verdicts in a table."""
    count = {word: sum(one.word == word for one in found) for word in (REPRODUCED, PARTLY, NOT, MISSING)}
    caption = "Verdicts: " + ", ".join(f"{number} {word}" for word, number in count.items() if number)
    return Table(caption, list(HEADINGS), [Row(one.cells) for one in found])
