"""Steps of an emulated model on shaped links: how long they take by each method, and what the interfaces count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparsync.config.recipes import AUTO
from sparsync_lab.network.counters import barrier_payload, measure_link, payload, sent_by_host
from sparsync_lab.network.emulated_model import EmulatedModel, shapes_of
from sparsync_lab.network.methods import (
    HOOKS,
    POWER_SGD,
    SETTLED,
    AttachedMethod,
    HookSwitch,
    NetworkMethod,
    groups_that_fit,
    switched_hook,
)
from sparsync_lab.network.shaping import Rate
from sparsync_lab.network.star import Star
from sparsync_lab.training.local_workers import LocalWorkers, Worker

WARM_UP = 3  # rounds that are not counted
READY = {*HOOKS} - {POWER_SGD}  # for which the first of them is enough
MOST_SETTLING = 150  # steps in which 'auto' may settle
FEWEST = 3  # rounds that are made however long they take


@dataclass(frozen=True)
class Change:
    """A rate that changes in the middle of a run: all links have ``rate`` from step ``at`` of every method on."""

    rate: Rate
    at: int


@dataclass(frozen=True)
class StepCell:
    """What is measured on one set of links.

    Args:
        rate: of every link, in both directions.
        model: a name, or a number of entries.
        compute: seconds of a step that are waited for instead of computing.
        rounds: steps of every method.
        seconds: of steps; a method that has had its share of them makes no more, if it made a few.
        change: of the rate, if any; steps are counted from 0, the first ones included.
    """

    rate: Rate
    model: str
    compute: float = 0.0
    rounds: int = 15
    seconds: float = 120.0
    change: Change | None = None

    def __post_init__(self) -> None:
        shapes_of(self.model)  # which refuses what is not known
        if not 0 <= self.compute <= 60:
            raise ValueError(f"compute must be from 0 to 60 seconds, got {self.compute:g}")
        if self.rounds < FEWEST:
            raise ValueError(f"rounds must be {FEWEST} or more, got {self.rounds}")
        if not self.seconds > 0:
            raise ValueError(f"seconds must be above 0, got {self.seconds:g}")
        if self.change is not None and not FEWEST <= self.change.at <= self.rounds - FEWEST:
            span = f"from {FEWEST} to {self.rounds - FEWEST}"
            raise ValueError(f"the rate may change at a step {span} of {self.rounds}, got {self.change.at}")

    @property
    def rate_at(self) -> Callable[[int], Rate]:
        change = self.change
        return lambda step: self.rate if change is None or step < change.at else change.rate


@dataclass
class StepRecord:
    """What one step took on one rank, or on all: seconds, and bytes a worker.

    Args:
        payload: what the interface sent, without headers of packets.
        traffic: what the library says it would be.
        resent: packets that TCP sent again.
        parts: seconds of compressing, exchanging and decoding.
    """

    seconds: float
    payload: float
    traffic: float
    resent: int
    parts: tuple[float, float, float]


@dataclass
class MethodSteps:
    """The steps of one method; ``decided``: the way that 'auto' has settled on."""

    method: NetworkMethod
    steps: list[StepRecord] = field(default_factory=list)
    decided: str = ""

    @property
    def typical(self) -> float:
        """Seconds of a step, the median."""
        return statistics.median(step.seconds for step in self.steps)


@dataclass(frozen=True)
class CellResult:
    """What came of a cell.

    Args:
        link: bits a second that a plain transfer from host to host reached.
        methods: in the order in which they were asked for.
    """

    cell: StepCell
    workers: int
    link: float
    methods: list[MethodSteps]


def measure_cell(
    workers: LocalWorkers,
    network: Star,
    cell: StepCell,
    methods: Sequence[NetworkMethod],
    progress: Callable[[int], None] = lambda new: None,
) -> CellResult:
    """Time and count steps of every method on workers that are on the network's hosts; ``progress`` hears of rounds."""
    network.set_rate(cell.rate)
    link = workers.run(measure_link, network, cell.rate)[0]
    entries = sum(map(_numel, shapes_of(cell.model)))
    merged: list[MethodSteps] = []
    for group in groups_that_fit(methods, entries, workers.count, psutil.virtual_memory().available):
        network.set_rate(cell.rate)
        by_rank: list[list[MethodSteps]] = workers.run(_measure, network, cell, group, progress=progress)
        merged += [_merge(of_ranks) for of_ranks in zip(*by_rank, strict=True)]
    return CellResult(cell, workers.count, link, merged)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _merge(of_ranks: Sequence[MethodSteps]) -> MethodSteps:
    """Return the steps of all ranks as those of the group: a step ends with its slowest rank."""
    steps = []
    for ranks in zip(*(rank.steps for rank in of_ranks), strict=True):
        parts = zip(*(record.parts for record in ranks), strict=True)
        compress, exchange, decode = (max(part) for part in parts)
        steps.append(
            StepRecord(
                max(record.seconds for record in ranks),
                statistics.fmean(record.payload for record in ranks),
                statistics.fmean(record.traffic for record in ranks),
                sum(record.resent for record in ranks),
                (compress, exchange, decode),
            )
        )
    return MethodSteps(of_ranks[0].method, steps, of_ranks[0].decided)


def _measure(worker: Worker, network: Star, cell: StepCell, methods: Sequence[NetworkMethod]) -> list[MethodSteps]:
    """Make one step of every method in turn, round after round; who goes first changes with the round."""
    model = EmulatedModel(shapes_of(cell.model), cell.compute, seed=worker.rank)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
    switch = HookSwitch()
    ddp.register_comm_hook(switch, switched_hook)
    attached = [AttachedMethod(method, model, worker.count) for method in methods]
    found = [MethodSteps(method) for method in methods]
    pairs = list(zip(attached, found, strict=True))
    for exchanger, own in pairs:
        own.decided = _settle(ddp, switch, exchanger)
    barrier, active = 0, [True] * len(pairs)
    for turn in range(-WARM_UP, cell.rounds):
        if turn == 0:
            barrier = barrier_payload()
        if cell.change is not None and turn == cell.change.at:
            dist.barrier()
            network.hosts[worker.rank].set_rate(cell.change.rate)
        for number in range(turn, turn + len(pairs)):
            exchanger, own = pairs[number % len(pairs)]
            if not active[number % len(pairs)] or (-WARM_UP < turn < 0 and own.method.name in READY):
                continue
            switch.current = exchanger
            record = _step(ddp, exchanger, barrier)
            if turn >= 0:
                own.steps.append(record)
        worker.report(1)
        active = _go_on(cell, found)
        if not any(active):
            break
    for exchanger in attached:
        exchanger.close()
    return found


def _settle(ddp: DistributedDataParallel, switch: HookSwitch, method: AttachedMethod) -> str:
    """Let 'auto' make steps until it has decided; return on what."""
    if method.method.name != AUTO or method.handle is None:
        return ""
    switch.current = method
    method.handle.start().step = SETTLED
    assert method.auto is not None
    for _ in range(MOST_SETTLING):
        method.before_step()
        ddp.zero_grad(set_to_none=True)
        ddp().backward()
        method.after_step()
        if method.auto.policy.settled and not method.auto.draining:
            break
    return method.auto.policy.current


def _go_on(cell: StepCell, found: Sequence[MethodSteps]) -> list[bool]:
    """Return which methods make a step in the next round, the same on all ranks: those with time left."""
    each = cell.seconds / len(found)
    goes = [len(own.steps) < FEWEST or sum(step.seconds for step in own.steps) < each for own in found]
    told = torch.tensor([int(own or cell.change is not None) for own in goes])
    dist.broadcast(told, 0)  # as one clock has it
    return [bool(own) for own in told]


def _step(ddp: DistributedDataParallel, method: AttachedMethod, barrier: int) -> StepRecord:
    method.before_step()
    if method.auto is not None:
        method.auto.pause()  # others have made steps since its last
    ddp.zero_grad(set_to_none=True)
    dist.barrier()  # so that a rank that comes late is not counted
    before = sent_by_host()
    begun = time.perf_counter()
    ddp().backward()
    seconds = time.perf_counter() - begun
    dist.barrier()  # what others still wait for is sent by then
    count = sent_by_host().since(before)
    traffic, parts = method.after_step()
    return StepRecord(seconds, payload(count) - barrier, traffic, count.resent, parts)
