"""Add a gradient to the residual, or take entries out of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparsync.kernels.accumulate import reference
from sparsync.kernels.accumulate.reference import Rounding, Rows, Run, accumulate_flat, take
from sparsync.kernels.memory import Memory
from sparsync.kernels.path import KernelPath


def accumulate(
    grad: Tensor,
    memory: Memory,
    runs: Sequence[Run],
    scale: float = 1.0,
    path: KernelPath = KernelPath.PYTORCH,
    low: int = 0,
) -> tuple[Rows, int]:
    """Do as ``reference.accumulate``, by ``path``.

    Args:
        low: bits of a magnitude: entries that reach it may be collected meanwhile; 0: none need be.
    """
    if path is KernelPath.NUMBA:
        from sparsync.kernels.accumulate import cpu

        return cpu.accumulate(grad, memory, runs, scale, low)
    return reference.accumulate(grad, memory, runs, scale)


__all__ = ["Rounding", "Rows", "Run", "accumulate", "accumulate_flat", "take"]
