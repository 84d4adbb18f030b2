"""Where the time of a step goes: P2's table 2; and how long passes take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn

from sparsync.collectives import DenseAllReduce
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
from sparsync_lab.papers.item import Result, RunContext
from sparsync_lab.papers.published import P2_ACCURACY
from sparsync_lab.report import Bar, BarChart, Figure, Row, Table

ROUNDS = 15
WARM_UPS = 3
TEN_GIGABIT = Network(Link(50e-6, 8 / 10e9))  # the papers' Ethernet: seconds of a round, and of a byte


def table_2_of_p2(context: RunContext) -> Result:
    """Measure forward, backward, exchange and coding of P2's six schemes: ResNet-18, layer by layer, 8 workers."""
    workers, network, rounds = 8, TEN_GIGABIT, 3 if context.quick else ROUNDS
    model, batch = ("resnet20", 4) if context.quick else ("resnet18", 128)
    forward, backward = pass_seconds(model, batch, context.device, rounds)
    clock = Clock(context.device)
    spans = spans_of(model)
    rows, bars = [], []
    columns: dict[str, list[float | int | str | None]] = {
        name: [] for name in ("scheme", "forward_ms", "backward_ms", "exchange_ms", "coding_ms")
    }
    for scheme, (title, *_) in P2_ACCURACY.items():
        context.log(title)
        coding, exchange = coding_seconds(scheme, spans, 0.01, workers, network, clock, rounds)
        parts = [1e3 * part for part in (forward, backward, exchange, coding)]
        rows.append(Row([title, *(f"{part:.2f} ms" for part in parts), f"{sum(parts):.2f} ms"]))
        bars.append(Bar(title, sum(parts), f"{sum(parts):.1f} ms"))
        measured: tuple[float | str, ...] = (scheme, *parts)
        for column, value in zip(columns.values(), measured, strict=True):
            column.append(value)
    headings = ["scheme", "forward", "backward", "exchange", "coding and decoding", "step"]
    return Result(
        [
            Table(
                f"A step of {CATALOGUE[model].title}, batch {batch}, 8 workers, k = 1 %, layer by layer", headings, rows
            )
        ],
        [Figure(BarChart("Time of a step", "milliseconds", bars, "ms"), "Nothing is overlapped, as in P2.")],
        [
            "P2 shows bars without numbers: on a K80 block-random-k alone is faster than standard SGD, as top-k spends "
            "its time on selection and random-k on random access.",
            "Forward, backward and coding (selecting, encoding, decoding all 8 workers' messages, their mean) are "
            "measured on one worker; exchange is the collectives' traffic at 10 Gbit/s, as in P2, and 50 µs a round.",
        ],
        columns,
    )


def coding_seconds(
    scheme: str, spans: Sequence[Span], density: float, workers: int, network: Network, clock: Clock, rounds: int
) -> tuple[float, float]:
    """Return seconds of coding and decoding, and of the exchange, of one of P2's schemes."""
    numel, device = spans[-1].stop, clock.device
    if scheme == "standard":
        layout = Layout.cut(spans, numel=numel, scope="global", density=1.0)
        cost = DenseAllReduce().traffic(layout, Wire(), workers)
        return 0.0, network.seconds(cost, workers)
    name, _, kind = scheme.partition("+")
    compressor: Compressor = registry.compressors()[name](density)
    collective = registry.collectives()[kind or "allgather"]()
    shared = collective.shared
    wire = Wire(indices="block") if compressor.block and not shared else Wire()
    worker = CompressorMethod(scheme, compressor, spans, "layer", device)
    layout, out = worker.layout, torch.zeros(numel, device=device)
    compressor_context = Context(shared=shared, whole=shared or wire.indices == "block")
    shape = shape_of(layout, torch.float32)
    grad = torch.randn(numel, device=device)

    def compress() -> SparseGrad:
        worker.number += 1
        return compressor.compress(
            grad, worker.memory(), layout, replace(compressor_context, step=worker.number), worker.state
        )

    def step() -> None:
        sent = compress()
        if shared:
            write_mean(out, [sent], workers)
            return
        header = wire.header(sent, 0, layout.id, layout.digest)
        message = wire.encode(sent, layout.segment_of, shape, header)
        write_mean(out, [wire.decode(message, layout.segment_of, shape) for _ in range(workers)], workers)

    cost = collective.traffic(layout, wire, workers)
    return median_seconds(clock, step, rounds), network.seconds(cost, workers)


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
