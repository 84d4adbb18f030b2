"""Replicas that begin alike, where the host framework does not see to it."""

from __future__ import annotations

import torch
from torch.nn import Module

from sparsync.collectives import Channel
from sparsync.local_shard import local_shard


def copy_first_replica(model: Module, channel: Channel) -> None:
    """Make all parameters and buffers those of the first replica."""
    with torch.no_grad():
        for tensor in map(local_shard, [*model.parameters(), *model.buffers()]):
            if tensor.numel():
                raw = tensor.contiguous().view(-1)
                channel.broadcast(raw.view(torch.uint8))
                tensor.copy_(raw.view(tensor.shape))
    channel.take_count()
