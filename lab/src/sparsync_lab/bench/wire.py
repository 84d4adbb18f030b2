"""What coding indices saves, and what it costs beside selecting them, measured side by side in one run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from sparsync.collectives.base import MeanOf, shape_of
from sparsync.compressors import Context, TopK
from sparsync.kernels import Memory
from sparsync.kernels.checksum import checksum_on_host
from sparsync.layout import Layout, Span
from sparsync.wire import INDEX_CODECS, Wire

CODED = ("int", "ef")
WARM_UP = 2  # rounds that are not counted
WORKERS = 4  # whose messages are read together
T = TypeVar("T")


@dataclass(frozen=True)
class WireBench:
    """What is measured.

    Args:
        entries: length of the gradient.
        density: share of the entries to send.
        rounds: how often everything is timed; the median counts.
    """

    entries: int = 1_000_000
    density: float = 0.001
    rounds: int = 15

    def __post_init__(self) -> None:
        if not 1 <= self.entries <= 1_000_000_000:
            raise ValueError(f"entries must be from 1 to 1,000,000,000, got {self.entries:,}")
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {self.density:g}")
        if self.rounds < 1:
            raise ValueError(f"rounds must be 1 or more, got {self.rounds}")


@dataclass(frozen=True)
class WireRow:
    """One index codec's figures: bits an index, the fewest any code could take on average, and milliseconds.

    ``encode_ms`` and ``decode_ms`` are of a whole message with fp32 values; ``select_ms`` is exact top-k of the same
    gradient. ``read_ms`` is decoding a message of every worker and writing the mean, ``checksum_ms`` their checksums;
    both a message.
    """

    indices: str
    sent: int
    bits: float
    bound: float
    encode_ms: float
    decode_ms: float
    select_ms: float
    read_ms: float
    checksum_ms: float


def measure(bench: WireBench, progress: Callable[[int], None] = lambda done: None) -> list[WireRow]:
    """Time all index codecs in turn, round after round, on one thread: what a worker that shares its machine has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(bench, progress)
    finally:
        torch.set_num_threads(threads)


def _measure(bench: WireBench, progress: Callable[[int], None]) -> list[WireRow]:
    compressor = TopK(bench.density)
    spans = [Span("gradient", 0, bench.entries)]
    layout = Layout.cut(spans, numel=bench.entries, scope="layer", density=bench.density)
    shape = shape_of(layout, torch.float32)
    grad = torch.randn(bench.entries, generator=torch.Generator().manual_seed(0))
    residual = torch.zeros_like(grad)
    selects: list[float] = []
    encodes: dict[str, list[float]] = {name: [] for name in CODED}
    decodes: dict[str, list[float]] = {name: [] for name in CODED}
    reads: dict[str, list[float]] = {name: [] for name in CODED}
    checks: dict[str, list[float]] = {name: [] for name in CODED}
    mean = torch.zeros_like(grad)

    def read(wire: Wire, rows: Tensor) -> None:
        MeanOf([wire.decode(row, layout.segment_of, shape) for row in rows], WORKERS).write(mean)

    for turn in range(WARM_UP + bench.rounds):
        residual.zero_()
        memory = Memory(residual, residual)
        sent = _timed(selects, partial(compressor.compress, grad, memory, layout, Context(), {}))
        for name in CODED:
            wire = Wire(indices=name)
            header = wire.header(sent, turn, layout.id, layout.digest)
            message = _timed(encodes[name], partial(wire.encode, sent, layout.segment_of, shape, header))
            _timed(decodes[name], partial(wire.decode, message, layout.segment_of, shape))
            rows = message.repeat(WORKERS, 1)
            _timed(checks[name], partial(checksum_on_host, rows.numpy()))
            _timed(reads[name], partial(read, wire, rows))
        progress(1)

    def middle(times: list[float]) -> float:
        return 1e3 * median(times[WARM_UP:])

    k = layout.capacity
    return [
        WireRow(
            name,
            k,
            32 * codec.words(shape) / k,
            fewest_bits(bench.entries, k) / k,
            middle(encodes[name]),
            middle(decodes[name]),
            middle(selects),
            middle(reads[name]) / WORKERS,
            middle(checks[name]) / WORKERS,
        )
        for name, codec in ((name, INDEX_CODECS[name]) for name in CODED)
    ]


def fewest_bits(n: int, k: int) -> float:
    """Return log2 of the number of ways to choose ``k`` of ``n``."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def _timed(times: list[float], act: Callable[[], T]) -> T:
    begun = time.perf_counter()
    result = act()
    times.append(time.perf_counter() - begun)
    return result
