"""This rank's part of a tensor that several ranks share (``DTensor``, as FSDP2's parameters are)."""

from __future__ import annotations

import torch
from torch import Tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Return the part of ``tensor`` that lies on this rank, as it lies in memory; of a plain tensor, itself."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        shard: Tensor = tensor.to_local()
    return shard


def shared_like(model: Tensor, shard: Tensor) -> Tensor:
    """Return this rank's ``shard`` as a tensor that is shared as ``model`` is; of a plain one, itself."""
    if not hasattr(model, "to_local"):
        return shard
    from torch.distributed.tensor import DTensor

    assert isinstance(model, DTensor)
    return DTensor.from_local(
        shard, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )
