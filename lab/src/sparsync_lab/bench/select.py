"""What selecting entries with error feedback costs, beside the bare addition ``e += g``, measured in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from sparsync_lab.bench.bench_methods import (
    BenchMethod,
    MethodEntry,
    Sent,
    flat_methods,
    floors,
    methods_alone,
    scoped_methods,
)
from sparsync_lab.bench.clock import FLUSH, Clock, allocations, synchronizes
from sparsync_lab.bench.model_shapes import MODELS, shape_spans
from sparsync_lab.bench.preconditioned_methods import PreconditionedFloor, preconditioned_methods

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GRADIENTS, SHIFT = 256, 4096  # different gradients in turn: the same random numbers, each time this many further on
WARM_UP = 25  # steps before anything is timed
WATCHED_STEPS = 5  # steps that are watched for allocations and waiting
MOST_SECONDS = 15.0  # seconds of settling, and of timing, after which a slow method is asked for no more than it must
LEAST_STEPS = 3  # steps of each that it must
ALONE_FROM = 100_000_000  # from this size on, methods run one after another
ENTRY_BYTES = 72  # GPU memory for each entry of the gradient: residuals, gradients and what methods need beside


@dataclass(frozen=True)
class SelectBench:
    """What is measured.

    Args:
        device: cpu or cuda.
        size: length of the gradient; ignored for a ``model``.
        density: share of the entries to send.
        dtype: of the gradient, fp32 or bf16; the residual is fp32.
        rounds: how often every method is timed.
        model: compare scopes over this model's tensors, instead of methods over one flat gradient.
        threads: on a CPU; one is what a worker has that shares its machine.
        alone: selection in plain PyTorch without error feedback, instead of all methods with it.
    """

    device: str = "cpu"
    size: int = 1_000_000
    density: float = 0.001
    dtype: str = "fp32"
    rounds: int = 30
    model: str = ""
    threads: int = 1
    alone: bool = False

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is cuda, but torch finds no GPU here")
        if not 1000 <= self.size <= 2_000_000_000:
            raise ValueError(f"size must be from 1,000 to 2,000,000,000, got {self.size:,}")
        if not 0 < self.density <= 0.5:
            raise ValueError(f"density must be above 0 and at most 0.5, got {self.density:g}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be {' or '.join(DTYPES)}, got {self.dtype}")
        if self.rounds < LEAST_STEPS:
            raise ValueError(f"rounds must be {LEAST_STEPS} or more, got {self.rounds}")
        if self.threads < 1:
            raise ValueError(f"threads must be 1 or more, got {self.threads}")
        if self.device == "cuda" and not fits(self.numel):
            raise ValueError(f"size {self.numel:,} needs more memory than the GPU has free")

    @property
    def numel(self) -> int:
        return MODELS[self.model][1] if self.model else self.size

    @property
    def entries(self) -> list[MethodEntry]:
        """Return what is timed beside the floors."""
        device = torch.device(self.device)
        if self.model:
            return scoped_methods(shape_spans(self.model), self.density, device)
        if self.alone:
            return methods_alone(self.size, self.density, device)
        return [
            *flat_methods(self.size, self.density, device),
            *preconditioned_methods(self.size, self.density, device),
        ]


def fits(numel: int) -> bool:
    """Return whether the GPU has memory for a gradient of this size."""
    return ENTRY_BYTES * numel + FLUSH <= torch.cuda.mem_get_info()[0]


@dataclass
class SelectRow:
    """One method's figures.

    ``times`` are in milliseconds, ``floors`` those of the floor it is compared with, measured beside it; ``host`` is
    how long a call kept the host. ``count`` is what was sent over k, ``energy`` its sum of squares over exact top-k's.
    ``allocations`` and ``syncs`` (0, or yes) are of ``WATCHED_STEPS`` steps on a GPU.
    """

    bench: SelectBench
    method: str
    family: str
    scope: str
    floor: str
    warmed_up: int = 0
    times: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    floors: list[float] = field(default_factory=list)
    count: float | None = None
    energy: float | None = None
    allocations: int | None = None
    syncs: str = ""

    @classmethod
    def of(cls, bench: SelectBench, method: BenchMethod) -> SelectRow:
        return cls(bench, method.name, method.family, method.scope, method.floor)

    def ms(self, share: float = 0.5) -> float:
        """Return a quantile of the times."""
        return quantile(self.times, share)

    @property
    def ratio(self) -> float:
        """Return the median time over that of the floor."""
        return self.ms() / quantile(self.floors, 0.5)


def quantile(times: Sequence[float], share: float) -> float:
    return float(torch.tensor(times, dtype=torch.float64).quantile(share))


class TimeBudget:
    """Seconds that may be spent, from now on."""

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"budget must be above 0 seconds, got {seconds:g}")
        self.end = time.monotonic() + seconds

    @property
    def spent(self) -> bool:
        return time.monotonic() > self.end


class SelectSession:
    """Gradients, floors and a clock: where methods are timed."""

    def __init__(self, bench: SelectBench, budget: TimeBudget) -> None:
        self.bench, self.budget = bench, budget
        self.device = torch.device(bench.device)
        rng = torch.Generator(self.device).manual_seed(0)
        many = bench.numel + GRADIENTS * SHIFT
        bank = torch.randn(many, generator=rng, device=self.device, dtype=DTYPES[bench.dtype])
        self.grads = [bank[i * SHIFT : i * SHIFT + bench.numel] for i in range(GRADIENTS)]
        self.spare = torch.empty_like(self.grads[0])
        self.clock, self.turn = Clock(self.device), 0
        own = [*floors(bench.numel, self.device), PreconditionedFloor(bench.numel, self.device)]
        self.floors = [(SelectRow.of(bench, floor), floor) for floor in own]
        for row, floor in self.floors:  # memory is there only once it has been written to
            while row.warmed_up < LEAST_STEPS:
                self.step(row, floor)

    def gradient(self, method: BenchMethod) -> Tensor:
        """Return the next gradient, or a copy of it."""
        self.turn += 1
        grad = self.grads[self.turn % GRADIENTS]
        return self.spare.copy_(grad) if method.copied else grad

    def step(self, row: SelectRow, method: BenchMethod) -> None:
        method.step(self.gradient(method))
        row.warmed_up += 1

    def warm_up(self, method: BenchMethod) -> SelectRow:
        """Step until thresholds know the gradient, then look once at what is sent."""
        row, begun = SelectRow.of(self.bench, method), time.monotonic()
        while row.warmed_up < WARM_UP and (row.warmed_up < LEAST_STEPS or time.monotonic() - begun < MOST_SECONDS):
            self.step(row, method)
        grad = self.gradient(method)
        total = method.residual + method.came_in(grad.clone())
        sent = method.step(grad)
        if sent is not None:
            row.count, row.energy = selection_quality(total, sent, method.k)
        method.warmed_up(self.spare)
        return row

    def rounds(self, running: Sequence[tuple[SelectRow, BenchMethod]], rounds: int) -> None:
        """Time them in turn, round after round; a slow one sits out the later rounds."""
        for turn in range(rounds):
            for row, method in running:
                if turn < LEAST_STEPS or (sum(row.times) < 1e3 * MOST_SECONDS and not self.budget.spent):
                    took, host = self.clock.time(partial(method.step, self.gradient(method)))
                    row.times.append(took)
                    row.host.append(host)

    def finish(self, row: SelectRow, method: BenchMethod, before: int = 0) -> SelectRow:
        """Compare with the floor, whose first ``before`` times were measured too long ago; on a GPU, see what a step
        asks of it."""
        row.floors = next(floor.times[before:] for floor, _ in self.floors if floor.method == row.floor)
        if self.device.type == "cuda":
            steps = WATCHED_STEPS * [lambda: method.step(self.gradient(method))]
            row.allocations, row.syncs = allocations(steps), "yes" if synchronizes(steps) else "0"
        return row


def selection_quality(total: Tensor, sent: Sent, k: int) -> tuple[float, float]:
    """Return how many entries of ``total`` were sent, over k, and their energy over that of the k largest."""
    values, count = sent
    best = torch.topk(total.abs_(), k, sorted=False).values.double().square().sum()
    return int(count) / k, float(values.double().square().sum() / best)


def measure(
    bench: SelectBench, budget: TimeBudget, progress: Callable[[int], None] = lambda done: None
) -> tuple[list[SelectRow], list[str]]:
    """Time the floors and every method, as far as the budget goes; return their rows and the names of those it did not
    reach.

    ``progress`` hears of every method twice: when it has settled and when it has been timed.
    """
    names = [name for name, _ in bench.entries]
    if budget.spent:
        return [], names
    threads = torch.get_num_threads()
    torch.set_num_threads(bench.threads)
    try:
        session = SelectSession(bench, budget)
        rows = list((_alone if bench.numel >= ALONE_FROM else _interleaved)(session, progress))
    finally:
        torch.set_num_threads(threads)
    own = [row for row, _ in session.floors]
    for row in own:
        row.floors = own[0].times
    return [*own, *rows], names[len(rows) :]


def _interleaved(session: SelectSession, progress: Callable[[int], None]) -> Iterator[SelectRow]:
    """Time every method in every round and yield its row."""
    running: list[tuple[SelectRow, BenchMethod]] = []
    for _, make in session.bench.entries:
        if running and session.budget.spent:
            break
        method = make()
        running.append((session.warm_up(method), method))
        progress(1)
    session.rounds([*session.floors, *running], session.bench.rounds)
    for row, method in running:
        yield session.finish(row, method)
        progress(1)


def _alone(session: SelectSession, progress: Callable[[int], None]) -> Iterator[SelectRow]:
    """Time one method after another, so that few residuals are there at a time, the floors before and after each; yield
    its row."""
    rounds = session.bench.rounds
    for i, (_, make) in enumerate(session.bench.entries):
        if i and session.budget.spent:
            break
        before = len(session.floors[0][0].times)
        method = make()
        row = session.warm_up(method)
        progress(1)
        session.rounds(session.floors, rounds // 2)
        session.rounds([(row, method)], rounds)
        session.rounds(session.floors, rounds - rounds // 2)
        yield session.finish(row, method, before)
        del method
        progress(1)
