"""CPU time of an exchange, phase by phase, beside what moving its bytes alone would take."""

from __future__ import annotations

import importlib
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparsync.collectives.base import shape_of
from sparsync.kernels import cpu
from sparsync_lab.network.emulated_model import EmulatedModel, shapes_of
from sparsync_lab.network.methods import LOCAL, AttachedMethod, HookSwitch, NetworkMethod, switched_hook
from sparsync_lab.training.local_workers import LocalWorkers, Worker, join_gloo

METHODS = (  # and the optimizer; the first exchanges nothing, and is taken off the others
    (LOCAL, "sgd"), ("topk@bucket", "sgd"), ("default", "sgd"), ("balanced", "sgd"), ("default", "adamw"),
    ("balanced", "adamw"),
)  # fmt: skip
WARM_UP = 8  # rounds that are not counted: thresholds settle
TOTAL, REST = "total", "the rest"
LINE = 64  # bytes that memory moves at least
MATRIX = 1024 * 1024  # entries of the smallest model that has one

# The function that does each phase: its module, and its name there. What one calls of another is the other's.
PHASES = {
    "add to the residual": ("kernels.accumulate.cpu:add",),
    "choose": ("compressors.threshold:ThresholdK.choose", "compressors.topk:TopK.choose"),
    "take out": ("kernels.accumulate.take_cpu:take",),
    "encode": ("wire.message:Wire.encode", "wire.message:Wire.header"),
    "send and receive": (
        "collectives.comm.channel:Channel.all_gather", "collectives.comm.channel:Channel.all_to_all",
        "collectives.comm.channel:Channel.all_reduce",
    ),
    "check": ("collectives.comm.channel:Channel.verify",),
    "sum and write": ("wire.host:write_mean", "collectives.compiled_partition:MeanOfOwners.write_parts"),
    "deal out": ("collectives.compiled_partition:CompiledPartition.split",),
    "sums of owners": ("collectives.balanced:BalancedMessages.gather_message",),
    "largest sums": ("collectives.compiled_partition:CompiledPartition.largest",),
    "decode": ("wire.message:Wire.decode",),
    "put back": ("feedback.residual:Feedback.restore_to_residual",),
    "sketch": ("feedback.preconditioner:Preconditioner.sketch",),
    "second moment": ("feedback.preconditioner:Preconditioner.update",),
    "precondition": ("kernels.precondition.cpu:precondition",),
    "show the norm": ("feedback.preconditioner:Preconditioner.show",),
    "begin": ("engine.reducer:Reducer._begin",),
}  # fmt: skip


@dataclass(frozen=True)
class PhasesBench:
    """What is measured.

    Args:
        entries: of the model, by default eight matrices of 1024 x 1024.
        workers: P.
        rounds: steps of every method, one after another.
    """

    entries: int = 8_388_608
    workers: int = 4
    rounds: int = 25

    def __post_init__(self) -> None:
        if not MATRIX <= self.entries <= 1_000_000_000:
            raise ValueError(f"entries must be from {MATRIX:,} to 1,000,000,000, got {self.entries:,}")
        if not 1 <= self.workers <= 64:
            raise ValueError(f"workers must be from 1 to 64, got {self.workers}")
        if self.rounds < 1:
            raise ValueError(f"rounds must be 1 or more, got {self.rounds}")


@dataclass(frozen=True)
class PhaseRow:
    """CPU milliseconds of one phase, per step and worker: the median. ``bytes``: what it has to read and write at
    least, whole cache lines where it leaps; ``floor_ms``: what as many take in a plain loop; 0 where nobody counts."""

    method: str
    optimizer: str
    density: float
    phase: str
    cpu_ms: float
    bytes: float
    floor_ms: float


class PhaseClock:
    """Adds up each thread's CPU time by phase, in the functions of ``PHASES``; for the life of the process."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._inner = threading.local()
        assert cpu.available(), "phases are those of numba's loops"
        for phase, places in PHASES.items():
            for place in places:
                module, _, name = place.partition(":")
                owner: Any = importlib.import_module(f"sparsync.{module}")
                *parents, last = name.split(".")
                for parent in parents:
                    owner = getattr(owner, parent)
                setattr(owner, last, self._timed(getattr(owner, last), phase))

    def _timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **keywords: Any) -> Any:
            inner = self._inner.__dict__.setdefault("spent", [])
            inner.append(0.0)
            begun = time.thread_time()
            try:
                return function(*args, **keywords)
            finally:
                own = time.thread_time() - begun
                self.spent[phase] += own - inner.pop()
                if inner:
                    inner[-1] += own

        return timed


def measure(bench: PhasesBench, progress: Callable[[int], None]) -> list[PhaseRow]:
    """Measure all methods on worker processes that exchange over the loopback device."""
    with LocalWorkers(bench.workers) as workers:
        workers.run(join_gloo)
        by_rank: list[tuple[float, list[Any]]] = workers.run(_measure, bench, progress=progress)
    rate = statistics.median(rate for rate, _ in by_rank)
    found, rows, local = [own for _, own in by_rank], list[PhaseRow](), 0.0
    for number, (name, optimizer) in enumerate(METHODS):
        steps = [step for rank in found for step in rank[number][1]]
        density, moved = found[0][number][0]
        spent = {phase: 1e3 * statistics.median(step[phase] for step in steps) for phase in (TOTAL, *PHASES)}
        local = spent[TOTAL] if name == LOCAL else local
        rest = spent[TOTAL] - local - sum(spent[phase] for phase in PHASES)
        for phase, ms in [*spent.items(), (REST, rest)] if name != LOCAL else [(TOTAL, local)]:
            if ms > 0.005:
                size = moved.get(phase, 0.0)
                rows.append(PhaseRow(name, optimizer, density, phase, ms, size, 1e3 * size / rate))
    return rows


def _measure(worker: Worker, bench: PhasesBench) -> tuple[float, list[Any]]:
    """Return the bytes a second that a plain loop moves; of every method its density, the bytes of its phases, and the
    seconds of every step by phase."""
    clock = PhaseClock()
    model = EmulatedModel(shapes_of(str(bench.entries)), 0.0, seed=worker.rank)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
    switch = HookSwitch()
    ddp.register_comm_hook(switch, switched_hook)
    attached = [
        AttachedMethod(NetworkMethod(name, 0.001, optimizer), model, worker.count) for name, optimizer in METHODS
    ]
    steps: list[list[Counter[str]]] = [[] for _ in attached]
    rates = []
    for turn in range(-WARM_UP, bench.rounds):
        for number in range(turn, turn + len(attached)):
            method = attached[number % len(attached)]
            switch.current = method
            method.before_step()
            ddp.zero_grad(set_to_none=True)
            dist.barrier()
            clock.spent.clear()
            begun = time.process_time()
            ddp().backward()
            clock.spent[TOTAL] = time.process_time() - begun  # type: ignore[assignment]
            if turn >= 0:
                steps[number % len(attached)].append(Counter(clock.spent))
            dist.barrier()
            method.after_step()
        rates.append(_rate(bench.entries))
        worker.report(1)
    found = [(_bytes(method, bench), own) for method, own in zip(attached, steps, strict=True)]
    for method in attached:
        method.close()
    return statistics.median(rates), found


def _rate(entries: int) -> float:
    """Return the bytes a second that adding one array to another reads and writes."""
    one, two = torch.ones(entries), torch.ones(entries)
    begun = time.thread_time()
    one.add_(two)
    return 12 * entries / (time.thread_time() - begun)


def _bytes(method: AttachedMethod, bench: PhasesBench) -> tuple[float, dict[str, float]]:
    """Return the density of a method, and the bytes that its phases have to move in a step."""
    if method.handle is None:
        return 1.0, {}
    reducer, n, workers = method.handle._reducer, 4.0 * bench.entries, bench.workers
    assert reducer is not None
    layouts = [unit.cut[1] for unit in reducer.buckets.units if unit.cut and not unit.compressor.dense]
    k, plan = sum(layout.k for layout in layouts), reducer.plan
    entries, lines = 12.0 * k, 2 * min(float(LINE * k), n)  # of entries: an index and a value; read and written
    message = float(sum(plan.wire.bytes(shape_of(layout, torch.float32)) for layout in layouts))
    owned, masked = method.method.name == "balanced", plan.correction is not None and plan.correction.masking
    moved = {
        "add to the residual": (5 if plan.correction is not None else 3) * n,
        "choose": 3 * entries,  # twice as many candidates, and those that go
        "take out": (2 if masked else 1) * lines + 2 * entries,  # masking clears velocities, too
        "encode": entries + message,
        "check": message * (2 if owned else workers),
        "sum and write": n + (2 * entries if owned else workers * message),
        "precondition": 4 * n,
        "sketch": n,
    }
    if owned:
        of_owner = {"sums of owners": n / workers + message, "largest sums": n / workers + 2 * entries}
        moved |= {**of_owner, "deal out": 2 * entries, "decode": 2 * entries + 2 * message, "put back": lines + entries}
    return k / bench.entries, moved
