"""What the hook adds to a training step, against plain DDP, measured side by side in one run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync_lab.models import mlp
from sparsync_lab.training.local_workers import Worker, run_jobs
from sparsync_lab.training.settings import dense_bytes

PLAIN = "plain DDP"  # the method that is no method of ours
RECIPE = "recipe "
# (method, scope); plain DDP first: the others are compared with it.
CASES = (
    (PLAIN, ""),
    ("none", "bucket"),
    ("topk", "layer"),
    ("threshold", "layer"),
    ("threshold", "bucket"),
    ("threshold", "global"),
    ("recipe balanced", "global"),  # with a density of its own
)
WARM_UP = 3  # rounds that are not counted


@dataclass(frozen=True)
class StepBench:
    """What is measured.

    Args:
        parameters: size of the model, about; an MLP of four equal layers.
        rounds: steps of every method; one round is one step of each.
        batch: samples per worker and step.
        density: share of the entries to send, of methods that have none of their own.
    """

    parameters: int = 5_000_000
    rounds: int = 60
    batch: int = 32
    density: float = 0.001

    def __post_init__(self) -> None:
        if not 10_000 <= self.parameters <= 1_000_000_000:
            raise ValueError(f"parameters must be from 10,000 to 1,000,000,000, got {self.parameters:,}")
        if self.rounds < 1:
            raise ValueError(f"rounds must be 1 or more, got {self.rounds}")
        if self.batch < 1:
            raise ValueError(f"batch must be 1 or more, got {self.batch}")
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {self.density:g}")

    @property
    def width(self) -> int:
        return round(math.sqrt(self.parameters / 4))


@dataclass(frozen=True)
class CpuStepRow:
    """One method's figures; times are milliseconds: (20th percentile, median, 80th percentile) or the median alone.

    ``asked``: the density that the method was to send at; ``density``: what it sent in the last step.
    """

    method: str
    scope: str
    parameters: int
    step_ms: tuple[float, float, float]
    compress_ms: float
    exchange_ms: float
    decode_ms: float
    sent_bytes: float
    handed_bytes: float
    asked: float
    density: float


def measure_all(
    benches: Sequence[StepBench], workers: int, progress: Callable[[int], None]
) -> list[tuple[StepBench, list[CpuStepRow]]]:
    """Measure each of ``benches`` on ``workers`` processes."""
    if not 1 <= workers <= 64:
        raise ValueError(f"workers must be from 1 to 64, got {workers}")
    return list(zip(benches, run_jobs(measure, workers, benches, progress), strict=True))


class CpuTimedMethod:
    """A method and its model, timed step by step on the CPU."""

    def __init__(self, method: str, scope: str, bench: StepBench) -> None:
        self.method, self.scope = method, scope
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(mlp([bench.width] * 5))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01)
        self.sync = None
        if method.startswith(RECIPE):
            self.sync = sparsync.attach(self.ddp, recipe=method.removeprefix(RECIPE), optimizer=self.optimizer)
        elif method != PLAIN:
            self.sync = sparsync.attach(self.ddp, method, scope=scope, density=bench.density)
        self.steps: list[float] = []
        self.parts: list[tuple[float, float, float]] = []

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        dist.barrier()  # so that a rank that comes late is not counted
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.ddp(x), y).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.steps.append(1e3 * (time.perf_counter() - begun))
        if self.sync is not None:
            last = self.sync.stats().step
            self.parts.append((1e3 * last.compress_s, 1e3 * last.exchange_s, 1e3 * last.decode_s))

    def close(self, workers: int) -> CpuStepRow:
        numel = sum(p.numel() for p in self.ddp.parameters())
        low, median, high = np.percentile(self.steps[WARM_UP:], [20, 50, 80]).tolist()
        compress = exchange = decode = 0.0
        sent, handed, asked, density = dense_bytes(numel, workers), 4.0 * numel, 1.0, 1.0
        if self.sync is not None:
            if not self.sync.plan.compressor.dense:
                asked = self.sync.plan.density(0)  # the same in every step
            compress, exchange, decode = np.median(self.parts[WARM_UP:], axis=0).tolist()
            last = self.sync.stats().step
            sent, handed, density = last.traffic, float(last.bytes), last.density
            self.sync.detach()
        times = (low, median, high)
        return CpuStepRow(
            self.method, self.scope, numel, times, compress, exchange, decode, sent, handed, asked, density
        )


def measure(worker: Worker, bench: StepBench) -> list[CpuStepRow]:
    """Time all methods in turn, a step each, round after round; who goes first changes with the round."""
    torch.manual_seed(worker.rank)
    x, y = torch.randn(bench.batch, bench.width), torch.randn(bench.batch, bench.width)
    timed = [CpuTimedMethod(method, scope, bench) for method, scope in CASES]
    for turn in range(WARM_UP + bench.rounds):
        first = turn % len(timed)
        for method_timer in timed[first:] + timed[:first]:
            method_timer.step(x, y)
        worker.report(1)
    return [method_timer.close(worker.count) for method_timer in timed]
