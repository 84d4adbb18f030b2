"""Sketch a gradient: signed sums of the rows and columns of its matrices, few numbers that tell how large they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync.kernels.path import UNLIMITED, KernelPath, choose_path
from sparsync.kernels.sketch import reference
from sparsync.kernels.sketch.reference import Sketched, draw_signs
from sparsync.workspace import Workspace


def sketch(grad: Tensor, tensors: Sequence[Sketched], signs: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Do as ``reference.sketch``, by what is fastest for this gradient; sums may be rounded in another order.

    Args:
        workspace: of the gradient's layout; keeps the buffers.
    """
    if out.dtype == torch.float32 and choose_path(grad, None, UNLIMITED) is KernelPath.TRITON:
        from sparsync.kernels.sketch import launch

        launch.sketch(grad, tensors, signs, out, workspace)
    else:
        reference.sketch(grad, tensors, signs, out)


__all__ = ["Sketched", "draw_signs", "sketch"]
