"""How much a gradient is clipped, found on its device: nothing waits for the host."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsync.kernels.device import on_device_of
from sparsync.kernels.launcher import Launcher
from sparsync.kernels.strips import BLOCK, Strips, blocks_for, table
from sparsync.layout import Layout
from sparsync.workspace import Workspace

BLOCKS = 8  # of a strip


class ClipBuffers:
    """The gradient in strips, those of a segment next to each other, and room for their sums.

    Args:
        together: the gradient is clipped as one, whatever its segments.
    """

    def __init__(self, layout: Layout, together: bool, device: torch.device) -> None:
        self.layout, self.launch = layout, Launcher()
        self.blocks = blocks_for(layout.numel, BLOCKS)
        groups = [[(0, layout.numel)]] if together else [segment.runs() for segment in layout.segments]
        strips = Strips(groups, self.blocks)
        self.strips, self.groups = table(strips.rows, device), table(strips.groups, device)
        self.sums = torch.zeros(len(strips.rows), dtype=torch.float64, device=device)
        self.scales = torch.ones(len(groups), dtype=torch.float32, device=device)
        self.limit, self._clip = torch.zeros((), dtype=torch.float64, device=device), 0.0

    def set_limit(self, clip: float) -> None:
        """Set where to clip: on the device, as kernels take no float64 from the host. It follows the loss scale."""
        if clip != self._clip:
            self.limit.fill_(clip)
            self._clip = clip


def clip_scales(grad: Tensor, layout: Layout, clip: float, workspace: Workspace, together: bool = False) -> Tensor:
    """Do as ``reference.clip_scale``, for every segment; the next call overwrites what is returned.

    Args:
        workspace: keeps the buffers.
        together: the gradient is clipped as one, whatever its segments.
    """
    from sparsync.kernels.clip import triton as kernels

    made_for = (id(layout), together, grad.device)
    space = workspace.get(ClipBuffers, made_for, lambda: ClipBuffers(layout, together, grad.device))
    with on_device_of(grad):
        space.set_limit(clip)
        space.launch(
            kernels.squares, (space.sums.numel(),),
            grad, space.strips, space.sums, BLOCK=BLOCK, BLOCKS=space.blocks, num_warps=4,
        )  # fmt: skip
        space.launch(
            kernels.scale, (space.scales.numel(),),
            space.sums, space.groups, space.limit, space.scales, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return space.scales
