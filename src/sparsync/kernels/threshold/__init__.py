"""Find about the k largest entries with a threshold that is carried over from step to step."""

from __future__ import annotations

from torch import Tensor

from sparsync.kernels.path import KernelPath
from sparsync.kernels.threshold import reference


def histogram(u: Tensor, found: Tensor, threshold: int, path: KernelPath) -> tuple[Tensor, Tensor]:
    """Do as ``reference.histogram``, by ``path``."""
    if path is KernelPath.NUMBA:
        from sparsync.kernels.threshold import cpu

        return cpu.histogram(u, found, threshold)
    return reference.histogram(u, found, threshold)


__all__ = ["histogram"]
