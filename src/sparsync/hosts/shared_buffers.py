"""DDP's buffers, those of batch norm say, sent over our own exchanges before every forward pass.

DDP itself sends them in the model's process group, where a rank that waits hears of no error of the others, and may
wait for half an hour; those who go on without a lost rank would take it for another that is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sparsync.collectives import Channel
from sparsync.errors import SparsyncError
from sparsync.hosts.handle import Handle


class BufferSender:
    """Takes the place of a model's ``_sync_module_buffers``, which DDP calls with the rank whose buffers count: the
    first, and under ``join()`` one that has data. DDP's own hooks for buffers are not told that rank.

    Args:
        handle: ``None`` in a copy of the model, whose buffers DDP sends.
    """

    def __init__(self, ddp: DistributedDataParallel, handle: Handle | None) -> None:
        self.ddp, self.handle = ddp, handle

    def __call__(self, source: int) -> None:
        """Make all ranks' buffers those of ``source``, unless the user has a hook that does."""
        if self.handle is None or hasattr(self.ddp, "buffer_hook"):
            DistributedDataParallel._sync_module_buffers(self.ddp, source)  # type: ignore[no-untyped-call]
            return
        try:
            _broadcast(self.handle._running().channel, self.ddp.modules_buffers, source)
        except SparsyncError as error:  # others know of it, or told us; nothing more is exchanged
            self.handle.fail(error)
            raise

    def __reduce__(self) -> Any:
        return type(self), (self.ddp, None)


def share_buffers(ddp: DistributedDataParallel, handle: Handle) -> Callable[[], None]:
    """Let DDP's buffers be sent by us; return what ends that."""
    ddp._sync_module_buffers = BufferSender(ddp, handle)  # type: ignore[method-assign]
    return lambda: delattr(ddp, "_sync_module_buffers")


def _broadcast(channel: Channel, buffers: Sequence[Tensor], source: int) -> None:
    """Make all ranks' buffers those of the rank ``source``, in one message."""
    own = [buffer.detach().reshape(-1).view(torch.uint8).cpu() for buffer in buffers]
    message, channel.unit = torch.cat(own), "buffers"
    channel.broadcast(message, source)
    channel.take_count()  # they are not gradients
    for buffer, came in zip(buffers, torch.split(message, [one.numel() for one in own]), strict=True):
        buffer.copy_(came.clone().view(buffer.dtype).view(buffer.shape))
