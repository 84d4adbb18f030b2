"""Find the largest entries: those above a threshold, or exactly k."""

from __future__ import annotations

from torch import Tensor

from sparsync.kernels.accumulate import Rows
from sparsync.kernels.path import KernelPath
from sparsync.kernels.topk import reference
from sparsync.kernels.topk.reference import limit, reach


def above(u: Tensor, rows: Rows, threshold: float) -> Tensor:
    """Do as ``reference.above``, by the path that made ``rows``."""
    if rows.path is KernelPath.NUMBA:
        from sparsync.kernels.topk import cpu

        return cpu.above(u, rows, threshold)
    return reference.above(u, rows, threshold)


def largest(u: Tensor, rows: Rows, k: int) -> Tensor:
    """Do as ``reference.largest``, by the path that made ``rows``."""
    if rows.path is KernelPath.NUMBA:
        from sparsync.kernels.topk import cpu

        return cpu.largest(u, rows, k)
    return reference.largest(u, rows, k)


__all__ = ["above", "largest", "limit", "reach"]
