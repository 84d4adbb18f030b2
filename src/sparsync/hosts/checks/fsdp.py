"""What of FSDP2 can be attached to; everything else is refused with what to do instead."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from sparsync.config import ExchangePlan

LINES = (
    'mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard")); '
    'fully_shard(model, mesh=mesh["shard"]); sparsync.attach(model, replicate=mesh["replicate"], optimizer=optimizer)'
)


def groups_of(module: FSDPModule) -> list[Any]:
    """Return FSDP's groups of parameters that one of its modules has: one, or none; torch 2.13 keeps them in a list."""
    state = module._get_fsdp_state()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups
    return [group for group in groups if group is not None]


def check_model(model: Module, replicate: Any) -> dict[Any, FSDPModule]:
    """Return the groups of parameters to exchange, each with a module of its; refuse what they cannot be."""
    if any(kind.__name__ == "ReplicateModule" for kind in type(model).__mro__):
        raise ValueError(
            "replicate() sums gradients dense before anybody can choose from them: wrap the model in "
            "DistributedDataParallel and attach to that, or shard it over meshes of one rank: " + LINES
        )
    if not isinstance(model, FSDPModule):
        raise ValueError(
            f"replicate= is for models of fully_shard, which {type(model).__name__} is not: call fully_shard on the "
            "whole model, too, not only on parts of it. " + LINES
        )
    if replicate is None:
        raise ValueError(
            "fully_shard alone keeps one copy of the model, whose gradients are summed by reduce-scatter: there are no "
            "replicas to exchange between. Shard within fast links and replicate over slow ones: " + LINES
        )
    modules: list[FSDPModule] = [part for part in model.modules() if isinstance(part, FSDPModule)]
    groups = {group: part for part in modules for group in groups_of(part)}
    groups = {group: part for group, part in groups.items() if any(p.requires_grad for p in _parameters(group))}
    sharded = {id(parameter) for group in groups for parameter in _parameters(group)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in sharded:
            raise ValueError(
                f"{name!r} is trained, and not sharded (ignored_params): its gradient would not be exchanged; shard "
                "it, or freeze it"
            )
    for group in groups:
        _check_group(group)
    meshes: set[DeviceMesh] = {parameter.device_mesh for group in groups for parameter in _parameters(group)}
    if len(meshes) != 1:
        raise ValueError(f"all of a model has to be sharded over one mesh, got {len(meshes)} of them")
    _check_ranks(meshes.pop(), replicate)
    return groups


def check_plan(plan: ExchangePlan) -> None:
    """Refuse options that shards do not know."""
    if plan.auto:
        raise ValueError("'auto' does not know shards: name a recipe or a compressor (the default recipe is sparse)")
    if plan.per_node != 1:
        raise ValueError("per_node= is for DistributedDataParallel: with fully_shard, shard within the machine instead")
    if plan.scaler is not None:
        raise ValueError(
            "scaler= does not know shards: use bf16, MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
            "reduce_dtype=torch.float32), which needs no loss scaling"
        )


def group_of(replicate: Any) -> Any:
    """Return the process group of ``replicate``."""
    if isinstance(replicate, DeviceMesh):
        if replicate.ndim != 1:
            raise ValueError(f"replicate= takes a mesh of one dimension, got {replicate.ndim}: " + LINES)
        return replicate.get_group()
    if not isinstance(replicate, dist.ProcessGroup):
        raise ValueError(f"replicate= takes a DeviceMesh or a process group, got {type(replicate).__name__}: " + LINES)
    return replicate


def _parameters(group: Any) -> list[Any]:
    return [one.sharded_param for one in group.fsdp_params]


def _check_group(group: Any) -> None:
    first = _parameters(group)[0]
    if any(placement.is_replicate() for placement in first.placements):
        raise ValueError(
            "on a mesh of replicas and shards FSDP itself sums over the replicas, dense: give fully_shard the shards' "
            "mesh alone. " + LINES
        )
    if first.device_mesh.ndim != 1:
        raise ValueError("tensor parallelism beside fully_shard is not supported: its meshes must have one dimension")
    if any(one.offload_to_cpu for one in group.fsdp_params):
        raise ValueError("CPUOffloadPolicy is not supported: gradients would be on another device than parameters")
    policy = group.mp_policy
    if (policy.reduce_dtype or policy.param_dtype or first.dtype) == torch.float16:
        raise ValueError("gradients that are summed in fp16 need a loss scaler, which does not know shards: use bf16")


def _check_ranks(shards: DeviceMesh, replicate: Any) -> None:
    """Refuse replicas that do not lie across the shards."""
    ours, theirs = (set(dist.get_process_group_ranks(group)) for group in (shards.get_group(), group_of(replicate)))
    if ours & theirs != {dist.get_rank()}:
        raise ValueError(
            f"replicate= has ranks {sorted(theirs)} and the model's shards are on ranks {sorted(ours)}: they must have "
            "this rank in common and no other. " + LINES
        )
