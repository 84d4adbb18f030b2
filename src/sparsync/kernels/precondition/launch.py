"""The kernel that makes updates, launched; and its buffers, which stay from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync.kernels.device import on_device_of
from sparsync.kernels.launcher import Launcher
from sparsync.kernels.memory import Update
from sparsync.kernels.precondition.places import any_stack, place_strips
from sparsync.kernels.sketch import Sketched
from sparsync.kernels.strips import BLOCK, Strips, blocks_for, table
from sparsync.workspace import Workspace

BLOCKS = 4  # of a strip


class PreconditionBuffers:
    """The gradient in strips, each within one tensor, and where these are among the moments."""

    def __init__(self, tensors: Sequence[Sketched], device: torch.device) -> None:
        self.tensors, self.launch = tensors, Launcher()
        self.blocks = blocks_for(sum(tensor.numel for tensor in tensors), BLOCKS)
        strips = Strips(([(tensor.start, tensor.start + tensor.numel)] for tensor in tensors), self.blocks)
        self.count = len(strips.rows)
        self.strips, self.places = table(strips.rows, device), table(place_strips(strips.rows, tensors), device)
        self.stacked = any_stack(tensors)


def precondition(grad: Tensor, update: Update, out: Tensor, workspace: Workspace) -> None:
    """Do as ``reference.precondition``: nothing waits for the host."""
    from sparsync.kernels.precondition import triton as kernels

    space, tables = _buffers(update, workspace), update.tables
    with on_device_of(grad):
        space.launch(
            kernels.precondition, (space.count,),
            grad, update.before, update.after, out, space.strips, space.places, tables.sizes, tables.rates, tables.eps,
            tables.betas, tables.shares, tables.limit,
            BLOCK=BLOCK, BLOCKS=space.blocks, STACKED=space.stacked, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def shrink(residual: Tensor, update: Update, workspace: Workspace) -> None:
    """Do as ``reference.shrink``, in place: what does not shrink is not read."""
    from sparsync.kernels.precondition import triton as kernels

    space = _buffers(update, workspace)
    with on_device_of(residual):
        space.launch(
            kernels.shrink, (space.count,),
            residual, space.strips, space.places, update.tables.kept, BLOCK=BLOCK, BLOCKS=space.blocks, num_warps=4,
        )  # fmt: skip


def _buffers(update: Update, workspace: Workspace) -> PreconditionBuffers:
    tensors, device = update.tensors, update.after.device
    return workspace.get(PreconditionBuffers, (id(tensors), device), lambda: PreconditionBuffers(tensors, device))
