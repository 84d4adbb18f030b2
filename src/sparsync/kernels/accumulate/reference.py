"""Add a gradient to the residual, in plain PyTorch: the specification of every faster version.

A gradient is read once, in chunks that stay in the cache. That pass leaves the largest magnitude of every row of 64
entries behind, and selection then looks only into rows that can hold a large entry: at 0.1 % density one in sixteen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsync.kernels.cpu import Array
from sparsync.kernels.memory import Memory
from sparsync.kernels.path import KernelPath
from sparsync.value_range import limit

ROW = 64
CHUNK = 1 << 19  # entries; 2 MB of fp32 stay in the cache
LONG = 1 << 26  # the same where launching a kernel costs more than reading memory again

Run = tuple[int, int]
# (values, segment of each, number of segments, largest magnitude) -> the values as they travel
Rounding = Callable[[Tensor, Tensor, int, float], Tensor]


@dataclass
class Collected:
    """Entries of a region whose magnitudes, as bits, are ``low`` or more (0: none are collected).

    ``parts``: where each part of the region starts, and of its entries, in ascending order, where they lie and their
    bits; ``None`` instead of a part with too many. ``picked``: the indices that were chosen among them, and what stands
    there.
    """

    low: int
    parts: list[tuple[int, Array, Array] | None] = field(default_factory=list)
    picked: tuple[Tensor, Tensor] | None = None

    def take_values(self, indices: Tensor) -> Tensor | None:
        """Return what stands at ``indices``, if these are the very ones that were picked; it is kept no longer."""
        picked, self.picked = self.picked, None
        return picked[1] if picked is not None and picked[0] is indices else None


@dataclass
class Rows:
    """The rows of a region: where each starts and stops in the flat gradient, and its largest magnitude.

    ``path`` is what made them, and what looks into them; ``collected`` what the last pass has found there already.
    """

    start: Tensor
    stop: Tensor
    peak: Tensor
    path: KernelPath = KernelPath.PYTORCH
    collected: Collected = field(default_factory=lambda: Collected(0))

    def subset(self, chosen: Tensor) -> Rows:
        """Return the rows for which ``chosen`` is true."""
        return Rows(self.start[chosen], self.stop[chosen], self.peak[chosen], self.path)


def accumulate(grad: Tensor, memory: Memory, runs: Sequence[Run], scale: float = 1.0) -> tuple[Rows, int]:
    """Add ``scale * grad``, or the velocity it makes, to the residual over ``runs``. Where that is not finite, residual
    and velocity stay as they were.

    Returns the rows, and the index of the first entry that was not finite (or -1); ``memory.energy`` grows by the sum
    of squares of what the residual now holds.
    """
    before, after, velocity = memory.before, memory.after, memory.velocity
    rows = rows_of(memory, runs, KernelPath.PYTORCH)
    first_nonfinite, done = -1, 0
    longest = max((b - a for a, b in chunks(runs, grad.device)), default=0)
    sums = torch.empty(longest, dtype=after.dtype, device=after.device)
    velocities = torch.empty_like(sums) if velocity else sums
    for a, b in chunks(runs, grad.device):
        u, new, old = sums[: b - a], velocities[: b - a], before[a:b]
        came = grad[a:b] if scale == 1 else grad[a:b].to(u.dtype) * scale
        if velocity:
            came = torch.mul(velocity.before[a:b], velocity.beta, out=new).add_(came)
        torch.add(old, came, out=u)
        energy = torch.dot(u, u).item()
        if not math.isfinite(energy) and (bad := ~torch.isfinite(u)).any():
            if first_nonfinite < 0:
                first_nonfinite = a + int(bad.nonzero()[0])
            torch.where(bad, old, u, out=u)
            if velocity:
                torch.where(bad, velocity.before[a:b], new, out=new)
            energy = torch.dot(u, u).item()
        memory.energy += energy
        after[a:b].copy_(u)
        if velocity:
            velocity.after[a:b].copy_(new)
        done += _row_peaks(u.abs_(), rows.peak[done:])
    return rows, first_nonfinite


def accumulate_flat(grad: Tensor, memory: Memory, mine: Tensor | None) -> Tensor:
    """As ``accumulate`` over all the gradient, or where ``mine`` is true, without rows or energy: nothing waits for the
    host."""
    before, after, velocity = memory.before, memory.after, memory.velocity
    none = torch.iinfo(torch.int64).max
    first = torch.full((), none, dtype=torch.int64, device=grad.device)
    for a, b in chunks([(0, grad.numel())], grad.device):
        came, old = grad[a:b], before[a:b]
        new = torch.mul(velocity.before[a:b], velocity.beta).add_(came) if velocity else came
        u = old + new
        good = torch.isfinite(u)
        bad = ~good
        if mine is not None:
            good &= mine[a:b]
            bad &= mine[a:b]
        first = torch.minimum(first, torch.where(bad.any(), bad.view(torch.uint8).argmax() + a, none))
        torch.where(good, u, old, out=after[a:b])
        if velocity:
            torch.where(good, new, velocity.before[a:b], out=velocity.after[a:b])
    return torch.where(first == none, -1, first)


class _KnownRows:
    """The rows of every region of a residual, and what they were made for, by the region's start."""

    def __init__(self) -> None:
        self.by_start: dict[int, tuple[Any, Rows]] = {}


def rows_of(memory: Memory, runs: Sequence[Run], path: KernelPath) -> Rows:
    """Return the rows of ``runs``, their peaks still to be written; the next pass over the same runs uses them again.

    A chunk holds whole rows, so both are cut alike.
    """
    known = memory.workspace.get(_KnownRows, None, _KnownRows).by_start
    start, made_for = runs[0][0] if runs else -1, (tuple(runs), memory.after.dtype, memory.after.device, path)
    if start not in known or known[start][0] != made_for:
        known[start] = made_for, _cut(runs, memory.after, path)
    return known[start][1]


def _cut(runs: Sequence[Run], after: Tensor, path: KernelPath) -> Rows:
    starts = [
        torch.arange(start, stop, ROW, dtype=torch.int64, device=after.device) for start, stop in runs or [(0, 0)]
    ]
    stops = [(start + ROW).clamp_(max=stop) for start, (_, stop) in zip(starts, runs or [(0, 0)], strict=True)]
    start, stop = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (starts, stops))
    return Rows(start, stop, torch.empty(start.numel(), dtype=after.dtype, device=after.device), path)


def chunks(runs: Sequence[Run], device: torch.device) -> Iterator[Run]:
    """Cut ``runs`` into pieces that are worked on at a time."""
    size = chunk_size(device)
    for start, stop in runs:
        for a in range(start, stop, size):
            yield a, min(a + size, stop)


def chunk_size(device: torch.device) -> int:
    """Return how many entries are worked on at a time."""
    return CHUNK if device.type == "cpu" else LONG


def _row_peaks(size: Tensor, out: Tensor) -> int:
    """Write the largest of every row of ``size`` (the last may be short) to ``out``; return how many these are."""
    whole = size.numel() // ROW
    if whole:
        torch.amax(size[: whole * ROW].view(-1, ROW), 1, out=out[:whole])
    if whole * ROW == size.numel():
        return whole
    torch.amax(size[whole * ROW :], 0, out=out[whole])
    return whole + 1


def take(
    after: Tensor,
    indices: Tensor,
    segments: Tensor,
    parts: int,
    rounding: Rounding | None,
    most: float,
    unused: Sequence[Run] = (),
) -> Tensor:
    """Take the entries at ``indices`` out of the residual ``after``; return their values as they travel.

    ``values + after[indices]`` is bit for bit what stood there: the residual keeps what ``rounding`` cut off, and what
    is beyond ``most``. An entry that could not be put together again exactly stays where it is, and so do all within
    ``unused``: their value is 0.
    """
    values = after.index_select(0, indices)  # on a CPU faster than after[indices], by half
    sent = round_values(values, segments, parts, rounding, most)
    rest = values - sent
    stays = (rest + sent != values) | (values - rest != sent)
    for start, stop in unused:
        stays |= (indices >= start) & (indices < stop)
    sent = torch.where(stays, 0, sent)
    after.index_copy_(0, indices, values - sent)
    return sent


def round_values(values: Tensor, segments: Tensor, parts: int, rounding: Rounding | None, most: float) -> Tensor:
    """Return values as they travel."""
    return limit(values, values, most) if rounding is None else rounding(values, segments, parts, most)
