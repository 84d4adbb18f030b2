"""What has to come of a cell. One law for all of them: whoever says that it has completed n steps stands where an
undisturbed training stands after n steps, but for the gradient of the step that failed, which its residual holds wholly
or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.matrix.cells import LOST, Cell
from tests.matrix.faults import RAISED
from tests.matrix.training import SCALE, SHAPES, STEPS, gradient

SURVIVED = ("delay",)  # by design
SLOWEST = 20.0  # seconds; the deadline of those who wait for nobody is 30
UNREAD = ("the store is gone, and with it rank 0", "the store does not answer: rank 0")
Outcomes = Sequence[tuple[bool, Any]]


def complaints(cell: Cell, outcomes: Outcomes, undisturbed: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """Return all that is not as it has to be.

    Args:
        outcomes: ``(finished, what it returned, or why not)`` of every rank.
        undisturbed: of every rank, what it holds after each number of steps where no fault strikes.
    """
    dead = cell.rank if cell.fault == "kill" else None
    silent = [f"rank {rank}: {answer}" for rank, (ok, answer) in enumerate(outcomes) if not ok and rank != dead]
    if silent:
        return silent
    found = {rank: answer for rank, (_, answer) in enumerate(outcomes) if rank != dead}
    wrong = [] if dead is not None or found[cell.rank]["struck"] else ["the fault never struck"]
    if dead is not None and outcomes[dead][0]:
        wrong.append("the fault never struck")
    if any(answer["attach"][0] != "none" for answer in found.values()):
        return wrong + [f"rank {rank}: attach: {a['attach']}" for rank, a in found.items()]
    wrong += _survived(found) if cell.fault in SURVIVED else _raised(cell, found)
    for rank, answer in found.items():
        wrong += [f"rank {rank}: {text}" for text in _kept(cell, rank, answer, undisturbed[rank])]
    return wrong


def _survived(found: dict[int, Any]) -> list[str]:
    return [
        f"rank {rank}: {answer['error']} after {answer['completed']} steps"
        for rank, answer in found.items()
        if answer["error"][0] != "none" or answer["completed"] != STEPS
    ]


def _raised(cell: Cell, found: dict[int, Any]) -> list[str]:
    """All raise, the same, in time; it names the rank and the cause."""
    errors, wrong = {rank: answer["error"] for rank, answer in found.items()}, []
    if cell.fault in LOST and cell.rank == 0:  # the store is silent, too: everybody speaks for himself
        for rank, (kind, text) in errors.items():
            if rank and (kind != "PeerLost" or not any(said in text for said in UNREAD)):
                wrong.append(f"rank {rank}: {kind}: {text}")
    elif len(set(errors.values())) > 1:
        wrong.append(f"not the same: {errors}")
    for rank, (kind, text) in errors.items():
        if kind == "none":
            wrong.append(f"rank {rank} goes on")
        elif not (f"rank {cell.rank}" in text or f"not heard from: {cell.rank}" in text or (cell.rank == 0 and cell.fault in LOST)):
            wrong.append(f"rank {rank}: the error does not name rank {cell.rank}: {kind}: {text}")
        elif (RAISED in text) != (cell.fault == "raise"):
            wrong.append(f"rank {rank}: the cause: {kind}: {text}")
        if found[rank]["again"] != "StepFailed":
            wrong.append(f"rank {rank} may be trained on: {found[rank]['again']}")
        if found[rank]["seconds"] > SLOWEST:
            wrong.append(f"rank {rank} raised after {found[rank]['seconds']:.1f} s")
    return wrong


def _kept(cell: Cell, rank: int, answer: dict[str, Any], undisturbed: Sequence[dict[str, Any]]) -> list[str]:
    """Weights are those of the steps that were completed; residuals, too, and hold all of the next gradient or none."""
    completed, wrong = answer["completed"], []
    if answer["saved"] != completed:
        wrong.append(f"completed {completed} steps and saves {answer['saved']}")
    at = undisturbed[completed]
    for name in SHAPES:
        if not np.array_equal(answer["weights"][name], at["weights"][name]):
            wrong.append(f"the weights of {name} are not those of {completed} steps")
        kept, before = answer["residuals"][name], at["residuals"][name]
        came = gradient(rank, completed, name).numpy() * (SCALE if cell.scaled else 1)
        whole = not cell.scaled and completed < STEPS and np.array_equal(kept, before + came)
        if not np.array_equal(kept, before) and not whole:
            wrong.append(f"the residual of {name} is neither that of {completed} steps nor with one gradient more")
    return wrong
