"""A model as the planner sees it: its tensors, its buckets, and when backward has which of them ready."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Module

from sparsync.engine.traffic import CAPS, ddp_buckets
from sparsync.layout import Parameter
from sparsync.planner.overlap import Timeline
from sparsync.planner.quantities import count_of
from sparsync.planner.shapes import SHAPES, Shapes, TensorShape, any_model

BACKWARD = 2 / 3  # of a step's compute: two products for each of forward's


@dataclass(frozen=True)
class ModelShape:
    """What is exchanged, and in which buckets.

    Args:
        title: what it is called.
        tensors: the parameters that are trained, by name; nothing is read but shape and dtype.
        work: of each of them, what its part of backward takes, in any unit.
        caps: bytes at which DDP closes its first bucket, and all others.
    """

    title: str
    tensors: Mapping[str, Tensor]
    work: Mapping[str, float]
    caps: tuple[int, int] = CAPS

    @classmethod
    def of_shapes(cls, title: str, shapes: list[TensorShape]) -> ModelShape:
        """Return a model by its shapes."""
        names = [f"tensor {number}" for number in range(len(shapes))]
        tensors = {
            name: torch.empty(shape.shape, dtype=torch.float32, device="meta")
            for name, shape in zip(names, shapes, strict=True)
        }
        work = {name: float(shape.numel * shape.positions) for name, shape in zip(names, shapes, strict=True)}
        return cls(title, tensors, work)

    @classmethod
    def of_module(cls, module: Module, caps: tuple[int, int] = CAPS) -> ModelShape:
        """Return a module's shape. What backward takes for a tensor is not known: its size stands for it."""
        tensors = {name: torch.empty_like(p, device="meta") for name, p in module.named_parameters() if p.requires_grad}
        if not tensors:
            raise ValueError(f"{type(module).__name__} has no parameters that are trained")
        work = {name: float(tensor.numel()) for name, tensor in tensors.items()}
        return cls(type(module).__name__, tensors, work, caps)

    @classmethod
    def named(cls, name: str, known: Mapping[str, Shapes] = SHAPES) -> ModelShape:
        """Return a model by its name."""
        if name not in known:
            raise ValueError(f"model must be one of {', '.join(sorted(known))}, got {name!r}; or give its size: params")
        return cls.of_shapes(name, known[name]())

    @classmethod
    def of_size(cls, parameters: str | float) -> ModelShape:
        """Return a model of so many parameters, of which nothing else is known."""
        count = count_of(parameters)
        if count < 1:
            raise ValueError(f"params must be 1 or more, got {parameters!r}")
        return cls.of_shapes(f"{count:,} parameters", any_model(count))

    @cached_property
    def numel(self) -> int:
        """How many entries are trained."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    @cached_property
    def ready(self) -> tuple[float, ...]:
        """Of every bucket, the share of backward after which it is ready: backward comes from the last tensor."""
        done, total, at = 0.0, sum(self.work.values()) or 1.0, dict[str, float]()
        for name in reversed([*self.tensors]):
            done += self.work[name]
            at[name] = min(1.0, done / total)
        parameters = [Parameter.of(name, tensor) for name, tensor in self.tensors.items()]
        return tuple(max(at[p.name] for p in bucket) for bucket in ddp_buckets(parameters, self.caps))

    def timeline(self, compute: float, blocking: bool) -> Timeline:
        """Return when buckets are ready in a step whose passes take ``compute`` seconds."""
        backward = BACKWARD * compute
        return Timeline(compute - backward, tuple(share * backward for share in self.ready), backward, blocking)
