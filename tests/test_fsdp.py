"""FSDP2 with real processes: meshes of 2 x 2, 3 x 1 and 2 x 1 ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import sparsync
from sparsync.local_shard import local_shard
from tests.models import batch
from tests.world import World

SPARSE = {"dense_below": 0, "dense_1d": False, "deadline": 30}


def net(seed: int) -> nn.Sequential:
    """Sizes that two shards do not divide evenly, and that leave one of them without an entry."""
    torch.manual_seed(seed)
    hidden = nn.Sequential(nn.Linear(33, 33), nn.ReLU())
    return nn.Sequential(nn.Linear(20, 33), nn.ReLU(), hidden, nn.Linear(33, 5), nn.Linear(5, 1), nn.Linear(1, 5))


def mesh_of(size: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size // shards, shards), mesh_dim_names=("replicate", "shard"))


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for part in (model[0], model[2]):  # type: ignore[index]
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return nn.functional.cross_entropy(model(x), y)


def shards_of(model: nn.Module, grads: bool = False) -> dict[str, Tensor]:
    """Return copies of this rank's parameters, or of their gradients."""
    named = ((name, p.grad if grads else p) for name, p in model.named_parameters())
    return {name: local_shard(tensor).detach().clone() for name, tensor in named}


def replica_mean(tensor: Tensor, group: Any) -> Tensor:
    total = tensor.double()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def finish(handle: sparsync.Handle) -> None:
    handle.detach()
    gc.collect()


def dense_shards(rank: int, mesh: DeviceMesh, step: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's shards of what FSDP alone makes of a step: the mean over the shards' ranks."""
    twin = sharded(net(0), mesh["shard"])
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            local_shard(parameter).copy_(weights[name])
    loss_of(twin, rank, step).backward()
    return shards_of(twin, grads=True)


def case_laws(rank: int, size: int, shards: int, options: dict[str, Any]) -> Any:
    """Train; at every step compare what came in with what is applied and kept, and the replicas with each other."""
    mesh = mesh_of(size, shards)
    model = sharded(net(rank), mesh["shard"])  # replicas begin different
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = sparsync.attach(model, replicate=mesh["replicate"], optimizer=optimizer, **{**SPARSE, **options})
    group, before = mesh["replicate"].get_group(), dict[str, Tensor]()
    for step in range(4):
        came = dense_shards(rank, mesh, step, shards_of(model))
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        applied = shards_of(model, grads=True)
        for name, grad in came.items():
            kept = handle.residual(name)
            kept = torch.zeros_like(grad) if kept is None else kept.clone()
            due = replica_mean(grad + before.get(name, torch.zeros_like(grad)), group)
            assert torch.allclose(applied[name] + replica_mean(kept, group), due, atol=1e-6), (step, name)
            before[name] = kept
        optimizer.step()
        for name, tensor in shards_of(model).items():
            alike = [torch.empty_like(tensor) for _ in range(size // shards)]
            dist.all_gather(alike, tensor, group=group)
            assert all(torch.equal(one, tensor) for one in alike), (step, name)
    stats = handle.stats()
    answer = stats.step.entries, sum(t.numel() for t in shards_of(model).values())
    finish(handle)
    return answer


WAYS = {
    "topk": {"compressor": "topk", "density": 0.05, "scope": "bucket"},
    "threshold": {"compressor": "threshold", "density": 0.05, "scope": "layer"},
    "global": {"compressor": "topk", "density": 0.05, "scope": "global", "values": "bf16"},
    "dense parts": {"compressor": "topk", "density": 0.05, "dense_below": 200, "dense_1d": True},
}


@pytest.fixture(scope="module")
def four() -> Iterator[World]:
    world = World(4)
    yield world
    world.close()


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_lost_and_replicas_stay_equal(four: World, way: str) -> None:
    for sent, numel in four.run(case_laws, shards=2, options=WAYS[way]):
        assert 0 < sent < (0.5 if way == "dense parts" else 0.2) * numel


@pytest.mark.parametrize("size", [2, 3])
def test_shards_of_one_rank_are_replicas_alone(size: int) -> None:
    for done, answer in World.once(size, case_laws, shards=1, options=WAYS["global"]):
        assert done, answer


def train(
    rank: int, mesh: DeviceMesh, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, clip: float = 0.0
) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def case_dense(rank: int, size: int, kind: str, options: dict[str, Any], clip: float = 0.0) -> float:
    """Return how far weights are from those of dense HSDP after some steps."""
    mesh, ends = mesh_of(size, 2), []
    for sparse in (True, False):
        model = sharded(net(0), mesh["shard"] if sparse else mesh)
        make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind]
        optimizer = make(model.parameters(), lr=0.01)
        if sparse:
            handle = sparsync.attach(model, replicate=mesh["replicate"], optimizer=optimizer, **{**SPARSE, **options})
        train(rank, mesh, model, optimizer, range(5), 0.0 if sparse else clip)
        ends.append(shards_of(model))
    finish(handle)
    return max(float((ends[0][name] - ends[1][name]).abs().max()) for name in ends[0] if ends[0][name].numel())


EXACT = {"compressor": "topk", "density": 1.0, "precondition": True, "second_moment": "exact", "beta": "own"}


@pytest.mark.parametrize(
    ("kind", "options", "clip"),
    [
        ("sgd", {"compressor": "topk", "density": 1.0}, 0.0),
        ("sgd", {"compressor": "none"}, 0.0),
        ("adamw", EXACT, 0.0),
        ("adamw", {**EXACT, "clip": 0.3}, 0.3),
    ],
    ids=["topk", "none", "adamw", "adamw clipped"],
)
def test_all_entries_are_what_hsdp_sends(four: World, kind: str, options: dict[str, Any], clip: float) -> None:
    assert max(four.run(case_dense, kind=kind, options=options, clip=clip)) < 1e-5
