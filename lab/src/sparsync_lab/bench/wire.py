"""What messages cost beside selecting their entries, and what coding indices saves, side by side in one run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from sparsync.collectives.allgather import MeanOfRows
from sparsync.collectives.base import MeanOf, shape_of
from sparsync.compressors import Context, TopK
from sparsync.kernels import Memory
from sparsync.kernels.checksum import checksum_on_host
from sparsync.layout import Layout, Span
from sparsync.sparse import SparseGrad
from sparsync.wire import INDEX_CODECS, Wire

FORMATS = (("int", "fp32"), ("ef", "sign"))
WARM_UP = 1  # rounds that are not counted
WORKERS = (4, 16, 64)  # whose messages are read together


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
    """One format's figures: bits an index, the fewest any code could take on average, and milliseconds of CPU time.

    ``encode_ms`` is of a whole message; ``read_ms`` is decoding the messages of all workers and writing their mean,
    ``clear_ms`` clearing the mean's place alone. What plain PyTorch takes for the same stands beside them.
    ``checksum_ms`` is of all messages' checksums, ``select_ms`` exact top-k of as large a gradient.
    """

    indices: str
    values: str
    workers: int
    sent: int
    bits: float
    bound: float
    encode_ms: float
    plain_encode_ms: float
    read_ms: float
    plain_read_ms: float
    clear_ms: float
    checksum_ms: float
    select_ms: float


def measure(
    bench: WireBench, workers: Sequence[int] = WORKERS, progress: Callable[[int], None] = lambda done: None
) -> list[WireRow]:
    """Time all formats in turn, round after round, on one thread: what a worker that shares its machine has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(bench, sorted(workers), progress)
    finally:
        torch.set_num_threads(threads)


def _measure(bench: WireBench, workers: Sequence[int], progress: Callable[[int], None]) -> list[WireRow]:
    spans = [Span("gradient", 0, bench.entries)]
    layout = Layout.cut(spans, numel=bench.entries, scope="layer", density=bench.density)
    shape, compressor, rng = shape_of(layout, torch.float32), TopK(bench.density), torch.Generator().manual_seed(0)
    grad, mean = torch.randn(bench.entries, generator=rng), torch.zeros(bench.entries)
    residual = torch.zeros_like(grad)
    sents = [random_entries(layout, rng) for _ in range(workers[-1])]

    def plain_read(wire: Wire, rows: Tensor) -> None:
        MeanOf([wire.decode_plain(row, layout.segment_of, shape) for row in rows], len(rows)).write(mean)

    def select() -> None:
        compressor.compress(grad, Memory(residual, residual), layout, Context(), {})

    calls: dict[tuple[object, ...], Callable[[], object]] = {("clear",): mean.zero_, ("select",): select}
    for indices, values in FORMATS:
        wire = Wire(values, indices)
        header = wire.header(sents[0], 0, layout.id, layout.digest)
        message = sents[0], layout.segment_of, shape, header
        every = torch.stack([wire.encode(sent, *message[1:]) for sent in sents])
        calls[indices, "encode"] = partial(wire.encode, *message)
        for count in workers:
            rows = every[:count]
            calls[indices, count, "read"] = partial(MeanOfRows(rows, wire, layout, shape).write, mean)
            calls[indices, count, "plain read"] = partial(plain_read, wire, rows)
            calls[indices, count, "checksum"] = partial(checksum_on_host, rows.numpy())
        calls[indices, "plain encode"] = partial(wire.encode_plain, *message)  # as far from the last time as the other
    times: dict[tuple[object, ...], list[float]] = {name: [] for name in calls}
    for _ in range(WARM_UP + bench.rounds):
        residual.zero_()
        for name, call in calls.items():
            begun = time.thread_time()  # others may use the machine meanwhile
            call()
            times[name].append(time.thread_time() - begun)
        progress(1)
    ms = {name: 1e3 * median(taken[WARM_UP:]) for name, taken in times.items()}
    k = layout.capacity
    return [
        WireRow(
            indices,
            values,
            count,
            k,
            32 * INDEX_CODECS[indices].words(shape) / k,
            fewest_bits(bench.entries, k) / k,
            ms[indices, "encode"],
            ms[indices, "plain encode"],
            ms[indices, count, "read"],
            ms[indices, count, "plain read"],
            ms[("clear",)],
            ms[indices, count, "checksum"],
            ms[("select",)],
        )
        for indices, values in FORMATS
        for count in workers
    ]


def random_entries(layout: Layout, rng: torch.Generator) -> SparseGrad:
    """Return a full message's entries, which signs can tell: all of one size."""
    k = layout.capacity
    gaps = torch.empty(k + 1, dtype=torch.float64).exponential_(generator=rng).cumsum(0)  # as random numbers, sorted
    indices = (gaps[:k] / gaps[k] * (layout.numel - k)).long() + torch.arange(k)  # of which none comes twice
    values = torch.randint(2, indices.shape, generator=rng).mul_(2).sub_(1).float()
    none = torch.zeros((), dtype=torch.int32)
    return SparseGrad(indices, values, torch.tensor(indices.numel()), layout.numel, none, none)


def fewest_bits(n: int, k: int) -> float:
    """Return log2 of the number of ways to choose ``k`` of ``n``."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
