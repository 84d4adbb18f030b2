"""What the exchanges of a plan cost, before there is anything to exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsync.collectives import Traffic
from sparsync.config import ExchangePlan
from sparsync.engine.bucket_mapper import BucketMapper
from sparsync.engine.bucketing import Bucket, Unit
from sparsync.feedback import accumulation_dtype
from sparsync.layout import Layout, Parameter, Span

CAPS = (2**20, 25 * 2**20)  # bytes at which DDP closes its first bucket, and all others


class SketchUnit(NamedTuple):
    """A unit of sketches.

    Args:
        home: the unit in which the sketched parameters are, if there are any ...
        sketched: ... and where.
        dense: the parameters that travel dense in front of the sketches, and where.
    """

    unit: Unit
    home: Unit | None
    sketched: tuple[Span, ...]
    dense: tuple[Span, ...]


def units_of(
    plan: ExchangePlan, parameters: Sequence[Parameter], dense_names: frozenset[str], device: torch.device
) -> tuple[list[Unit], list[SketchUnit]]:
    """Return the units that a reducer would exchange, if DDP had all gradients in one bucket per dtype; then the units
    of their sketches."""
    apart = plan.preconditioning is None  # what travels dense stands apart, so that no unit has holes
    by_kind = dict[tuple[bool, str], list[Parameter]]()
    for parameter in sorted(parameters, key=lambda p: p.name in dense_names):
        if parameter.numel:
            by_kind.setdefault((apart and parameter.name in dense_names, str(parameter.dtype)), []).append(parameter)
    buckets = [by_kind[kind] for kind in sorted(by_kind)]
    filled, sketches = _fill(BucketMapper(parameters, plan, dense_names, may_skip=False), buckets, device)
    units, found = [unit for _, unit in filled], []
    for _, sketch in sketches:
        dense = tuple(span for span in sketch.spans if span.name in dense_names)
        names = {span.name for span in sketch.spans[len(dense) :]}
        home = next((unit for unit in units if names and names <= {span.name for span in unit.spans}), None)
        spans = home.spans if home is not None else ()
        found.append(SketchUnit(sketch, home, tuple(span for span in spans if span.name in names), dense))
    return units, found


class PlannedExchange(NamedTuple):
    """An exchange of a step to come.

    Args:
        unit: what is exchanged.
        bucket: number of the bucket with which it can begin.
        sketch: it carries sketches.
        layout: of the unit, at the density that was asked for.
        traffic: what it puts on the network.
    """

    unit: Unit
    bucket: int
    sketch: bool
    layout: Layout
    traffic: Traffic


def bytes_per_step(
    plan: ExchangePlan, tensors: Mapping[str, Tensor], workers: int, *, whole: bool = False
) -> Callable[[float], float]:
    """Return the bytes that a worker sends in a step, as a function of the density of what is compressed.

    No gradient is made for it: layouts alone say what messages take.

    Args:
        tensors: the parameters that are trained, by name.
        workers: P.
        whole: all gradients are in one bucket per dtype, as virtual workers have them. Else the buckets are those that
            DDP makes with its own limits: with sketches, or scope ``layer`` or ``bucket``, each sends a message.
    """
    exchanges = exchanges_of(plan, tensors, workers, None if whole else CAPS)
    return lambda density: sum(exchange.traffic.mean_bytes for exchange in exchanges(density))


def exchanges_of(
    plan: ExchangePlan, tensors: Mapping[str, Tensor], workers: int, caps: tuple[int, int] | None = CAPS
) -> Callable[[float], list[PlannedExchange]]:
    """Return the exchanges of a step, in their order, as a function of the density of what is compressed.

    Args:
        caps: bytes at which DDP closes its first bucket, and all others; ``None``: all gradients are in one bucket per
            dtype.
    """
    parameters = [Parameter.of(name, tensor) for name, tensor in tensors.items()]
    names, meta = plan.dense_names(tensors), torch.device("meta")
    if caps is None:
        units, found = units_of(plan, parameters, names, meta)
        planned = [(unit, 0, False) for unit in units] + [(sketch.unit, 0, True) for sketch in found]
    else:
        mapper = BucketMapper(parameters, plan, names, may_skip=False)
        own, sketches = _fill(mapper, ddp_buckets(parameters, caps), meta)
        planned = [(unit, bucket, False) for bucket, unit in own] + [(unit, bucket, True) for bucket, unit in sketches]
        planned.sort(key=lambda entry: (entry[1], not entry[2]))  # sketches leave with their buckets
    sums = plan.per_node != 1  # of nodes, which are made in the residual's dtype
    dtypes = [accumulation_dtype(u.grad.dtype) if u.keeps or sums else u.grad.dtype for u, *_ in planned]

    def at(density: float) -> list[PlannedExchange]:
        exchanges = []
        for (unit, bucket, sketch), dtype in zip(planned, dtypes, strict=True):
            layout, _ = unit.layout_at(1.0 if unit.compressor.dense else density)
            traffic = unit.traffic(layout, plan.wire, workers, dtype)
            exchanges.append(PlannedExchange(unit, bucket, sketch, layout, traffic))
        return exchanges

    return at


def _fill(
    mapper: BucketMapper, buckets: Sequence[Sequence[Parameter]], device: torch.device
) -> tuple[list[tuple[int, Unit]], list[tuple[int, Unit]]]:
    """Return the units that buckets of these parameters become, and those of their sketches, with the number of the
    bucket that completes each."""
    units, sketches = list[tuple[int, Unit]](), list[tuple[int, Unit]]()
    for number, own in enumerate(buckets):
        buffer = torch.zeros(sum(p.numel for p in own), dtype=own[0].dtype, device=device)
        last = number == len(buckets) - 1
        pending, complete = mapper.add(Bucket(number, buffer, tuple(p.name for p in own), last))
        units += [(number, unit) for unit in complete]
        sketches += [(number, pending.plan.sketch)] if pending.plan.sketch is not None else []
    return units, sketches


def ddp_buckets(parameters: Sequence[Parameter], caps: tuple[int, int] = CAPS) -> list[list[Parameter]]:
    """Return the parameters in buckets, one dtype each, as DDP fills them: the last parameters first."""
    closed, filling = list[list[Parameter]](), dict[torch.dtype, list[Parameter]]()
    room = {parameter.dtype: caps[0] for parameter in parameters}
    for parameter in reversed([parameter for parameter in parameters if parameter.numel]):
        dtype = parameter.dtype
        filling.setdefault(dtype, []).append(parameter)
        room[dtype] -= parameter.numel * dtype.itemsize
        if room[dtype] <= 0:
            closed.append(filling.pop(dtype))
            room[dtype] = caps[1]
    return closed + list(filling.values())
