"""How a flat gradient is cut for the kernels, and the tables that tell them.

Every segment is cut into strips, one a program. What kernels find goes to lists, and a segment's list is cut into
regions. A table is a flat int64 tensor; its rows are described here, once for those who fill and those who read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Run = tuple[int, int]

BLOCK = 1024  # entries that a program reads at once
SMALL = 1 << 22  # a smaller gradient needs many programs instead of long strips
ALIGNED = 128  # entries: strips start at a multiple, so that loads are wide


class Strip(NamedTuple):
    """Entries of one segment, from ``low`` to ``high``; ``start`` is the aligned place at or before the first."""

    start: int
    low: int
    high: int
    segment: int


class SegmentRow(NamedTuple):
    """A segment, its strips and regions, and its sample; each begins at a number among those of all segments."""

    k: int
    capacity: int
    first_region: int
    regions: int
    room: int  # entries of a region
    first_entry: int  # of its list
    numel: int = 0
    first_strip: int = 0
    strips: int = 0
    first_sample: int = 0
    samples: int = 0

    @property
    def end(self) -> int:
        """Where the list of the next segment begins."""
        return self.first_entry + self.regions * self.room


class ChoiceRow(NamedTuple):
    """What was decided about a segment's candidates."""

    candidates: int
    edge: int  # the bin of the histogram from which on they go
    bound: int  # the bits of the least magnitude that goes
    number: int  # how many these are


class RangeRow(NamedTuple):
    """Where the limit of what a segment sends is looked for: among keys from ``low`` to ``low + 2**width``."""

    low: int
    width: int  # -1: ``low`` is the limit
    wanted: int  # how many of the range are sent, together with all above it
    origin: int  # whether candidates or the residual are searched
    number: int  # how many are sent in all


class SampleRow(NamedTuple):
    """The random sample of a segment that a threshold is estimated from."""

    seed: int  # the part of its key that no step changes
    first_run: int
    runs: int
    least: int  # entries that must reach the threshold


# The carried threshold of a segment, as a checkpoint knows it: its bits, the k it was made for, candidates to expect.
STATE = ("floor", "k", "left", "inflow")


class Strips:
    """The strips of some groups of runs, those of a group next to each other.

    Args:
        groups: a segment each.
        blocks: how many blocks a strip has.
    """

    def __init__(self, groups: Iterable[Sequence[Run]], blocks: int) -> None:
        self.rows: list[Strip] = []
        self.groups: list[tuple[int, int]] = []  # of each, its first strip and how many it has
        size = BLOCK * blocks
        for number, runs in enumerate(groups):
            first = len(self.rows)
            for low, high in runs:
                for at in range(low // ALIGNED * ALIGNED, high, size):
                    self.rows.append(Strip(at, max(at, low), min(at + size, high), number))
            self.groups.append((first, len(self.rows) - first))


def blocks_for(numel: int, most: int) -> int:
    """Return how many blocks a strip of a gradient of ``numel`` entries has."""
    return 1 if numel < SMALL else most


def table(rows: Sequence[object], device: torch.device) -> Tensor:
    """Return rows of integers as kernels read them."""
    return torch.tensor(rows, dtype=torch.int64, device=device).flatten()


class ChangingTable:
    """A table on the device whose rows change now and then: they are sent when they do, and nothing waits for it.

    Args:
        rows, fields: how many there are.
    """

    def __init__(self, rows: int, fields: int, device: torch.device) -> None:
        self.values = torch.zeros(rows * fields, dtype=torch.int64, device=device)
        self._known: Sequence[Sequence[int]] = ()

    def update(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return the table, holding ``rows``."""
        if rows != self._known:
            here = torch.tensor(rows, dtype=torch.int64, device="cpu").flatten()
            self.values.copy_(here.pin_memory() if self.values.is_cuda else here, non_blocking=True)
            self._known = rows
        return self.values
