"""Hierarchical exchange with real processes: 2 x 2, 2 x 3, and nodes of unequal size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import sparsync
from tests.failures.checked_training import inputs, mlp, train
from tests.world import World


def case_laws(rank: int, size: int, per_node: Any, compressor: str, options: dict[str, Any]) -> str:
    """Laws 1 and 2, checked at every step; the first rank of a node keeps all that it keeps."""
    ddp = DistributedDataParallel(mlp(), bucket_cap_mb=0.001)
    handle = sparsync.attach(ddp, compressor, per_node=per_node, deadline=20, **options)
    train(ddp, handle, inputs(rank, 8, 40))
    said = handle.describe()
    handle.detach()
    return said


@pytest.mark.parametrize("size,per_node", [(4, 2), (6, 3), (3, [[0], [1, 2]])])
def test_laws(worlds: dict[int, World], size: int, per_node: Any) -> None:
    print(worlds[size].run(case_laws, per_node=per_node, compressor="topk", options={"density": 0.05})[0])
