"""CUDA graphs of the exchange: what it launches in a step is captured once, and replayed after that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from sparsync.engine.bucketing import Unit
from sparsync.kernels import KernelPath, choose_path
from sparsync.kernels.codecs import CODEC_NUMBERS
from sparsync.kernels.dense_pass.launch import ENTRIES as DENSE_ENTRIES
from sparsync.kernels.device import usable_on
from sparsync.kernels.topk.launch import ENTRIES
from sparsync.layout import Layout
from sparsync.wire import Wire

log = logging.getLogger("sparsync")

T = TypeVar("T")
Streams = Sequence[torch.cuda.Stream]

WARM_UPS = 3  # steps before a graph is captured: what is made on first use must not be captured


def repeatable(unit: Unit, wire: Wire, clips: bool) -> bool:
    """Return whether a unit's exchange may be replayed: nothing waits for the host or depends on the step's number.

    Args:
        clips: gradients are clipped.
    """
    compressor, grad = unit.compressor, unit.grad
    if not (grad.is_cuda and usable_on(grad.device) and compressor.graph_safe and unit.collective.graph_safe):
        return False
    if compressor.dense:
        return unit.rounding is None and choose_path(grad, None, DENSE_ENTRIES) is KernelPath.TRITON
    # Half-precision means are summed beside their bucket, which waits.
    if compressor.random:  # whose keys wait in their place; norms to clip by are asked for
        return not clips and grad.dtype in (torch.float32, torch.float64)
    carried = wire.values in CODEC_NUMBERS and wire.indices != "block"
    return carried and grad.dtype == torch.float32 and 0 < grad.numel() < ENTRIES


@dataclass
class _Known(Generic[T]):
    layout: Layout
    runs: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    outcome: T | None = None


class GraphReplays(Generic[T]):
    """Runs named actions: as they are, and from the fourth call on by replaying a CUDA graph.

    If capturing fails, which is logged once, everything is done as it is.

    Args:
        streams: of the GPU, in a graph.
    """

    def __init__(self, streams: int) -> None:
        self._streams = [new_stream() for _ in range(streams)] if streams > 1 else []
        self._known: dict[str, _Known[T]] = {}
        self._failed = False

    def run(self, name: str, layout: Layout, act: Callable[[Streams], T]) -> T:
        """Return what ``act`` gives, in tensors that the next call overwrites.

        Args:
            layout: that ``act`` goes by; with another one, the graph is captured anew.
            act: takes the streams that it may fork onto.
        """
        known = self._known.get(name)
        if known is None or known.layout is not layout:
            known = self._known[name] = _Known(layout)
        known.runs += 1
        if self._failed or known.runs <= WARM_UPS:
            return act(())
        if known.graph is None:
            try:
                known.graph, known.outcome = self._capture(act)
            except Exception as error:  # nothing has run yet, so it can still be done as it is
                self._failed = True
                log.warning("no CUDA graph of the exchange, which is slower for it: %s", error)
                return act(())
        known.graph.replay()
        assert known.outcome is not None
        return known.outcome

    def _capture(self, act: Callable[[Streams], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        here, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                outcome = act(self._streams)
        finally:
            torch.cuda.set_stream(here)  # a capture that breaks off leaves its own stream current
        return graph, outcome


def side_by_side(acts: Sequence[Callable[[], T]], streams: Streams) -> list[T]:
    """Return what ``acts`` give: run one after another, or forked onto ``streams`` and joined again."""
    if not streams:
        return [act() for act in acts]
    here, given = torch.cuda.current_stream(), []
    for stream in streams:
        stream.wait_stream(here)
    for number, act in enumerate(acts):
        with torch.cuda.stream(streams[number % len(streams)]):
            given.append(act())
    for stream in streams:
        here.wait_stream(stream)
    return given


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
