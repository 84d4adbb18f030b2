"""A gradient that is sent whole, looked at on the device: nothing waits for the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsync.kernels.launcher import Launcher
from sparsync.kernels.memory import Memory
from sparsync.kernels.workspace import on_device_of, usable_on
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad

BLOCK, PROGRAMS = 1024, 1056
HALF = (torch.float16, torch.bfloat16)
MOST = 2**31 - 2 * BLOCK  # entries are counted in 32 bits


def can_send(grad: Tensor, memory: Memory | None) -> bool:
    """Whether the kernels can take this gradient."""
    kept = torch.float32 if memory is None else memory.after.dtype
    known = kept == torch.float32 and grad.dtype in (torch.float32, *HALF) and grad.numel() < MOST
    return known and usable_on(grad.device)


def send_whole(
    grad: Tensor, memory: Memory | None, layout: Layout, workspace: dict[str, Any], scale: Tensor | None = None
) -> SparseGrad:
    """The gradient, or all that it makes of what was kept.

    Args:
        workspace: keeps the buffers.
        scale: what the gradient is multiplied by: one float32, on its device.
    """
    from sparsync.kernels import mail

    space = workspace.get("whole")
    if space is None or space.layout is not layout or space.out.device != grad.device:
        space = workspace["whole"] = _Space(layout, grad.device, memory is not None)
    speed = memory.velocity if memory else None
    before, after = (memory.before, memory.after) if memory else (grad, grad)
    programs = min(PROGRAMS, -(-layout.numel // BLOCK))
    with on_device_of(grad):
        space.launch(
            mail.whole, (programs,),
            grad, before, after, speed.before if speed else grad, speed.after if speed else grad, space.out,
            space.first, speed.beta if speed else 0.0, scale if scale is not None else space.out, layout.numel,
            programs,
            BLOCK=BLOCK, KEEPS=memory is not None, MOMENTUM=speed is not None, SCALED=scale is not None,
            enable_fp_fusion=False,
        )  # fmt: skip
        space.launch(mail.flag, (1,), space.first, space.starts, space.starts.numel(), space.words, BLOCK=128)
    values = space.out if memory else grad
    return SparseGrad(None, values, space.count, layout.numel, *space.flags)


class _Space:
    def __init__(self, layout: Layout, device: torch.device, keeps: bool) -> None:
        self.layout, self.launch = layout, Launcher()
        self.out = torch.zeros(layout.numel if keeps else 1, device=device)
        self.first = torch.full((), 0x7FFFFFFF, dtype=torch.int32, device=device)
        self.starts = torch.tensor([span.start for span in layout.spans], device=device)
        self.words = torch.zeros(2, dtype=torch.int32, device=device)
        self.flags = self.words.unbind()
        self.count = torch.tensor(layout.numel, device=device)
