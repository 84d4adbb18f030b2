"""The loops over a flat gradient in plain PyTorch: the specification of every faster version.

A gradient is read once, in chunks that stay in the cache. That pass leaves the largest magnitude of every row of 64
entries behind, and selection then looks only into rows that can hold a large entry: at 0.1 % density one in sixteen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsync.kernels.memory import Memory

ROW = 64
CHUNK = 1 << 19  # entries; 2 MB of fp32 stay in the cache
LONG = 1 << 26  # the same where launching a kernel costs more than reading memory again
TINY = 1e-30  # a threshold below may round to 0, which every entry reaches
SAMPLE = 4096  # a threshold is estimated from at least this many entries

Run = tuple[int, int]
# (values, segment of each, number of segments) -> the values as they travel
Rounding = Callable[[Tensor, Tensor, int], Tensor]


@dataclass
class Rows:
    """The rows of a swept region: where each starts and stops in the flat gradient, and its largest magnitude."""

    start: Tensor
    stop: Tensor
    peak: Tensor


def sweep(grad: Tensor, memory: Memory, runs: Sequence[Run], scale: float = 1.0) -> tuple[Rows, int]:
    """Add ``scale * grad``, or the velocity it makes, to the residual over ``runs``. Where that is not finite, residual
    and velocity stay as they were.

    Returns the rows, and the index of the first entry that was not finite (or -1); ``memory.energy`` grows by the sum
    of squares of what the residual now holds.
    """
    before, after, velocity = memory.before, memory.after, memory.velocity
    rows = rows_of(memory, runs)
    first_bad, swept = -1, 0
    longest = max((b - a for a, b in _chunks(runs, grad.device)), default=0)
    sums = torch.empty(longest, dtype=after.dtype, device=after.device)
    speeds = torch.empty_like(sums) if velocity else sums
    for a, b in _chunks(runs, grad.device):
        u, speed, old = sums[: b - a], speeds[: b - a], before[a:b]
        came = grad[a:b] if scale == 1 else grad[a:b].to(u.dtype) * scale
        if velocity:
            came = torch.mul(velocity.before[a:b], velocity.beta, out=speed).add_(came)
        torch.add(old, came, out=u)
        energy = torch.dot(u, u).item()
        if not math.isfinite(energy) and (bad := ~torch.isfinite(u)).any():
            if first_bad < 0:
                first_bad = a + int(bad.nonzero()[0])
            torch.where(bad, old, u, out=u)
            if velocity:
                torch.where(bad, velocity.before[a:b], speed, out=speed)
            energy = torch.dot(u, u).item()
        memory.energy += energy
        after[a:b].copy_(u)
        if velocity:
            velocity.after[a:b].copy_(speed)
        swept += _row_peaks(u.abs_(), rows.peak[swept:])
    return rows, first_bad


def sweep_flat(grad: Tensor, memory: Memory, mine: Tensor | None) -> Tensor:
    """As ``sweep`` of all the gradient, or of what is ``mine``, without rows or energy: nothing waits for the host."""
    before, after, velocity = memory.before, memory.after, memory.velocity
    none = torch.iinfo(torch.int64).max
    first = torch.full((), none, device=grad.device)
    for a, b in _chunks([(0, grad.numel())], grad.device):
        came, old = grad[a:b], before[a:b]
        speed = torch.mul(velocity.before[a:b], velocity.beta).add_(came) if velocity else came
        u = old + speed
        good = torch.isfinite(u)
        bad = ~good
        if mine is not None:
            good &= mine[a:b]
            bad &= mine[a:b]
        first = torch.minimum(first, torch.where(bad.any(), bad.view(torch.uint8).argmax() + a, none))
        torch.where(good, u, old, out=after[a:b])
        if velocity:
            torch.where(good, speed, velocity.before[a:b], out=velocity.after[a:b])
    return torch.where(first == none, -1, first)


def rows_of(memory: Memory, runs: Sequence[Run]) -> Rows:
    """The rows of ``runs``, their peaks still to be written; the next sweep of the same runs uses them again.

    A chunk holds whole rows, so both are cut alike.
    """
    known = memory.workspace.setdefault("rows", {})
    key, of = runs[0][0] if runs else -1, (tuple(runs), memory.after.dtype, memory.after.device)
    if key not in known or known[key][0] != of:
        known[key] = of, _cut(runs, memory.after)
    rows: Rows = known[key][1]
    return rows


def _cut(runs: Sequence[Run], after: Tensor) -> Rows:
    starts = [torch.arange(start, stop, ROW, device=after.device) for start, stop in runs or [(0, 0)]]
    stops = [(start + ROW).clamp_(max=stop) for start, (_, stop) in zip(starts, runs or [(0, 0)], strict=True)]
    start, stop = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (starts, stops))
    return Rows(start, stop, torch.empty(start.numel(), dtype=after.dtype, device=after.device))


def _chunks(runs: Sequence[Run], device: torch.device) -> Iterator[Run]:
    size = CHUNK if device.type == "cpu" else LONG
    for start, stop in runs:
        for a in range(start, stop, size):
            yield a, min(a + size, stop)


def clip_scale(grad: Tensor, runs: Sequence[Run], clip: float | None) -> float:
    """What to multiply ``grad`` by so that its norm over ``runs``, entries that are not finite left out, is at most
    ``clip``."""
    if clip is None:
        return 1.0
    parts = [torch.linalg.vector_norm(grad[a:b], dtype=torch.float64).item() for a, b in _chunks(runs, grad.device)]
    if not all(map(math.isfinite, parts)):
        finite = (grad[a:b].double().nan_to_num(0.0, 0.0, 0.0) for a, b in _chunks(runs, grad.device))
        parts = [torch.linalg.vector_norm(part).item() for part in finite]
    norm = math.hypot(*parts)
    return clip / norm if norm > clip else 1.0


def _row_peaks(size: Tensor, out: Tensor) -> int:
    """Write the largest of every row of ``size`` (the last may be short) to ``out``; how many these are."""
    whole = size.numel() // ROW
    if whole:
        torch.amax(size[: whole * ROW].view(-1, ROW), 1, out=out[:whole])
    if whole * ROW == size.numel():
        return whole
    torch.amax(size[whole * ROW :], 0, out=out[whole])
    return whole + 1


def above(u: Tensor, rows: Rows, threshold: float) -> Tensor:
    """Ascending indices of the non-zero entries of ``u`` with magnitude ``threshold`` or more, within ``rows``."""
    hot = reach(rows.peak, threshold)
    width = min(ROW, u.numel())
    windows = u.unfold(0, width, 1) if width else u.view(0, 1)
    found = []
    for block in torch.split(hot, (CHUNK if u.device.type == "cpu" else LONG) // ROW):
        start, stop = rows.start[block], rows.stop[block]
        first = start.clamp(max=u.numel() - width)  # where a short row is read from, to stay within ``u``
        size = windows.index_select(0, first).abs_().view(-1)
        place = reach(size, threshold)
        if threshold < TINY:
            place = place[size[place] != 0]
        row = place // width
        index = first[row].add_(place % width)
        if bool((stop - start < ROW).any()):
            index = index[(index >= start[row]) & (index < stop[row])]
        found.append(index)
    return torch.cat(found) if found else hot


def reach(size: Tensor, threshold: float) -> Tensor:
    """Ascending positions of what is ``threshold`` or more. On the CPU by numpy: several times as fast, and no threads
    that wait for each other over so little."""
    if size.device.type != "cpu":
        return (size >= threshold).nonzero().squeeze(1)
    bound = torch.tensor(threshold, dtype=size.dtype).numpy()
    return torch.from_numpy(np.flatnonzero(size.numpy() >= bound))


def largest(u: Tensor, rows: Rows, k: int) -> Tensor:
    """Ascending indices of the ``k`` largest non-zero magnitudes within ``rows``; of equals, the lower index wins.

    The k-th largest row peak is never above the k-th largest magnitude: ``k`` rows hold an entry that large. So the
    entries above it are few and are all that has to be looked at.
    """
    threshold = torch.topk(rows.peak, k, sorted=False).values.min().item() if k <= rows.peak.numel() else 0.0
    found = above(u, rows, threshold)
    if found.numel() <= k:
        return found
    size = u.index_select(0, found).abs_()
    kth = torch.topk(size, k, sorted=False).values.min()
    keep = size > kth
    ties = (size == kth).nonzero().squeeze(1)
    keep[ties[: k - int(keep.sum())]] = True
    return found[keep]


def sampled_threshold(u: Tensor, runs: Sequence[Run], k: int) -> float:
    """A magnitude that about ``k`` entries of ``runs`` reach, from an evenly spaced sample of them."""
    numel = sum(stop - start for start, stop in runs)
    if numel == 0:
        return 0.0
    stride = max(1, min(numel // SAMPLE, 128)) | 1  # odd, so that it does not march in step with the rows of a matrix
    sample = torch.cat([u[start:stop:stride] for start, stop in runs]).abs()
    wanted = min(sample.numel(), max(1, round(k * sample.numel() / numel)))
    return torch.topk(sample, wanted).values[-1].item()


def limit(found: Tensor, capacity: int, step: int) -> Tensor:
    """At most ``capacity`` of the indices ``found``, in order; where the choice starts rotates with the step."""
    if found.numel() <= capacity:
        return found
    start = int(step * 0.6180339887498949 % 1 * found.numel())  # golden ratio: even from the first few steps on
    return found.roll(-start)[:capacity].sort().values


def take(
    after: Tensor,
    indices: Tensor,
    segments: Tensor,
    parts: int,
    rounding: Rounding | None,
    sleepers: Sequence[Run] = (),
) -> Tensor:
    """Take the entries at ``indices`` out of the residual ``after``; return their values as they travel.

    ``values + after[indices]`` is bit for bit what stood there: the residual keeps what ``rounding`` cut off. An entry
    that could not be put together again exactly stays where it is, and so do all within ``sleepers``: their value is 0.
    """
    values = after.index_select(0, indices)  # on a CPU faster than after[indices], by half
    sent = values if rounding is None else rounding(values, segments, parts)
    rest = values - sent
    stays = (rest + sent != values) | (values - rest != sent)
    for start, stop in sleepers:
        stays |= (indices >= start) & (indices < stop)
    sent = torch.where(stays, 0, sent)
    after.index_copy_(0, indices, values - sent)
    return sent
