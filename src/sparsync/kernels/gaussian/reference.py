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
FLAT = 2.0**-44  # a variance below this share of the mean square is the rounding of sums


def search(u: Tensor, rows: Rows, runs: Sequence[tuple[int, int]], k: int, two_sided: bool) -> tuple[Tensor, list[int]]:
    """Do the paper's loop: return ascending indices of the last mask, whatever its count, and the count of every mask.

    Args:
        two_sided: take the quantile 1 - k/(2d), as magnitudes ask for, instead of the printed 1 - k/d.
    """
    numel, mean, deviation = _moments(u, runs)
    tail = k / (2 * numel) if two_sided else k / numel
    threshold = mean + deviation * NormalDist().inv_cdf(1 - tail)
    found = _beyond(u, rows, threshold)
    counts = [found.numel()]
    while len(counts) < MASKS and not 2 * k / 3 <= counts[-1] <= 4 * k / 3:
        threshold *= 0.5 if counts[-1] < 2 * k / 3 else 1.5
        found = _beyond(u, rows, threshold)
        counts.append(found.numel())
    return found, counts


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
    bound = torch.tensor(threshold, dtype=u.dtype)
    return above(u, rows, torch.nextafter(bound, torch.tensor(inf, dtype=u.dtype)).item())
