"""The cells of the matrix: which fault strikes whom, at which step, in which training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from itertools import combinations, product

from tests.covering import cover
from tests.matrix.steps import ALL, STEPS, Step

SIZES = (2, 3, 5)
LOST = ("kill", "stop")  # faults after which survivors wait for a rank
PLACES = {"order": ("exchange",), "config": ("attach",), "gradient": ("take bucket",)}


@dataclass(frozen=True)
class Cell:
    """One training that a fault strikes.

    Args:
        after: it strikes after the step's call; else before.
        last: it strikes at the last such call of a training step; else at the first.
        victim: who is struck: ``"first"``, the rank that hosts the store, or ``"last"``.
        size: number of ranks.
        scaled: with a ``GradScaler``, so that steps can be undone.
    """

    collective: str
    fault: str
    step: str
    after: bool
    last: bool
    victim: str
    size: int
    scaled: bool

    @property
    def rank(self) -> int:
        return 0 if self.victim == "first" else self.size - 1

    @property
    def place(self) -> Step:
        return next(one for one in STEPS if one.name == self.step and self.collective in one.collectives)

    def __str__(self) -> str:
        side, which = "after" if self.after else "before", "last" if self.last else "first"
        words = (self.collective, self.fault, side, which, self.step, "at", self.victim, "of", self.size)
        return "-".join(map(str, words)).replace(" ", "_") + ("-scaled" if self.scaled else "")


def all_cells() -> list[Cell]:
    """Return every cell there is."""
    return list(_cells())


def _cells() -> Iterator[Cell]:
    for collective, step, victim, size, scaled in product(ALL, STEPS, ("first", "last"), SIZES, (False, True)):
        nodes = collective == "nodes"
        if collective not in step.collectives or (nodes and size == 2):  # a single node has nobody to exchange with
            continue
        if nodes and step.leads and victim == "last" and size == 5:  # that rank is led
            continue
        for fault, after, last in _ways(step):
            yield Cell(collective, fault, step.name, after, last, victim, size, scaled)


def _ways(step: Step) -> Iterator[tuple[str, bool, bool]]:
    """Return what may happen at a step: fault, before or after its call, and at the first or the last one."""
    counts = (False, True) if step.often and step.when > 0 else (False,)
    for fault, after, last in product(("raise", "kill", "stop", "delay"), (False, True), counts):
        yield fault, after, last
    for last in counts:
        if step.exchanges:
            yield "flip", True, last
        if step.name == "exchange":
            yield "order", False, last


def sample(cells: list[Cell]) -> list[Cell]:
    """Return few cells in which every pair of values is met that any of the cells has."""
    pairs = [set(combinations(_values(cell), 2)) for cell in cells]
    return [cells[number] for number in sorted(cover(pairs, set()))]


def _values(cell: Cell) -> list[tuple[str, object]]:
    names = [field.name for field in fields(cell)]
    return list(zip(names, astuple(cell), strict=True))
