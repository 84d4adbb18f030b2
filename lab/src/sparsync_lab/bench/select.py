"""What selecting entries with error feedback costs, beside the bare addition ``e += g``, measured in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from sparsync_lab.bench.bench_methods import Contender, Entry, Sent, by_scope, contenders, floors
from sparsync_lab.bench.clock import FLUSH, Clock, allocations, waits
from sparsync_lab.bench.model_shapes import MODELS, spans_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GRADIENTS, SHIFT = 256, 4096  # different gradients in turn: the same random numbers, each time this many further on
SETTLE = 25  # steps before anything is timed
AUDIT = 5  # steps that are watched for allocations and waiting
PATIENCE = 15.0  # seconds of settling, and of timing, after which a slow method is asked for no more than it must
FEWEST = 3  # steps of each that it must
ALONE = 100_000_000  # from this size on, methods run one after another
ENTRY_BYTES = 64  # GPU memory for each entry of the gradient: residuals, gradients and what methods need beside


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
    """

    device: str = "cpu"
    size: int = 1_000_000
    density: float = 0.001
    dtype: str = "fp32"
    rounds: int = 30
    model: str = ""
    threads: int = 1

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
        if self.rounds < FEWEST:
            raise ValueError(f"rounds must be {FEWEST} or more, got {self.rounds}")
        if self.threads < 1:
            raise ValueError(f"threads must be 1 or more, got {self.threads}")
        if self.device == "cuda" and not fits(self.numel):
            raise ValueError(f"size {self.numel:,} needs more memory than the GPU has free")

    @property
    def numel(self) -> int:
        return MODELS[self.model][1] if self.model else self.size

    @property
    def entries(self) -> list[Entry]:
        """What is timed beside the floors."""
        device = torch.device(self.device)
        if self.model:
            return by_scope(spans_of(self.model), self.density, device)
        return contenders(self.size, self.density, device)


def fits(numel: int) -> bool:
    """Whether the GPU has memory for a gradient of this size."""
    return ENTRY_BYTES * numel + FLUSH <= torch.cuda.mem_get_info()[0]


@dataclass
class Row:
    """One method's figures.

    ``times`` are in milliseconds, ``floors`` those of the floor it is compared with, measured beside it; ``host`` is
    how long a call kept the host. ``count`` is what was sent over k, ``energy`` its sum of squares over exact top-k's.
    ``allocations`` and ``syncs`` (0, or yes) are of ``AUDIT`` steps on a GPU.
    """

    bench: SelectBench
    method: str
    family: str
    scope: str
    floor: str
    settled: int = 0
    times: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    floors: list[float] = field(default_factory=list)
    count: float | None = None
    energy: float | None = None
    allocations: int | None = None
    syncs: str = ""

    @classmethod
    def of(cls, bench: SelectBench, contender: Contender) -> Row:
        return cls(bench, contender.name, contender.family, contender.scope, contender.floor)

    def ms(self, share: float = 0.5) -> float:
        """A quantile of the times."""
        return quantile(self.times, share)

    @property
    def ratio(self) -> float:
        """To the floor."""
        return self.ms() / quantile(self.floors, 0.5)


def quantile(times: Sequence[float], share: float) -> float:
    return float(torch.tensor(times, dtype=torch.float64).quantile(share))


class Budget:
    """Seconds that may be spent, from now on."""

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"budget must be above 0 seconds, got {seconds:g}")
        self.end = time.monotonic() + seconds

    @property
    def spent(self) -> bool:
        return time.monotonic() > self.end


class Course:
    """Gradients, floors and a clock: where contenders run."""

    def __init__(self, bench: SelectBench, budget: Budget) -> None:
        self.bench, self.budget = bench, budget
        self.device = torch.device(bench.device)
        rng = torch.Generator(self.device).manual_seed(0)
        many = bench.numel + GRADIENTS * SHIFT
        bank = torch.randn(many, generator=rng, device=self.device, dtype=DTYPES[bench.dtype])
        self.grads = [bank[i * SHIFT : i * SHIFT + bench.numel] for i in range(GRADIENTS)]
        self.spare = torch.empty_like(self.grads[0])
        self.clock, self.turn = Clock(self.device), 0
        self.floors = [(Row.of(bench, floor), floor) for floor in floors(bench.numel, self.device)]
        for row, floor in self.floors:  # memory is there only once it has been written to
            while row.settled < FEWEST:
                self.step(row, floor)

    def gradient(self, contender: Contender) -> Tensor:
        """The next one."""
        self.turn += 1
        grad = self.grads[self.turn % GRADIENTS]
        return self.spare.copy_(grad) if contender.copied else grad

    def step(self, row: Row, contender: Contender) -> None:
        contender.step(self.gradient(contender))
        row.settled += 1

    def settle(self, contender: Contender) -> Row:
        """Step until thresholds know the gradient, then look once at what is sent."""
        row, begun = Row.of(self.bench, contender), time.monotonic()
        while row.settled < SETTLE and (row.settled < FEWEST or time.monotonic() - begun < PATIENCE):
            self.step(row, contender)
        grad = self.gradient(contender)
        came = contender.residual + grad
        sent = contender.step(grad)
        if sent is not None:
            row.count, row.energy = quality(came, sent, contender.k)
        contender.settled(self.spare)
        return row

    def rounds(self, running: Sequence[tuple[Row, Contender]], rounds: int) -> None:
        """Time them in turn, round after round; a slow one sits out the later rounds."""
        for turn in range(rounds):
            for row, contender in running:
                if turn < FEWEST or (sum(row.times) < 1e3 * PATIENCE and not self.budget.spent):
                    took, host = self.clock.time(partial(contender.step, self.gradient(contender)))
                    row.times.append(took)
                    row.host.append(host)

    def finish(self, row: Row, contender: Contender, before: int = 0) -> Row:
        """Compare with the floor, whose first ``before`` times were measured too long ago; on a GPU, see what a step
        asks of it."""
        row.floors = next(floor.times[before:] for floor, _ in self.floors if floor.method == row.floor)
        if self.device.type == "cuda":
            steps = AUDIT * [lambda: contender.step(self.gradient(contender))]
            row.allocations, row.syncs = allocations(steps), "yes" if waits(steps) else "0"
        return row


def quality(came: Tensor, sent: Sent, k: int) -> tuple[float, float]:
    """How many entries of ``came`` were sent, over k, and their energy over that of the k largest."""
    values, count = sent
    best = torch.topk(came.abs_(), k, sorted=False).values.double().square().sum()
    return int(count) / k, float(values.double().square().sum() / best)


def measure(
    bench: SelectBench, budget: Budget, progress: Callable[[int], None] = lambda done: None
) -> tuple[list[Row], list[str]]:
    """The floors and every method, as far as the budget goes; and the names of those it did not reach.

    ``progress`` hears of every method twice: when it has settled and when it has been timed.
    """
    names = [name for name, _ in bench.entries]
    if budget.spent:
        return [], names
    threads = torch.get_num_threads()
    torch.set_num_threads(bench.threads)
    try:
        course = Course(bench, budget)
        rows = list((_alone if bench.numel >= ALONE else _interleaved)(course, progress))
    finally:
        torch.set_num_threads(threads)
    own = [row for row, _ in course.floors]
    for row in own:
        row.floors = own[0].times
    return [*own, *rows], names[len(rows) :]


def _interleaved(course: Course, progress: Callable[[int], None]) -> Iterator[Row]:
    """Every method in every round."""
    running: list[tuple[Row, Contender]] = []
    for _, make in course.bench.entries:
        if running and course.budget.spent:
            break
        contender = make()
        running.append((course.settle(contender), contender))
        progress(1)
    course.rounds([*course.floors, *running], course.bench.rounds)
    for row, contender in running:
        yield course.finish(row, contender)
        progress(1)


def _alone(course: Course, progress: Callable[[int], None]) -> Iterator[Row]:
    """One method after another, so that few residuals are there at a time; the floors before and after each."""
    rounds = course.bench.rounds
    for i, (_, make) in enumerate(course.bench.entries):
        if i and course.budget.spent:
            break
        before = len(course.floors[0][0].times)
        contender = make()
        row = course.settle(contender)
        progress(1)
        course.rounds(course.floors, rounds // 2)
        course.rounds([(row, contender)], rounds)
        course.rounds(course.floors, rounds - rounds // 2)
        yield course.finish(row, contender, before)
        del contender
        progress(1)
