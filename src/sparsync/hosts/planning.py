"""``sparsync.plan``: how long a step of a model would take with each method."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from sparsync.engine.traffic import CAPS
from sparsync.planner import CostBook, ForeignCosts, Link, ModelShape, Network, Plan, Planner, StoredCosts
from sparsync.planner.links import LATENCY
from sparsync.planner.measure_link import measure_link
from sparsync.planner.quantities import bandwidth_of, seconds_of
from sparsync.planner.report import check_every
from sparsync.planner.stored_costs import measured_device

__all__ = ["plan"]


def plan(
    model: str | float | Module | ModelShape,
    *,
    compute: str | float,
    workers: int | None = None,
    bandwidth: str | float | None = None,
    latency: str | float | None = None,
    per_node: int = 1,
    trees: bool = False,
    optimizer: str | torch.optim.Optimizer = "sgd",
    every: int = 30,
    costs: CostBook | Path | None = None,
    device: torch.device | str | None = None,
) -> Plan:
    """Return how long a step takes with each method, which is the fastest and why; ``print`` shows it.

    Args:
        model: a ``DistributedDataParallel`` model, any other module, a number of parameters, or a name: ``"resnet50"``,
            ``"gpt2"``, ... Of a module only shapes are read; of DDP the sizes of its buckets, too.
        compute: seconds of forward and backward on one worker, or a text: ``"460ms"``.
        workers: P; where it is not given, the size of the model's process group.
        bandwidth: line rate of a machine's link, bits a second, or a text: ``"10Gbit"``, ``"1.2GB/s"``. Where it is not
            given, the process group is measured, and all ranks call this.
        latency: seconds of a message, or a text; 50 µs.
        per_node: workers in each machine, which share its link; methods that sum inside it first are compared, too.
        trees: the backend sums and gathers in log2 P rounds, as NCCL does, where rings take P - 1.
        optimizer: ``"sgd"``, ``"adam"``, ``"adamw"``, or the optimizer: recipes depend on it.
        every: local steps of a round, of ``OuterLoop``.
        costs: what choosing and coding entries takes: a file that was measured elsewhere; by default it is measured
            here, once, and kept in ``~/.cache/sparsync``.
        device: on which it is measured; the model's, or the CPU.
    """
    check_every(every)
    group = model.process_group if isinstance(model, DistributedDataParallel) else None
    shape, device = shape_of(model), device_of(model) if device is None else measured_device(device)
    if workers is None:
        if not dist.is_initialized():
            raise ValueError("workers= is needed where there is no process group")
        workers = dist.get_world_size(group)
    if bandwidth is not None:
        link = Link.at(bandwidth_of(bandwidth), LATENCY if latency is None else seconds_of(latency, "latency"))
    elif dist.is_initialized():
        link = measure_link(device, group)
    else:
        raise ValueError("bandwidth= is needed where there is no process group that could be measured")
    book = costs_for(costs, device)
    kind = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", type(optimizer).__name__)
    planner = Planner(shape, workers, seconds_of(compute), book, kind, per_node=per_node)
    return Plan(planner, Network(link, per_node, trees=trees), book.name, every)


def shape_of(model: str | float | Module | ModelShape) -> ModelShape:
    """Return the shape of whatever stands for a model."""
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, DistributedDataParallel):
        first = CAPS[0] if model.bucket_bytes_cap_default else model.bucket_bytes_cap
        return ModelShape.of_module(model.module, (first, model.bucket_bytes_cap))
    if isinstance(model, Module):
        return ModelShape.of_module(model, CAPS)
    return ModelShape.named(model) if isinstance(model, str) else ModelShape.of_size(model)


def device_of(model: object) -> torch.device:
    """Return the device of a module's parameters, and the CPU for whatever is not a module."""
    first = next(model.parameters(), None) if isinstance(model, Module) else None
    return torch.device("cpu") if first is None or first.device.type == "meta" else first.device


def costs_for(costs: CostBook | Path | str | None, device: torch.device) -> CostBook:
    """Return the costs that were asked for."""
    if costs is None:
        return StoredCosts(device)
    return ForeignCosts(Path(costs)) if isinstance(costs, Path | str) else costs
