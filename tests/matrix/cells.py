"""The cells of the matrix: which fault strikes whom, at which step, in which training."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product

import pytest

from tests.covering import cover
from tests.matrix.steps import AFTER_AN_ERROR, ALL, DEFERRABLE, STEPS, Step
from tests.mutants import load_rooms

SIZES = (2, 3, 5)
SLOW = ("kill", "stop", "delay")
LOST = ("kill", "stop")  # faults after which survivors wait for a rank


@dataclass(frozen=True)
class Cell:
    """One training that a fault strikes.

    Args:
        after: it strikes after the step's call; else before.
        last: it strikes at the last such call of a training step; else at the first.
        victim: who is struck: ``"first"``, the rank that hosts the store, or ``"last"``.
        size: number of ranks.
        scaled: with a ``GradScaler``, so that steps can be undone.
        deferred: the device decides, and the host hears of it later; by interpreted kernels.
    """

    collective: str
    fault: str
    step: str
    after: bool
    last: bool
    victim: str
    size: int
    scaled: bool
    deferred: bool = False

    @property
    def rank(self) -> int:
        return 0 if self.victim == "first" else self.size - 1

    @property
    def starter(self) -> int | None:
        """The rank that raises first, where the fault strikes what comes of that: an alarm is raised by itself."""
        starters = {"alarm": self.rank, "vote": (self.rank + 1) % self.size}
        return starters.get(self.step)

    @property
    def spoilt(self) -> str:
        """The parameter whose gradient is not finite."""
        return "small" if self.last else "a"

    @property
    def place(self) -> Step:
        step = next(one for one in STEPS if one.name == self.step and self.collective in one.collectives)
        return replace(step, target=step.deferred_target or "") if self.deferred else step

    def __str__(self) -> str:
        side, which = "after" if self.after else "before", "last" if self.last else "first"
        words = (self.collective, self.fault, side, which, self.step, "at", self.victim, "of", self.size)
        return "-".join(map(str, words)).replace(" ", "_") + "-scaled" * self.scaled + "-deferred" * self.deferred


def all_cells(deferred: bool = False) -> list[Cell]:
    """Return the cells of the matrix. Faults that take long are met once at every place, with ranks, victim and scaler
    drawn; the others by all of them. Where the device decides all take long: some seconds of interpreted kernels."""
    whole, cells = list(product(("first", "last"), SIZES, (False, True))), []
    for collective, step in product(DEFERRABLE if deferred else ALL, STEPS):
        if collective not in step.collectives or (deferred and step.deferred_target is None):
            continue
        for fault, after, last in _ways(step):
            found = [Cell(collective, fault, step.name, after, last, *trained, deferred) for trained in whole]
            found = [cell for cell in found if _makes_sense(cell)]
            if deferred or fault in SLOW:
                drawn = zlib.crc32(repr((collective, fault, step.name, after, last)).encode())
                found = [found[drawn % len(found)]]
            cells += found
    return cells


def _ways(step: Step) -> Iterator[tuple[str, bool, bool]]:
    """Return what may happen at a step: fault, before or after its call, and at the first or the last one.

    A rank that stops or is slow after a call is one that does so before the next one; a killed one is not, as its
    connections close. Alarm and vote only tell of an error: raised in there it would be a second one, of a store that
    is gone, which ``kill`` of rank 0 is.
    """
    counts = (False,) if step.once or step.when <= 0 else (False, True)
    special = {
        "options": [("config", True, False)],
        "gradient": [("nan", True, False), ("inf", True, True)],
        "count energy": [("raise", False, True)],
    }
    if step.name in special:
        yield from special[step.name]
        return
    for last in counts:
        for fault in SLOW if step.name in AFTER_AN_ERROR else ("raise", *SLOW):
            yield fault, False, last
        if step.name not in ("compress", "fill message", *AFTER_AN_ERROR):  # of ours nothing is done behind these
            yield "raise", True, last
        yield "kill", True, last
        if step.exchanges:
            yield "flip", True, last
        if step.name == "exchange":
            yield "order", False, last


def _makes_sense(cell: Cell) -> bool:
    """Return whether there is such a training: nodes need ranks to exchange with; some calls their leaders make, and a
    node's sum is its leader's alone."""
    for_leaders = cell.place.leads or (cell.fault, cell.step) == ("flip", "sum_at_first")
    return cell.collective != "nodes" or (
        cell.size > 2 and not (for_leaders and cell.victim == "last" and cell.size == 5)
    )


def each_cell(cells: list[Cell]) -> pytest.MarkDecorator:
    """Let a test run with each cell of the sample; ``python -m tests.matrix`` runs them all."""
    return pytest.mark.parametrize("cell", sample(cells), ids=str)


def sample(cells: list[Cell]) -> list[Cell]:
    """Return few cells: of what is quick, those that meet every pair of values, and every step with every fault; of
    what takes long, every collective, or with ``stop`` every victim. Where the device decides, every fault, and every
    collective. And all that seeded defects name."""
    quick = "collective", "fault", "victim", "size", "scaled"
    ways = {"": (2, quick), **dict.fromkeys(("kill", "delay"), (1, ("collective",))), "stop": (1, ("victim", "scaled"))}
    if cells[0].deferred:
        ways = {"": (1, ("collective", "fault")), "raise": (1, ("collective",))}
    chosen = []
    named = {mutant.test.partition("[")[2].removesuffix("]") for mutants in load_rooms().values() for mutant in mutants}
    for fault, (strength, names) in ways.items():
        some = [cell for cell in cells if fault == (cell.fault if cell.fault in ways else "")]
        # At steps that differ; attach last: nothing was exchanged, and who is lost is waited for until the deadline.
        some = sorted(some, key=lambda cell: (cell.step == "attach", zlib.crc32(str(cell).encode())))
        met = [set(combinations([(name, getattr(cell, name)) for name in names], strength)) for cell in some]
        if strength == 2:
            for pairs, cell in zip(met, some, strict=True):
                pairs.add((("fault", cell.fault), ("step", cell.step)))
        needed = {number for number, cell in enumerate(some) if str(cell) in named}
        chosen += [some[number] for number in sorted(cover(met, needed))]
    return chosen
