"""Gaussian-k in plain PyTorch: the specification of the kernels.

From "Understanding Top-k Sparsification in Distributed Deep Learning" (Shi et al.), Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt
from statistics import NormalDist

import torch
from torch import Tensor

from sparsync.kernels.accumulate import Rows
from sparsync.kernels.topk import above

MASKS = 4  # so the threshold is adjusted three times at most
CHUNK = 1 << 16  # entries; their float64 copy stays in the cache
CARRIED = "carried"
# Where a held threshold is looked for first, as factors of the carried one; and then, as shares of the interval found,
# so many times.
LADDER = (0.4, 0.8, 0.9, 0.97, 1.03, 1.1, 1.25, 2.5)
STEPS, ROUNDS = tuple(step / 7 for step in range(8)), 3
MOST = 16.0  # the carried factor, or its inverse
FLAT = 2.0**-44  # a variance below this share of the mean square is the rounding of sums


def search(
    u: Tensor, rows: Rows, runs: Sequence[tuple[int, int]], k: int, two_sided: bool, masks: int = MASKS
) -> tuple[Tensor, list[int]]:
    """Do the paper's loop: return ascending indices of the last mask, whatever its count, and the count of every mask.

    Args:
        two_sided: take the quantile 1 - k/(2d), as magnitudes ask for, instead of the printed 1 - k/d.
        masks: how many are made at most.
    """
    threshold = _fitted(u, runs, k, two_sided)
    found = _beyond(u, rows, threshold)
    counts = [found.numel()]
    while len(counts) < masks and not 2 * k / 3 <= counts[-1] <= 4 * k / 3:
        threshold *= 0.5 if counts[-1] < 2 * k / 3 else 1.5
        found = _beyond(u, rows, threshold)
        counts.append(found.numel())
    return found, counts


def hold(
    u: Tensor, rows: Rows, runs: Sequence[tuple[int, int]], k: int, two_sided: bool, factor: float, most: int
) -> tuple[Tensor, float]:
    """Look for a threshold that about ``k`` entries lie above, near the fitted one times ``factor``: count at a ladder
    of six, and then, three times, at six between the two of these that k is between. Return ascending indices of what
    lies above it, however many, and the factor that the next step begins from.

    Where more entries are equal than there is room for, none of them lies above it, as long as two thirds of k do.

    Args:
        factor: of the step before; 1 at first.
        most: entries that may be sent.
    """
    fitted = _fitted(u, runs, k, two_sided)
    ends = [fitted * factor * rung for rung in LADDER]
    counts, at = _rungs(u, rows, ends, k)
    for _ in range(ROUNDS):
        low, high = ends[at], ends[at + 1]
        ends = [low + (high - low) * step for step in STEPS]
        counts, at = _rungs(u, rows, ends, k)
    low, high = ends[at], ends[at + 1]
    if at > 0 and counts[at - 1] <= most:
        threshold = low
    elif at < len(counts) and 3 * counts[at] >= 2 * k:
        threshold = high
    else:
        inside = 0 < at < len(counts)
        share = (counts[at - 1] - k) / (counts[at - 1] - counts[at]) if inside else 0.5
        threshold = low + (high - low) * share
    return _beyond(u, rows, threshold), min(max(threshold / fitted, 1 / MOST), MOST) if fitted > 0 else factor


def enough(count: int, k: int, carried: bool) -> bool:
    """Return whether a mask is not too short to go: 0.9 k; of a threshold that is carried on, what the paper's loop
    accepts, as of many equal entries it takes all or none."""
    return 3 * count >= 2 * k if carried else 10 * count >= 9 * k


def _fitted(u: Tensor, runs: Sequence[tuple[int, int]], k: int, two_sided: bool) -> float:
    """Return the quantile of the normal distribution that has the mean and deviation of ``runs``."""
    numel, mean, deviation = _moments(u, runs)
    tail = k / (2 * numel) if two_sided else k / numel
    return mean + deviation * NormalDist().inv_cdf(1 - tail)


def _rungs(u: Tensor, rows: Rows, ends: Sequence[float], k: int) -> tuple[list[int], int]:
    """Return how many magnitudes lie above each threshold but the first and the last, and how many of these let k
    through; thresholds ascend."""
    inner = ends[1:-1]
    size = u.index_select(0, _beyond(u, rows, inner[0])).abs_()
    counts = [int((size > bound).sum()) for bound in torch.tensor(inner, dtype=u.dtype, device=u.device)]
    return counts, sum(count >= k for count in counts)


def _moments(u: Tensor, runs: Sequence[tuple[int, int]]) -> tuple[int, float, float]:
    """Return number, mean and standard deviation of the entries of ``runs``."""
    sums = torch.stack([_sums(u[start:stop]) for start, stop in runs])
    total, energy = sums.sum(0).tolist()
    numel = sum(stop - start for start, stop in runs)
    mean, energy = total / numel, energy / numel
    variance = energy - mean * mean
    return numel, mean, sqrt(variance) if variance > FLAT * energy else 0.0


def _sums(u: Tensor) -> Tensor:
    """Return the sums of entries and of their squares, in float64."""
    if u.device.type != "cpu":  # converts as it reads
        norm = torch.linalg.vector_norm(u, dtype=torch.float64)
        return torch.stack([u.sum(dtype=torch.float64), norm * norm])
    chunks = (chunk.double() for chunk in torch.split(u, CHUNK))
    return torch.stack([torch.stack([x.sum(), torch.dot(x, x)]) for x in chunks]).sum(0)


def _beyond(u: Tensor, rows: Rows, threshold: float) -> Tensor:
    """Return indices of magnitudes above ``threshold``, not at it: what reaches the next number that ``u`` can hold."""
    bound = torch.tensor(threshold, dtype=u.dtype, device="cpu")
    return above(u, rows, torch.nextafter(bound, torch.tensor(inf, dtype=u.dtype, device="cpu")).item())
