"""Compare the bytes that collectives put on the network with those that their ``traffic`` predicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from sparsync.collectives import Balanced, Channel, Collective
from sparsync.compressors import Context, RandomK, TopK
from sparsync.config import resolve
from sparsync.config.registry import COLLECTIVES
from sparsync.kernels import Memory
from sparsync.layout import Layout, Span
from sparsync.wire import Wire
from sparsync.workspace import Workspace
from sparsync_lab.bench import loopback
from sparsync_lab.bench.loopback import SETTLED, InterfaceCount
from sparsync_lab.training.local_workers import Worker, run_jobs

# (collective, values, indices)
CASES = (
    ("allgather", "fp32", "int"),
    ("allgather", "fp32", "ef"),
    ("allgather", "fp16", "int"),
    ("allgather", "sign", "int"),
    ("gtopk", "fp32", "int"),
    ("balanced", "fp32", "int"),
    ("shared", "fp32", "int"),
    ("dense", "fp32", "int"),
)
RECIPES_TOO = ("default", "balanced")  # with the density (of 16 workers), share and codecs that they have
TOLERANCE = 0.1  # by which bytes on the interface may differ from ``traffic``
SMALL = 32  # entries a worker in the exchange that shows what does not depend on size


@dataclass(frozen=True)
class TrafficBench:
    """What is measured.

    Args:
        collective, values, indices: as ``attach`` takes them.
        entries: length of the gradient.
        density: share of the entries to send; whatever it is, ``"dense"`` sends all.
        exchanges: how many are counted.
        share: as ``Balanced`` takes it; of others none.
        recipe: whose settings these are, if they are one's.
    """

    collective: str = "allgather"
    values: str = "fp32"
    indices: str = "int"
    entries: int = 1_000_000
    density: float = 0.001
    exchanges: int = 100
    share: float | None = None
    recipe: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.entries <= 1_000_000_000:
            raise ValueError(f"entries must be from 1 to 1,000,000,000, got {self.entries:,}")
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {self.density:g}")
        if self.exchanges < 1:
            raise ValueError(f"exchanges must be 1 or more, got {self.exchanges}")

    @property
    def wire(self) -> Wire:
        return Wire(self.values, self.indices)

    @property
    def method(self) -> Collective:
        kind: Callable[..., Collective] = COLLECTIVES[self.collective]
        return kind() if self.share is None else kind(self.share)

    @property
    def layout(self) -> Layout:
        spans = [Span("gradient", 0, self.entries)]
        return Layout.cut(spans, numel=self.entries, scope="layer", density=self.density)

    def traffic(self, workers: int) -> float:
        """Return bytes that all workers put on the network in all exchanges, as the collective's ``traffic`` has it."""
        return self.exchanges * workers * self.method.traffic(self.layout, self.wire, workers).mean_bytes

    def small(self, workers: int) -> TrafficBench:
        """Return the same bench with the smallest messages that leave no worker an empty part."""
        return replace(self, entries=SMALL * workers, density=1.0)


@dataclass(frozen=True)
class TrafficRow:
    """What the interface counted for one bench.

    Args:
        count: during the exchanges, and one barrier.
        control: during one barrier alone.
        small: during as many exchanges of ``bench.small``, and one barrier.
        handed: bytes of tensors that the workers' channels handed to ``torch.distributed``.
        header: bytes the interface counts for every packet.
    """

    bench: TrafficBench
    workers: int
    count: InterfaceCount
    control: InterfaceCount
    small: InterfaceCount
    handed: int
    header: int

    @property
    def payload(self) -> int:
        """Return bytes on the interface without packet headers and barrier."""
        return self._payload(self.count)

    @property
    def framing(self) -> float:
        """Return the bytes of payload that are no tensor's and do not depend on size: the backend's framing."""
        return self._payload(self.small) - self.bench.small(self.workers).traffic(self.workers)

    @property
    def ratio(self) -> float:
        """Return the payload over what ``traffic`` predicts."""
        return self.payload / self.bench.traffic(self.workers)

    @property
    def tensor_ratio(self) -> float:
        """Return the same ratio without framing."""
        return (self.payload - self.framing) / self.bench.traffic(self.workers)

    @property
    def agrees(self) -> bool:
        return abs(self.tensor_ratio - 1) <= TOLERANCE

    def _payload(self, count: InterfaceCount) -> int:
        more = count.since(self.control)
        return more.bytes - self.header * more.packets


def benches_for(entries: int, densities: Sequence[float], exchanges: int) -> list[TrafficBench]:
    """Return every case at every density, the dense one once; and our recipes as they are."""
    cases = [
        TrafficBench(*case, entries, density, exchanges)
        for case in CASES
        for density in ([1.0] if case[0] == "dense" else densities)
    ]
    return [*cases, *(_bench_of(recipe, entries, exchanges) for recipe in RECIPES_TOO)]


def _bench_of(recipe: str, entries: int, exchanges: int) -> TrafficBench:
    plan = resolve(recipe, momentum="keep")
    (name,) = [name for name, kind in COLLECTIVES.items() if kind is type(plan.collective)]
    share = plan.collective.share if isinstance(plan.collective, Balanced) else None
    return TrafficBench(name, plan.values, plan.indices, entries, plan.compressor.density, exchanges, share, recipe)


def measure_all(
    benches: Sequence[TrafficBench], worlds: Sequence[int], progress: Callable[[int], None]
) -> list[TrafficRow]:
    """Measure each of ``benches`` on each number of worker processes, on this process's loopback interface."""
    header, rows = loopback.header_bytes(), []
    for workers in worlds:
        measured = run_jobs(measure, workers, benches, progress, preload=["sparsync"])  # no DDP here
        for bench, (count, control, small, handed) in zip(benches, measured, strict=True):
            rows.append(TrafficRow(bench, workers, count, control, small, handed, header))
    return rows


def check_worker_count(workers: int) -> None:
    if not 2 <= workers <= 64:
        raise ValueError(f"workers must be from 2 to 64, got {workers}")


def measure(worker: Worker, bench: TrafficBench) -> tuple[InterfaceCount, InterfaceCount, InterfaceCount, int]:
    """Count the bytes of the exchanges, of a barrier and of small exchanges; also return what all channels handed over
    in the first."""
    channel = Channel(dist.group.WORLD, bench.wire)
    exchange, exchange_small = _exchanger(bench, channel), _exchanger(bench.small(worker.count), channel)
    exchange(1)  # connections are made when first used
    begin = _counts_when_idle(worker.rank)
    idle = _counts_when_idle(worker.rank)
    exchange_small(bench.exchanges)
    after_small = _counts_when_idle(worker.rank)
    channel.take_count()
    exchange(bench.exchanges)
    end = _counts_when_idle(worker.rank)
    handed = torch.tensor(channel.take_count())
    dist.all_reduce(handed)
    channel.close()
    worker.report(1)
    return end.since(after_small), idle.since(begin), after_small.since(idle), int(handed)


def _exchanger(bench: TrafficBench, channel: Channel) -> Callable[[int], None]:
    """Return a function that exchanges entries of a random gradient so many times."""
    layout, method = bench.layout, bench.method
    grad = torch.randn(bench.entries, generator=torch.Generator().manual_seed(channel.rank))
    residual = torch.zeros_like(grad)
    compressor = RandomK(bench.density) if method.shared else TopK(bench.density)
    method.check(bench.wire, compressor.dense, compressor.random)

    context = Context(rank=channel.rank, rounding=bench.wire.codec.round, shared=method.shared)

    def exchange(times: int) -> None:
        for step in range(times):
            ctx = replace(context, step=step)
            sent = compressor.compress(grad, Memory(residual, residual), layout, ctx, {})
            method.reduce(sent, layout, channel, Workspace())

    return exchange


def _counts_when_idle(rank: int) -> InterfaceCount:
    """Return the counters after a barrier, when nobody sends: rank 0 reads them while the others still sleep."""
    dist.barrier()
    time.sleep(SETTLED if rank == 0 else 2 * SETTLED)
    return loopback.sent()
