"""Count candidates in a histogram by a loop that numba compiles."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsync.kernels.cpu import array, bits, compiled
from sparsync.kernels.threshold.reference import (
    BINS,
    FINE,
    MIDDLE,
    MIDDLE_BITS,
    MIDDLE_FROM,
    WIDE,
    WIDE_BITS,
    WIDE_FROM,
    from_above,
)

MAGNITUDE = np.int32(0x7FFFFFFF)  # every bit but the sign
# Of each kind of bin: how far above the threshold it begins, bits within a bin, its first bin.
EDGES = np.array([(0, FINE, 0), (MIDDLE_BITS, MIDDLE, MIDDLE_FROM), (WIDE_BITS, WIDE, WIDE_FROM)])


@compiled("void(int32[::1], int64[::1], int64, int64[:, ::1], int32[::1], int64[::1])")
def _fill(u, found, threshold, edges, bins, counts):
    """Write the bin of each entry at ``found``, and how many lie in each; ``edges`` says how bins are cut."""
    for i in range(found.shape[0]):  # apart from counting, which would make every read wait for the one before
        bins[i] = u[found[i]] & MAGNITUDE
    for i in range(found.shape[0]):
        up = bins[i] - threshold
        kind = (up >= edges[1, 0]) + (up >= edges[2, 0])
        bin = min(edges[kind, 2] + (up - edges[kind, 0] >> edges[kind, 1]), counts.shape[0] - 1)
        bins[i] = bin
        counts[bin] += 1


def histogram(u: Tensor, found: Tensor, threshold: int) -> tuple[Tensor, Tensor]:
    """Do as ``reference.histogram``."""
    bins_of, counts = torch.empty(found.numel(), dtype=torch.int32), torch.zeros(BINS, dtype=torch.int64)
    _fill(bits(u), array(found), threshold, EDGES, array(bins_of), array(counts))
    return bins_of, from_above(counts)
