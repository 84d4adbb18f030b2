"""What has to come of a cell.

One law for all of them: whoever says that it has completed n steps stands where an undisturbed training stands after n
steps, but for the gradient of the step that failed, which its residual holds wholly or not at all. After a gradient
that was not finite training goes on, and the law is that of mass: what came in was applied or is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from tests.matrix.cells import LOST, Cell
from tests.matrix.faults import RAISED, SPOILT
from tests.matrix.said import agrees_on_steps, names_the_cause
from tests.matrix.steps import GOOD
from tests.matrix.training import NODES, RATE, SCALE, SHAPES, STEPS, deadline_of, gradient

MARGIN = 10.0  # seconds that two processors, on which other cells run, may take for what needs none
IN_HEADERS = (("raise", "compress"), ("raise", "sketch"))  # faults that a rank's next message tells of
Outcomes = Sequence[tuple[bool, Any]]


def outcome_of(cell: Cell) -> str:
    """Return what a cell has to come to: ``"raised"``, ``"survived"``, ``"skipped"`` (the step) or ``"unnoticed"``."""
    if cell.fault in ("nan", "inf"):
        return "skipped"
    if cell.fault == "delay" and cell.starter is None:
        return "survived"
    if cell.fault == "flip" and not _sealed(cell):
        return "unnoticed"
    return "raised"


def _sealed(cell: Cell) -> bool:
    """Return whether what is flipped has a checksum: not sums of the backend, nor what it hands on inside a node, nor
    values of sketches and their sums."""
    sketch = cell.collective == "sketches" and (cell.step, cell.last) in (("all_to_all", True), ("all_gather", False))
    return cell.step not in ("all_reduce", "sum_at_first", "broadcast") and not sketch


def complaints(cell: Cell, outcomes: Outcomes, undisturbed: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """Return all that is not as it has to be.

    Args:
        outcomes: ``(finished, what it returned, or why not)`` of every rank.
        undisturbed: of every rank, what it holds after each number of steps where no fault strikes.
    """
    dead = {cell.rank} if cell.fault == "kill" else set()
    silent = [f"rank {rank}: {answer}" for rank, (ok, answer) in enumerate(outcomes) if ok == (rank in dead)]
    if silent:
        return silent
    found = {rank: answer for rank, (_, answer) in enumerate(outcomes) if rank not in dead}
    wrong = [] if dead or found[cell.rank]["struck"] else ["the fault never struck"]
    outcome, handles = outcome_of(cell), {rank: answer for rank, answer in found.items() if "completed" in answer}
    if outcome == "raised":
        wrong += _raised(cell, found)
    else:
        errors = {rank: answer["error"] for rank, answer in found.items() if answer["error"][0] != "none"}
        wrong += [f"raised: {errors}"] if errors else []
    if outcome == "skipped":
        return wrong + _told(cell, found) + _mass(cell, found)
    if cell.deferred and cell.fault == "flip":  # who got the message whole has applied it, and cannot take it back
        return wrong
    if cell.deferred and (cell.fault == "order" or (cell.fault, cell.step) in IN_HEADERS):
        return wrong + _mass(cell, found)  # what was exchanged before, in the same step, is applied
    if outcome != "unnoticed":
        for rank, answer in handles.items():
            wrong += [f"rank {rank}: {text}" for text in _kept(cell, rank, answer, undisturbed[rank])]
    return wrong


def _raised(cell: Cell, found: dict[int, Any]) -> list[str]:
    """All raise, the same, in time; it names the rank and the cause."""
    errors, wrong = {rank: answer["error"] for rank, answer in found.items()}, []
    if cell.step == "attach" and cell.fault == "raise":  # this rank has no handle: attach itself raised
        own = errors.pop(cell.rank)
        wrong += [] if own == ("RuntimeError", RAISED) else [f"rank {cell.rank}: {own}"]
        wrong += [f"it has not voted: {text}" for _, text in errors.values() if "not known" in text]
    alone = cell.fault in LOST and cell.rank == 0  # and with it the store: everybody speaks for himself
    late = errors.pop(cell.rank) if cell.fault == "stop" else None  # it may have got a step further than all others
    wrong += [f"not the same: {errors}"] if len(set(errors.values())) > 1 and not alone else []
    for error in {*errors.values(), None if alone else late} - {None}:
        wrong += [] if names_the_cause(cell, *error) else [f"not of rank {cell.rank} and its cause: {error}"]
    wrong += agrees_on_steps({rank: found[rank] for rank in errors})
    for rank in errors:
        answer = found[rank]
        wrong += [f"rank {rank} goes on"] if answer["error"][0] == "none" else []
        wrong += [f"rank {rank} may be trained on"] if answer.get("again", "StepFailed") != "StepFailed" else []
        wrong += [f"rank {rank} raised after {answer['seconds']:.1f} s"] if answer["seconds"] > _limit(cell) else []
    return wrong


def _limit(cell: Cell) -> float:
    """Return how many seconds survivors have: until the deadline where a rank is lost, twice that where it hosts the
    store; where nobody is waited for, none."""
    waits = 0 if cell.fault not in LOST else 1 if cell.rank else 2
    return waits * deadline_of(cell) + MARGIN


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
        whole = before + sum(_came(cell, other, completed, name) for other in _led_by(cell, rank))
        whole = answer["whole"].get(name, whole)  # of an update, which is no gradient
        entered = not cell.scaled and completed < STEPS and np.array_equal(kept, whole)
        if not np.array_equal(kept, before) and not entered:
            wrong.append(f"the residual of {name} is neither that of {completed} steps nor with one gradient more")
    return wrong


def _told(cell: Cell, found: dict[int, Any]) -> list[str]:
    """A gradient was not finite: all are told whose, and go on."""
    told = f"was not finite on rank {cell.rank}"
    wrong = [f"rank {rank} was told {a['told']}" for rank, a in found.items() if not any(told in t for t in a["told"])]
    return wrong + [f"rank {rank} made {a['completed']} steps" for rank, a in found.items() if a["completed"] != STEPS]


def _mass(cell: Cell, found: dict[int, Any]) -> list[str]:
    """Replicas are the same, and what came in was applied or is kept. Of a step that failed, or that was skipped, a
    rank's gradient has come in, or it has not: never a part of it."""
    wrong = []
    for name in SHAPES:
        weights = [answer["weights"][name] for answer in found.values()]
        residuals = [answer["residuals"][name] for answer in found.values()]
        if not all(np.array_equal(weights[0], other) for other in weights):
            wrong.append(f"the replicas of {name} differ")
        if not np.isfinite([weights[0], *residuals]).all():
            wrong.append(f"{name} is not finite")
        if cell.collective == "sketches":  # of an update no mass is known here
            continue
        scale = found[0]["scale"]
        there = sum(kept.astype(float) for kept in residuals) / scale - cell.size * weights[0].astype(float) / RATE
        steps = product(range(cell.size), range(STEPS))
        came = np.stack([_finite(cell, *step, name) for step in steps]).reshape(cell.size * STEPS, -1)
        shares = np.linalg.lstsq(came.T, there.reshape(-1), rcond=None)[0].round()
        whole = set(shares) <= {0, 1} and np.allclose(shares @ came, there.reshape(-1), rtol=1e-5, atol=1e-2)
        if not whole or not _all_in(cell, name, shares.reshape(cell.size, STEPS)):
            wrong.append(f"of {name} something was lost or made: {shares}")
    return wrong


def _all_in(cell: Cell, name: str, shares: Any) -> bool:
    """Return whether all gradients have come in that must have: those of steps that did not fail; and of one that was
    skipped, where it is not undone, what does not travel dense."""
    if outcome_of(cell) != "skipped":
        return bool(shares[:, :GOOD].all())
    undone = cell.scaled or cell.collective == "dense" or name == "small"
    return bool(shares.sum() == cell.size * (STEPS - undone) and shares[:, GOOD].any() != undone)


def _finite(cell: Cell, rank: int, step: int, name: str) -> Any:
    """Return what can come in of a gradient."""
    own = gradient(rank, step, name).double().numpy()
    nodes = NODES[cell.size] if cell.collective == "nodes" else [[cell.rank]]
    spoilt = next(node for node in nodes if cell.rank in node)  # whose sum is not finite either
    if cell.fault in ("nan", "inf") and rank in spoilt and (step, name) == (GOOD, cell.spoilt):
        own.reshape(-1)[SPOILT] = 0
    return own


def _came(cell: Cell, rank: int, step: int, name: str) -> Any:
    return gradient(rank, step, name).numpy() * (SCALE if cell.scaled else 1)


def _led_by(cell: Cell, rank: int) -> Sequence[int]:
    """Return whose gradients a rank adds to its residual."""
    if cell.collective != "nodes":
        return [rank]
    return next((node for node in NODES[cell.size] if node[0] == rank), [])
