"""Make the update that a gradient asks for: velocity over the square root of the second moment, times the rate."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparsync.kernels.memory import Memory
from sparsync.kernels.path import UNLIMITED, KernelPath, choose_path
from sparsync.kernels.precondition import reference
from sparsync.kernels.precondition.reference import Tables
from sparsync.kernels.sketch import Sketched
from sparsync.workspace import Workspace


def precondition(
    grad: Tensor,
    before: Tensor,
    after: Tensor,
    tensors: Sequence[Sketched],
    tables: Tables,
    out: Tensor,
    workspace: Workspace,
) -> None:
    """Do as ``reference.precondition``, by what is fastest for this gradient.

    Args:
        workspace: of the gradient's layout; keeps the buffers.
    """
    path = choose_path(grad, Memory(before, after, workspace=workspace), UNLIMITED)
    if path is KernelPath.TRITON:
        from sparsync.kernels.precondition import launch

        launch.precondition(grad, before, after, tensors, tables, out, workspace)
    else:
        reference.precondition(grad, before, after, tensors, tables, out)


__all__ = ["Tables", "precondition"]
