"""Find about the k largest entries with a threshold that is carried over from step to step."""

from __future__ import annotations

from torch import Tensor

from sparsync.kernels.accumulate import Rows
from sparsync.kernels.path import KernelPath
from sparsync.kernels.threshold.reference import Candidates


def candidates(u: Tensor, rows: Rows, threshold: int) -> Candidates:
    """Return ``reference.Candidates``, found by the path that made ``rows``."""
    if rows.path is KernelPath.NUMBA:
        from sparsync.kernels.threshold.cpu import CompiledCandidates

        return CompiledCandidates(u, rows, threshold)
    return Candidates(u, rows, threshold)


__all__ = ["Candidates", "candidates"]
