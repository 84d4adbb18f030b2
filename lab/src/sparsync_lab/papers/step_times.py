"""Where the time of a step goes: P2's table 2; and how long passes take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparsync.collectives import Collective, DenseAllReduce
from sparsync.collectives.base import shape_of
from sparsync.compressors import Compressor, Context
from sparsync.config import registry
from sparsync.layout import Layout, Span
from sparsync.planner import Link, Network
from sparsync.sparse import SparseGrad, write_mean
from sparsync.wire import Wire
from sparsync_lab import models
from sparsync_lab.bench.bench_methods import CompressorMethod
from sparsync_lab.bench.clock import Clock
from sparsync_lab.models import CATALOGUE, IMAGENET
from sparsync_lab.papers.item import Column, Result, RunContext
from sparsync_lab.papers.published import P2_ACCURACY
from sparsync_lab.papers.store import rounded
from sparsync_lab.report import Bar, BarChart, Figure, Row, Table

ROUNDS = 15
WARM_UPS = 3
TEN_GIGABIT = Network(Link(50e-6, 8 / 10e9))  # the papers' Ethernet: seconds of a round, and of a byte
P2_MODEL, P2_STEP_WORKERS, DENSITY = ("resnet18", 128), 8, 0.01  # of P2's table: model and batch, workers, k
COLUMNS = ("scheme", "forward_ms", "backward_ms", "exchange_ms", "coding_ms")
PARTS = ("forward", "backward", "exchange", "coding and decoding")  # of a step


def table_2_of_p2(context: RunContext) -> Result:
    """Measure forward, backward and coding of P2's six schemes, and compute the exchange: ResNet-18, layer by layer, 8
    workers."""
    rounds = 3 if context.quick else ROUNDS
    model, batch = ("resnet20", 4) if context.quick else P2_MODEL
    forward, backward = pass_seconds(model, batch, context.device, rounds)
    clock, spans = Clock(context.device), spans_of(model)
    coding = []
    for scheme, (title, *_) in P2_ACCURACY.items():
        context.log(title)
        coding.append(0.0 if scheme == "standard" else coding_seconds(Scheme.of(scheme, spans), spans, clock, rounds))
    columns: dict[str, Column] = {"scheme": [*P2_ACCURACY], "coding_ms": [1e3 * seconds for seconds in coding]}
    for name, seconds in {"forward_ms": forward, "backward_ms": backward}.items():
        columns[name] = [1e3 * seconds] * len(coding)
    return tables_of_p2(rounded(columns), model, batch)  # as they are stored


def tables_of_p2(columns: Mapping[str, Column], model: str = P2_MODEL[0], batch: int = P2_MODEL[1]) -> Result:
    """Make table and figure of what was measured; the exchange is computed anew.

    Args:
        columns: by the names of ``COLUMNS``.
        model: and ``batch``, of which they are.
    """
    spans, rows, bars = spans_of(model), [], []
    exchange = [rounded(1e3 * exchange_seconds(str(scheme), spans)) for scheme in columns["scheme"]]
    found = {name: exchange if name == "exchange_ms" else columns[name] for name in COLUMNS}
    for scheme, *measured in zip(*found.values(), strict=True):
        title, parts = P2_ACCURACY[str(scheme)][0], [float(part or 0) for part in measured]
        rows.append(Row([title, *(f"{part:.2f} ms" for part in parts), f"{sum(parts):.2f} ms"]))
        bars.append(Bar(title, sum(parts), f"{sum(parts):.1f} ms"))
    caption = f"A step of {CATALOGUE[model].title}, batch {batch}, {P2_STEP_WORKERS} workers, k = 1 %, layer by layer"
    return Result(
        [Table(caption, ["scheme", *PARTS, "step"], rows)],
        [Figure(BarChart("Time of a step", "milliseconds", bars, "ms"), "Nothing is overlapped.")],
        [
            "P2 shows bars without numbers, of K80s, and does not say whether anything is overlapped there.",
            "Forward, backward and coding (selecting, encoding, decoding all 8 workers' messages, their mean) are "
            "measured on one worker, forward and backward once for all schemes; exchange is computed, not measured: "
            "the collectives' traffic at 10 Gbit/s, as in P2, and 50 µs a round. A K80 takes longer for all of these "
            "but the exchange.",
        ],
        found,
    )


class Scheme(NamedTuple):
    """One of P2's sparse schemes: what selects, what exchanges, in which messages, and how entries are laid out."""

    name: str
    compressor: Compressor
    collective: Collective
    wire: Wire
    layout: Layout

    @classmethod
    def of(cls, scheme: str, spans: Sequence[Span]) -> Scheme:
        name, _, kind = scheme.partition("+")
        compressor: Compressor = registry.compressors()[name](DENSITY)
        collective: Collective = registry.collectives()[kind or "allgather"]()
        wire = Wire(indices="block") if compressor.block and not collective.shared else Wire()
        room = compressor.capacity
        layout = Layout.cut(
            spans, numel=spans[-1].stop, scope="layer", density=compressor.density, capacity=room, name="all"
        )
        return cls(scheme, compressor, collective, wire, layout)


def exchange_seconds(scheme: str, spans: Sequence[Span]) -> float:
    """Return the seconds of the exchange of one of P2's schemes, by what its collective sends at 10 Gbit/s."""
    if scheme == "standard":
        layout = Layout.cut(spans, numel=spans[-1].stop, scope="global", density=1.0)
        cost = DenseAllReduce().traffic(layout, Wire(), P2_STEP_WORKERS)
    else:
        own = Scheme.of(scheme, spans)
        cost = own.collective.traffic(own.layout, own.wire, P2_STEP_WORKERS)
    return TEN_GIGABIT.seconds(cost, P2_STEP_WORKERS)


def coding_seconds(own: Scheme, spans: Sequence[Span], clock: Clock, rounds: int) -> float:
    """Return the median seconds of coding and decoding of one of P2's sparse schemes."""
    numel, device, shared, wire = spans[-1].stop, clock.device, own.collective.shared, own.wire
    worker = CompressorMethod(own.name, own.compressor, spans, "layer", device)
    layout, out = worker.layout, torch.zeros(numel, device=device)
    compressor_context = Context(shared=shared, whole=shared or wire.indices == "block")
    shape = shape_of(layout, torch.float32)
    grad = torch.randn(numel, device=device)

    def compress() -> SparseGrad:
        worker.number += 1
        return own.compressor.compress(
            grad, worker.memory(), layout, replace(compressor_context, step=worker.number), worker.state
        )

    def step() -> None:
        sent = compress()
        if shared:
            write_mean(out, [sent], P2_STEP_WORKERS)
            return
        header = wire.header(sent, 0, layout.id, layout.digest)
        message = wire.encode(sent, layout.segment_of, shape, header)
        gathered = [wire.decode(message, layout.segment_of, shape) for _ in range(P2_STEP_WORKERS)]
        write_mean(out, gathered, P2_STEP_WORKERS)

    return median_seconds(clock, step, rounds)


def pass_seconds(name: str, batch: int, device: torch.device, rounds: int) -> tuple[float, float]:
    """Return median seconds of a forward and of a backward pass."""
    model = models.build(name).to(device)
    channels, side, classes = (3, 224, 1000) if name in IMAGENET else (1, 28, 10) if name == "lenet5" else (3, 32, 10)
    x = torch.randn(batch, channels, side, side, device=device)
    y = torch.randint(classes, (batch,), device=device)
    times = []
    for _ in range(WARM_UPS + rounds):
        model.zero_grad(set_to_none=True)
        begun = _now(device)
        loss = nn.functional.cross_entropy(model(x), y)
        middle = _now(device)
        loss.backward()  # type: ignore[no-untyped-call]
        times.append((middle - begun, _now(device) - middle))
    forward, backward = zip(*times[WARM_UPS:], strict=True)
    return statistics.median(forward), statistics.median(backward)


def spans_of(name: str) -> list[Span]:
    """Return a model's tensors one after another in a flat gradient."""
    with torch.device("meta"):
        parameters: list[tuple[str, Tensor]] = list(models.build(name).named_parameters())
    spans, start = [], 0
    for own, parameter in parameters:
        spans.append(Span(own, start, prod(parameter.shape)))
        start = spans[-1].stop
    return spans


def median_seconds(clock: Clock, call: Callable[[], object], rounds: int) -> float:
    """Return the median time of a call."""
    for _ in range(WARM_UPS):
        call()
    return statistics.median(clock.time(call)[0] for _ in range(rounds)) / 1e3


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
