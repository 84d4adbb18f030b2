"""Random entries of every segment, all drawn at once: the same on every device, and nothing waits for the host.

A segment's entries begin at a random place and follow each other, wrapping round: a block. To scatter it, the segment
is seen as a grid, filled row by row and about as high as wide. Every column is turned round by a random amount of its
own, then every row, a few times over. A turn maps the segment onto itself one to one, whatever the length of a last row
that is not full: so entries stay distinct and within the segment, and nothing ever has to be drawn again. The random
start makes each entry equally likely, all but exactly; the turns make it so for pairs, and for more at a time.
"""

from __future__ import annotations

import zlib
from itertools import accumulate
from math import isqrt

import torch
from torch import Tensor

from sparsync.kernels.rng import MASK_32, STRIDE, scramble
from sparsync.layout import Layout, run_table
from sparsync.workspace import Workspace

TURNS = 4  # of all columns and all rows: with these, draws of a few out of a few are as even as larger ones


def random_indices_of(
    layout: Layout, unused: frozenset[str], scattered: bool, device: torch.device, workspace: Workspace
) -> RandomIndices:
    """Return the tables for this layout, kept in ``workspace``; they are made anew when another parameter is unused."""
    made_for = (id(layout), unused, scattered, device)
    return workspace.get(RandomIndices, made_for, lambda: RandomIndices(layout, unused, scattered, device))


class RandomIndices:
    """Tables to draw ``k`` entries of every segment, or all that are used if these are fewer.

    Args:
        unused: parameters that nothing is drawn from.
        scattered: entries are distinct and anywhere; otherwise they are neighbours.
    """

    def __init__(self, layout: Layout, unused: frozenset[str], scattered: bool, device: torch.device) -> None:
        self.layout, self.scattered, self.device = layout, scattered, device
        groups = [segment.runs(unused) for segment in layout.segments]
        sizes = [sum(stop - start for start, stop in runs) for runs in groups]
        counts = [min(segment.k, size) for segment, size in zip(layout.segments, sizes, strict=True)]
        widths = [isqrt(size - 1) + 1 if size else 1 for size in sizes]
        heights = [-(-size // width) for size, width in zip(sizes, widths, strict=True)]
        lines = [height + width if scattered else 0 for height, width in zip(heights, widths, strict=True)]
        salts = [
            _salts(segment.name, 2 + TURNS * many) for segment, many in zip(layout.segments, lines, strict=True)
        ] or [torch.zeros(2, dtype=torch.int64, device="cpu")]
        begins = _starts(lines)
        columns = [begin + height for begin, height in zip(begins, heights, strict=True)]
        table = [[max(1, size) for size in sizes], counts, _starts(counts), _starts(sizes), widths, begins, columns]
        # Of every segment: its size, how many are drawn, how many of others before those, how many positions before
        # its own, the width of its grid, and the numbers of its first row and column among all lines.
        rows = torch.tensor(table, dtype=torch.int64, device=device)
        self.size, self.counts, self.first, self.before, self.width, self.rows, self.columns = rows
        self.count, self.numbers = sum(counts), torch.arange(len(sizes), dtype=torch.int64, device=device)
        runs = [run for group in groups for run in group]
        starts, ends, lengths = run_table(runs, device)
        self.shift = starts - (ends - lengths)  # from positions along all runs to the flat gradient
        self.ends = None if all(len(group) == 1 for group in groups) else ends
        self.start_salts = torch.stack([own[:2] for own in salts], 1).to(device)
        self.salts = torch.cat([own[2:].view(TURNS, -1) for own in salts], 1).to(device)
        grids = [_lengths(*grid) for grid in zip(sizes, widths, heights, strict=True)] if scattered else []
        self.length = torch.cat([torch.zeros(0, dtype=torch.int64, device="cpu"), *grids]).to(device)

    def draw(self, key: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return flat indices, segment by segment, and the number of the segment of each.

        Args:
            key: 32 bits that say what is drawn: a number, or a 0-d int64 tensor on the device.
        """
        high, low = scramble(self.start_salts ^ key)
        start = (high << 30 | low >> 2) % self.size
        owner = torch.repeat_interleave(self.numbers, self.counts, output_size=self.count)
        place = torch.arange(self.count, dtype=torch.int64, device=self.device)
        place.add_((start - self.first).index_select(0, owner))
        place.remainder_(self.size.index_select(0, owner))
        if self.scattered:
            place = self._scatter(place, owner, key)
        place.add_(self.before.index_select(0, owner))
        run = owner if self.ends is None else torch.bucketize(place, self.ends, right=True)
        return place.add_(self.shift.index_select(0, run)), owner

    def _scatter(self, place: Tensor, owner: Tensor, key: int | Tensor) -> Tensor:
        """Return other positions in the same segments, one to one."""
        width, rows, columns = (t.index_select(0, owner) for t in (self.width, self.rows, self.columns))
        row: Tensor = place // width
        column = place.sub_(row * width)
        for shift in scramble(self.salts ^ key).mul_(self.length) >> 32:  # each below its line's length
            line = column + columns
            row.add_(shift.index_select(0, line)).remainder_(self.length.index_select(0, line))
            line = torch.add(row, rows, out=line)
            column.add_(shift.index_select(0, line)).remainder_(self.length.index_select(0, line))
        return row.mul_(width).add_(column)


def _salts(name: str, many: int) -> Tensor:
    """Return words that tell a segment's draws apart from each other and from those of other segments."""
    base = zlib.crc32(name.encode())
    one = scramble((torch.arange(many, dtype=torch.int64, device="cpu") * STRIDE + base) & MASK_32)
    return scramble((one + base + 1) & MASK_32)


def _lengths(size: int, width: int, height: int) -> Tensor:
    """Return how many positions every row of a grid has, then every column."""
    rows = torch.full((height,), width, dtype=torch.int64, device="cpu")
    rows[-1:] = last = size - (height - 1) * width
    return torch.cat([rows, height - (torch.arange(width, dtype=torch.int64, device="cpu") >= last).long()])


def _starts(sizes: list[int]) -> list[int]:
    """Return where each begins, one after another."""
    return list(accumulate(sizes, initial=0))[:-1]
