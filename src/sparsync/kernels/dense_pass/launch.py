"""A gradient that is sent whole, looked at on the device: nothing waits for the host."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsync.kernels.device import on_device_of
from sparsync.kernels.launcher import Launcher
from sparsync.kernels.memory import Memory
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad
from sparsync.workspace import Workspace

BLOCK, PROGRAMS = 1024, 1056
ENTRIES = 2**31 - 2 * BLOCK  # a gradient must have fewer: they are counted in 32 bits


class DenseBuffers:
    """What is sent, and what is told of it.

    Args:
        keeps: there is a residual, so that not the gradient itself is sent.
    """

    def __init__(self, layout: Layout, device: torch.device, keeps: bool) -> None:
        self.layout, self.launch = layout, Launcher()
        self.out = torch.zeros(layout.numel if keeps else 1, dtype=torch.float32, device=device)
        self.first = torch.full((), 0x7FFFFFFF, dtype=torch.int32, device=device)
        self.starts = torch.tensor([span.start for span in layout.spans], dtype=torch.int64, device=device)
        self.words = torch.zeros(2, dtype=torch.int32, device=device)
        self.flags = self.words.unbind()
        self.count = torch.tensor(layout.numel, dtype=torch.int64, device=device)


def send_dense(
    grad: Tensor, memory: Memory | None, layout: Layout, workspace: Workspace, scale: Tensor | None = None
) -> SparseGrad:
    """Send the gradient, or all that it makes of what was kept.

    Args:
        workspace: keeps the buffers.
        scale: what the gradient is multiplied by: one float32, on its device.
    """
    from sparsync.kernels.dense_pass import triton as kernels

    keeps = memory is not None
    made_for = (id(layout), grad.device, keeps)
    space = workspace.get(DenseBuffers, made_for, lambda: DenseBuffers(layout, grad.device, keeps))
    velocity = memory.velocity if memory else None
    before, after = (memory.before, memory.after) if memory else (grad, grad)
    programs = min(PROGRAMS, -(-layout.numel // BLOCK))
    with on_device_of(grad):
        space.launch(
            kernels.send_dense, (programs,),
            grad, before, after, velocity.before if velocity else grad, velocity.after if velocity else grad,
            space.out, space.first, velocity.beta if velocity else 0.0, scale if scale is not None else space.out,
            layout.numel, programs,
            BLOCK=BLOCK, KEEPS=keeps, MOMENTUM=velocity is not None, SCALED=scale is not None,
            HALF=layout.dtype == torch.float16, enable_fp_fusion=False,
        )  # fmt: skip
        starts = space.starts
        space.launch(kernels.report_first, (1,), space.first, starts, starts.numel(), space.words, BLOCK=128)
    values = space.out if memory else grad
    return SparseGrad(None, values, space.count, layout.numel, *space.flags)
