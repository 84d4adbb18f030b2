"""How much a gradient is clipped, found on its device: nothing waits for the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsync.kernels.launcher import Launcher
from sparsync.kernels.reference import Run
from sparsync.kernels.workspace import on_device_of
from sparsync.layout import Layout

BLOCK = 1024  # entries
BLOCKS = 8  # of a program; a small gradient needs many programs instead
SMALL = 1 << 22


def clip_scales(grad: Tensor, layout: Layout, clip: float, workspace: dict[str, Any], together: bool = False) -> Tensor:
    """As ``reference.clip_scale``, for every segment; the next call overwrites it.

    Args:
        workspace: keeps the buffers.
        together: the gradient is clipped as one, whatever its segments.
    """
    from sparsync.kernels import norms

    space = workspace.get("clip")
    if space is None or space.layout is not layout or space.scales.device != grad.device:
        groups = [[(0, layout.numel)]] if together else [segment.runs() for segment in layout.segments]
        space = workspace["clip"] = _Space(layout, groups, grad.device)
    with on_device_of(grad):
        space.set(clip)
        space.launch(
            norms.squares, (space.sums.numel(),),
            grad, space.strips, space.sums, BLOCK=BLOCK, BLOCKS=space.blocks, num_warps=4,
        )  # fmt: skip
        space.launch(
            norms.scale, (space.scales.numel(),),
            space.sums, space.segments, space.limit, space.scales, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    scales: Tensor = space.scales
    return scales


class _Space:
    """The gradient in strips, those of a segment next to each other, and room for their sums."""

    def __init__(self, layout: Layout, groups: Sequence[Sequence[Run]], device: torch.device) -> None:
        self.layout, self.launch = layout, Launcher()
        self.blocks = 1 if layout.numel < SMALL else BLOCKS
        size = BLOCK * self.blocks
        strips: list[tuple[int, ...]] = []
        segments: list[tuple[int, ...]] = []
        for runs in groups:
            first = len(strips)
            for begin, stop in runs:
                start = begin // 128 * 128  # aligned, so that loads are wide
                strips += [(at, max(at, begin), min(at + size, stop)) for at in range(start, stop, size)]
            segments.append((first, len(strips) - first))
        self.strips, self.segments = (torch.tensor(rows, device=device).flatten() for rows in (strips, segments))
        self.sums = torch.zeros(len(strips), dtype=torch.float64, device=device)
        self.scales = torch.ones(len(groups), device=device)
        self.limit, self._clip = torch.zeros((), dtype=torch.float64, device=device), 0.0

    def set(self, clip: float) -> None:
        """Where to clip: on the device, as kernels take no float64 from the host. It follows the loss scale."""
        if clip != self._clip:
            self.limit.fill_(clip)
            self._clip = clip
