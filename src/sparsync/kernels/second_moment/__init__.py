"""Take the mean gradients' sizes into second moments, and make of these what a step's updates are divided by."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparsync.kernels.device import usable_on
from sparsync.kernels.second_moment import reference
from sparsync.kernels.second_moment.reference import HYPER, MomentVectors
from sparsync.kernels.sketch import Sketched, draw_signs
from sparsync.workspace import Workspace


def begin_step(vectors: MomentVectors, seed: int, step: int) -> None:
    """Draw the step's signs, as ``draw_signs`` does, and clear the sums."""
    if usable_on(vectors.device):
        from sparsync.kernels.second_moment import launch

        launch.begin_step(vectors, seed, step)
    else:
        vectors.signs.copy_(draw_signs(vectors.signs.numel(), seed, step, vectors.device))
        vectors.sums.zero_()


def update(vectors: MomentVectors, loss_scale: float) -> None:
    """Do as ``reference.update``; sums may be rounded in another order, the same on every rank."""
    if usable_on(vectors.device):
        from sparsync.kernels.second_moment import launch

        launch.update(vectors, loss_scale)
    else:
        reference.update(vectors, loss_scale)


def write_dense(
    vectors: MomentVectors, tensors: Sequence[Sketched], out: Tensor, scale: float, shown: Tensor, workspace: Workspace
) -> Tensor:
    """Do as ``reference.write_dense``, likewise; the next call overwrites what is returned.

    Args:
        tensors: the same object from step to step.
        workspace: of these tensors; keeps the buffers.
    """
    if usable_on(vectors.device):
        from sparsync.kernels.second_moment import launch

        return launch.write_dense(vectors, tensors, out, scale, shown, workspace)
    return reference.write_dense(vectors, tensors, out, scale, shown)


__all__ = ["HYPER", "MomentVectors", "begin_step", "update", "write_dense"]
