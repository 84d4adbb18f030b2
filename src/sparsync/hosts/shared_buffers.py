"""DDP's buffers, those of batch norm say, sent over our own exchanges before every forward pass.

DDP itself sends them in the model's process group, where a rank that waits hears of no error of the others, and may
wait for half an hour; those who go on without a lost rank would take it for another that is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from sparsync.collectives import Channel
from sparsync.errors import SparsyncError
from sparsync.hosts.handle import Handle

AT_ONCE = 250 * 2**20  # bytes that DDP sends in one message


class BufferSender:
    """The state of the hook; a copy of a DDP model has none."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def __deepcopy__(self, memo: Any) -> None:
        """Return nothing."""

    def __reduce__(self) -> Any:
        return type(None), ()


def share_buffers(ddp: DistributedDataParallel, handle: Handle) -> Callable[[], None]:
    """Let DDP's buffers be sent by us, unless the user has a hook that does; return what ends that."""
    if hasattr(ddp, "buffer_hook"):
        return lambda: None
    ddp._register_buffer_comm_hook(BufferSender(handle), _hook, _BufferCommHookLocation.PRE_FORWARD)  # type: ignore[no-untyped-call]
    return lambda: delattr(ddp, "buffer_hook")


def _hook(state: BufferSender | None, buffers: Mapping[str, Tensor]) -> None:
    if state is None:  # as DDP does it
        dist._broadcast_coalesced(dist.group.WORLD, [*buffers.values()], AT_ONCE, 0)  # type: ignore[attr-defined,arg-type]
        return
    try:
        _broadcast(state.handle._running().channel, [*buffers.values()])
    except SparsyncError as error:  # others know of it, or told us; nothing more is exchanged
        state.handle.fail(error)
        raise


def _broadcast(channel: Channel, buffers: list[Tensor]) -> None:
    """Make all ranks' buffers those of the first, in one message."""
    own = [buffer.detach().reshape(-1).view(torch.uint8).cpu() for buffer in buffers]
    message, channel.unit = torch.cat(own), "buffers"
    channel.broadcast(message)
    channel.take_count()  # they are not gradients
    for buffer, came in zip(buffers, torch.split(message, [one.numel() for one in own]), strict=True):
        buffer.copy_(came.clone().view(buffer.dtype).view(buffer.shape))
