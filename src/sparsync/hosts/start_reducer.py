"""What all ranks compare before the first exchange, and the reducer that is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from sparsync.collectives import Channel
from sparsync.config import ExchangePlan
from sparsync.config.nodes import LOCAL, groups_of, local_size
from sparsync.engine.budget import plan_for
from sparsync.engine.hierarchy import choose_stage
from sparsync.engine.reducer import Reducer
from sparsync.feedback import rates_by_name
from sparsync.layout import Parameter


def start_reducer(
    asked: ExchangePlan,
    trained: Mapping[str, Tensor],
    names: Mapping[int, str],
    channel: Channel,
    device: torch.device,
    one_device: bool,
    may_skip: bool,
) -> Reducer:
    """Compare with the other ranks, and return what exchanges gradients with them.

    Args:
        asked: what follows from its budget is known here, with the number of workers.
        trained: parameters by name, or this rank's shards of them.
        names: of parameters as the optimizer has them, by ``id``.
        device: of the model; ``one_device``: of all of it.
        may_skip: parameters may be unused, and what is sent for them is then lost.
    """
    if asked.per_node == LOCAL and dist.is_initialized() and channel.size != dist.get_world_size():
        raise ValueError(
            "per_node='local' is for models whose process group has all ranks: give the ranks of each machine"
        )
    nodes = groups_of(asked.per_node, channel.share(local_size()))
    plan = plan_for(asked, trained, channel.size, nodes)
    dense_names, channel.wire = plan.dense_names(trained), plan.wire
    parameters = [Parameter.of(name, p) for name, p in trained.items()]
    channel.assert_consistent("configuration", plan.configuration(dense_names))
    channel.assert_consistent("model", "\n".join(map(str, parameters)))
    stage = choose_stage(channel, nodes)
    # What is decided on a device is decided for that device, and for exchanges in one stage, alone; and heard of
    # too late by those who want to go on.
    channel.may_defer = channel.may_defer and one_device and not nodes and plan.on_loss == "raise"
    rates = None
    if plan.follow_lr:
        assert plan.optimizer is not None
        rates = partial(rates_by_name, plan.optimizer, names)
    return Reducer(
        parameters, plan, channel, dense_names=dense_names, may_skip=may_skip, rates=rates,
        device=device, stage=stage,
    )  # fmt: skip
