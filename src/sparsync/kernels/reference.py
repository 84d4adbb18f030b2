"""The loops over a flat gradient in plain PyTorch: the specification of every faster version.

A gradient is read once, in chunks that stay in the cache. That pass leaves the largest magnitude of every row of 64
entries behind, and selection then looks only into rows that can hold a large entry: at 0.1 % density one in sixteen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.kernels.memory import Memory

ROW = 64
CHUNK = 1 << 18  # entries; 1 MB of fp32 stays in the cache of one core
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
    starts, stops, peaks = [], [], []
    first_bad = -1
    sums = torch.empty(CHUNK, dtype=after.dtype, device=after.device)
    sizes, speeds = torch.empty_like(sums), torch.empty_like(sums) if velocity else sums
    for a, b in _chunks(runs):
        u, size, speed = sums[: b - a], sizes[: b - a], speeds[: b - a]
        came = grad[a:b] if scale == 1 else grad[a:b].to(u.dtype) * scale
        if velocity:
            came = torch.mul(velocity.before[a:b], velocity.beta, out=speed).add_(came)
        torch.add(before[a:b], came, out=u)
        peak = _row_peaks(u, size)
        if not math.isfinite(peak.max().item()):
            bad = ~torch.isfinite(u)
            if first_bad < 0:
                first_bad = a + int(bad.nonzero()[0])
            torch.where(bad, before[a:b], u, out=u)
            if velocity:
                torch.where(bad, velocity.before[a:b], speed, out=speed)
            peak = _row_peaks(u, size)
        after[a:b].copy_(u)
        if velocity:
            velocity.after[a:b].copy_(speed)
        memory.energy += torch.dot(u, u).item()
        start = torch.arange(a, b, ROW, device=grad.device)
        starts.append(start)
        stops.append((start + ROW).clamp_(max=b))
        peaks.append(peak)
    if not peaks:
        none = torch.empty(0, dtype=torch.int64, device=grad.device)
        return Rows(none, none, after.new_empty(0)), first_bad
    return Rows(torch.cat(starts), torch.cat(stops), torch.cat(peaks)), first_bad


def _chunks(runs: Sequence[Run]) -> Iterator[Run]:
    for start, stop in runs:
        for a in range(start, stop, CHUNK):
            yield a, min(a + CHUNK, stop)


def clip_scale(grad: Tensor, runs: Sequence[Run], clip: float | None) -> float:
    """What to multiply ``grad`` by so that its norm over ``runs``, entries that are not finite left out, is at most
    ``clip``."""
    if clip is None:
        return 1.0
    parts = [torch.linalg.vector_norm(grad[a:b], dtype=torch.float64).item() for a, b in _chunks(runs)]
    if not all(map(math.isfinite, parts)):
        finite = (grad[a:b].double().nan_to_num(0.0, 0.0, 0.0) for a, b in _chunks(runs))
        parts = [torch.linalg.vector_norm(part).item() for part in finite]
    norm = math.hypot(*parts)
    return clip / norm if norm > clip else 1.0


def _row_peaks(u: Tensor, size: Tensor) -> Tensor:
    """Largest magnitude of every row of ``u`` (the last may be short); NaN wins. ``size`` is scratch."""
    torch.abs(u, out=size)
    whole = u.numel() // ROW * ROW
    peaks = size[:whole].view(-1, ROW).amax(1)
    return peaks if whole == u.numel() else torch.cat([peaks, size[whole:].amax().view(1)])


def above(u: Tensor, rows: Rows, threshold: float) -> Tensor:
    """Ascending indices of the non-zero entries of ``u`` with magnitude ``threshold`` or more, within ``rows``."""
    hot = (rows.peak >= threshold).nonzero().squeeze(1)
    lane = torch.arange(ROW, device=u.device)
    found = []
    for block in torch.split(hot, CHUNK // ROW):
        index = rows.start[block].unsqueeze(1) + lane
        inside = index < rows.stop[block].unsqueeze(1)
        value = u[index.clamp(max=u.numel() - 1)]
        found.append(index[inside & (value.abs() >= threshold) & (value != 0)])
    return torch.cat(found) if found else hot


def largest(u: Tensor, rows: Rows, k: int) -> Tensor:
    """Ascending indices of the ``k`` largest non-zero magnitudes within ``rows``; of equals, the lower index wins.

    The k-th largest row peak is never above the k-th largest magnitude: ``k`` rows hold an entry that large. So the
    entries above it are few and are all that has to be looked at.
    """
    threshold = torch.topk(rows.peak, k).values[-1].item() if k <= rows.peak.numel() else 0.0
    found = above(u, rows, threshold)
    if found.numel() <= k:
        return found
    size = u[found].abs()
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
    after: Tensor, indices: Tensor, segments: Tensor, parts: int, rounding: Rounding | None
) -> tuple[Tensor, Tensor]:
    """Take the entries at ``indices`` out of the residual ``after``; return ``(indices, values)`` as they travel.

    ``values + after[indices]`` is bit for bit what stood there: the residual keeps what ``rounding`` cut off, and an
    entry that could not be put together again exactly, or that rounds to zero, stays where it is.
    """
    values = after[indices]
    sent = values if rounding is None else rounding(values, segments, parts)
    rest = values - sent
    exact = (sent != 0) & _exact(values, sent, rest)
    if not exact.all():
        indices, sent, rest = indices[exact], sent[exact], rest[exact]
    after[indices] = rest
    return indices, sent


def _exact(values: Tensor, sent: Tensor, rest: Tensor) -> Tensor:
    """Whether ``values`` is ``sent + rest`` without any rounding."""
    return (rest + sent == values) & (values - rest == sent)


def take_all(
    after: Tensor, indices: Tensor, segments: Tensor, parts: int, rounding: Rounding | None, sleepers: Sequence[Run]
) -> Tensor:
    """As ``take``, but every entry travels: 0 for what stays where it is, and for all within ``sleepers``."""
    values = after[indices]
    sent = values if rounding is None else rounding(values, segments, parts)
    stays = ~_exact(values, sent, values - sent)
    for start, stop in sleepers:
        stays |= (indices >= start) & (indices < stop)
    sent = torch.where(stays, 0, sent)
    after[indices] = values - sent
    return sent
