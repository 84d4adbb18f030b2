"""What an error has to say: whom the fault struck, what happened there, and which step the ranks have reached."""

from __future__ import annotations

import re
from typing import Any

from tests.matrix.cells import LOST, Cell
from tests.matrix.faults import RAISED

VOTES = "; steps "  # what the vote adds begins like this, and may name any rank
WITHOUT_STORE = ("the store is gone, and with it rank 0", "the store does not answer: rank 0")
SILENT = "(no answer within|the connection to a rank broke).*; ranks not heard from: "
KINDS = {"flip": "Damaged", "order": "Mismatch", "config": "Mismatch", "kill": "PeerLost", "stop": "PeerLost"}


def names_the_cause(cell: Cell, kind: str, text: str) -> bool:
    """Return whether an error is of what has happened, and says to whom; a rank that is lost takes the store along if
    it hosts that, and then nobody is told by the others."""
    said, struck = text.partition(VOTES)[0], cell.rank
    raiser = struck if cell.starter is None else cell.starter
    raised = re.search(rf"\brank {raiser}: (.*\W)?{RAISED}$", said) is not None
    may_be_missed = cell.fault in LOST and (cell.step != "vote" or struck == 0)  # before anybody hears who raised
    if cell.fault == "raise" or (cell.starter is not None and (raised or not may_be_missed)):
        return raised
    if cell.fault in LOST and struck == 0:
        return kind == KINDS[cell.fault] and any(words in said for words in WITHOUT_STORE)
    numbers = [(int(number), int(rank)) for rank, number in re.findall(r"rank (\d+): (\d+)", said)]
    found = {
        "kill": re.search(f"{SILENT}{struck}$", said),
        "stop": re.search(f"{SILENT}{struck}$", said),
        "flip": f"did not arrive at rank {struck} as it was sent: its checksum is another one" in said,
        "order": "their sequence differs" in said and max(numbers)[1] == struck,  # it is one ahead
        "config": re.search(f"differs on .*rank {struck} has .*seed", said),
    }
    return kind == KINDS[cell.fault] and bool(found[cell.fault])


def steps_told(text: str, own: int) -> int | None:
    """Return the step that an error, of a rank that has completed ``own`` steps, calls the committed one: where it says
    nothing all are at the same. ``None``: it does not know."""
    votes = text.partition(VOTES)[2]
    named = re.match(r"committed: (\d+)", votes)
    if named:
        return int(named[1])
    return None if "not known" in votes else own


def agrees_on_steps(found: dict[int, Any]) -> list[str]:
    """Ranks are at most one step apart, and those that name a committed step name the same, which one has reached."""
    completed = {rank: answer["completed"] for rank, answer in found.items() if "completed" in answer}
    told = {rank: steps_told(found[rank]["error"][1], steps) for rank, steps in completed.items()}
    wrong = [f"ranks are more than a step apart: {completed}"] if _apart(completed) > 1 else []
    odd = {rank: steps for rank, steps in told.items() if steps not in (None, max(completed.values()))}
    return wrong + ([f"completed: {completed}; committed, as they say: {odd}"] if odd else [])


def _apart(completed: dict[int, int]) -> int:
    return max(completed.values(), default=0) - min(completed.values(), default=0)
