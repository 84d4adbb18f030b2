"""What the exchanges of a plan cost, before there is anything to exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sparsync.config import ExchangePlan
from sparsync.engine.bucketing import Bucket, BucketMapper, Unit
from sparsync.feedback import accumulation_dtype
from sparsync.layout import Parameter


def units_of(
    plan: ExchangePlan, parameters: Sequence[Parameter], dense_names: frozenset[str], device: torch.device
) -> list[Unit]:
    """Return the units that a reducer would exchange, if DDP had all gradients in one bucket per dtype."""
    mapper = BucketMapper(parameters, plan, dense_names, may_skip=False)
    kinds = sorted({(p.name in dense_names, str(p.dtype)) for p in parameters if p.numel})
    units: list[Unit] = []
    for number, kind in enumerate(kinds):  # what travels dense stands apart, so that no unit has holes
        own = [p for p in parameters if p.numel and (p.name in dense_names, str(p.dtype)) == kind]
        buffer = torch.zeros(sum(p.numel for p in own), dtype=own[0].dtype, device=device)
        last = number == len(kinds) - 1
        units += mapper.add(Bucket(number, buffer, tuple(p.name for p in own), last))[1]
    return units


def bytes_per_step(plan: ExchangePlan, tensors: Mapping[str, Tensor], workers: int) -> Callable[[float], float]:
    """Return the bytes that a worker sends in a step, as a function of the density of what is compressed.

    No gradient is made for it: layouts alone say what messages take. With scope ``layer`` and ``bucket`` every bucket
    of DDP is a message with a header of its own, and here all are one.

    Args:
        tensors: the parameters that are trained, by name.
        workers: P.
    """
    parameters = [Parameter.of(name, tensor) for name, tensor in tensors.items()]
    units = units_of(plan, parameters, plan.dense_names(tensors), torch.device("meta"))
    dtypes = [accumulation_dtype(unit.grad.dtype) if unit.keeps else unit.grad.dtype for unit in units]

    def at(density: float) -> float:
        total = 0.0
        for unit, dtype in zip(units, dtypes, strict=True):
            layout, _ = unit.layout_at(1.0 if unit.compressor.dense else density)
            total += unit.traffic(layout, plan.wire, workers, dtype).mean_bytes
        return total

    return at
