"""A reducer on its own, fed with buckets, and a compressor on its own, fed with a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsync import AllGather, TopK
from sparsync.collectives import Channel
from sparsync.compressors import Context
from sparsync.engine.bucketing import Bucket
from sparsync.engine.reducer import Reducer
from sparsync.kernels import Memory
from sparsync.layout import Layout, Parameter, Span
from sparsync.schedule import Constant
from sparsync.sparse import SparseGrad
from sparsync.wire import Wire
from tests.methods import reducer_of


def make_reducer(
    parameters: dict[str, Tensor],
    compressor: Any = None,
    collective: Any = None,
    *,
    alone: bool = False,
    **options: Any,
) -> Reducer:
    """Return a reducer of these parameters over all ranks, or of one worker ``alone``."""
    options = {"scope": "layer", "density": Constant(0.1)} | options
    wire = Wire(options.pop("values", "fp32"))
    channel = Channel(None if alone else dist.group.WORLD, wire, options.pop("deadline", 20.0))
    described = [Parameter.of(name, tensor) for name, tensor in parameters.items()]
    return reducer_of(described, compressor or TopK(), collective or AllGather(), channel, **options)


def push_all(reducer: Reducer, buckets: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
    """Push one step of buckets that hold one parameter each; return their results."""
    futures = [
        reducer.push(Bucket(i, gradient.clone(), (name,), i == len(buckets) - 1))
        for i, (name, gradient) in enumerate(buckets)
    ]
    for future in futures:
        future.wait()
    return [future.value() for future in futures]


def error_of(action: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[str, str]:
    """Return name and text of what an action raises, or ``("none", "")``."""
    try:
        action(*arguments, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def compress(compressor: Any, gradient: Tensor, k: int, **context: Any) -> tuple[SparseGrad, Tensor]:
    """Make one pass over a gradient that is one segment; return what is sent, and the residual."""
    span = Span("w", 0, gradient.numel())
    layout = Layout.cut(
        [span],
        numel=gradient.numel(),
        scope="layer",
        density=k / gradient.numel(),
        capacity=compressor.capacity,
    )
    residual = torch.zeros_like(gradient)
    memory = Memory(residual, residual)
    return compressor.compress(gradient, memory, layout, Context(**context), compressor.init(layout)), residual
