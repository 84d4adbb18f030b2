"""A comparison on one set of links: 'auto', once it has settled, against dense steps and every fixed sparse method.

Fixed sparse methods are timed one after another first. Then the fastest, dense steps and 'auto' take turns, a few steps
each, round after round. A step is a whole one: forward, backward and the optimizer's, from its beginning to that of the
next.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparsync.config import ExchangePlan, resolve
from sparsync.config.recipes import AUTO
from sparsync.engine.budget import within_budget
from sparsync_lab.network.counters import measure_link
from sparsync_lab.network.emulated_model import EmulatedModel, shapes_of
from sparsync_lab.network.methods import (
    HOOKS,
    LOCAL,
    OPTIMIZERS,
    SETTLED,
    AttachedMethod,
    HookSwitch,
    NetworkMethod,
    plan_at,
    switched_hook,
)
from sparsync_lab.network.star import Star
from sparsync_lab.network.steps import MOST_SETTLING, StepCell
from sparsync_lab.training.local_workers import LocalWorkers, Worker
from sparsync_lab.training.methods import DENSE

SPARSE = ("default", "default@bucket", "balanced")  # the fixed methods that keep dense's accuracy
BF16 = "bf16"
SKIPPED, TURN = 1, 3  # steps of a turn: what another method has left in caches, and what counts
FEWEST, MOST = 4, 12  # turns
TIGHT = 1.01  # no more turns are made once odd and even ones differ by less
FAR, FEW = 1.5, 2  # who takes so many times what the fastest takes alone makes that few turns
MARGIN = 1.02
LONG = 0.5  # seconds of a step, from which on one of a method is enough


@dataclass(frozen=True)
class SettledMethod(NetworkMethod):
    """A method as it is once a budget's first steps are over."""

    def plan(self, module: torch.nn.Module, workers: int) -> ExchangePlan | None:
        if self.name in HOOKS:
            return None
        plan = resolve(optimizer=OPTIMIZERS[self.optimizer](module.parameters()), **self.options)
        if self.name == AUTO:
            return plan
        plan = within_budget(plan, dict(module.named_parameters()), workers)
        return plan_at(plan, plan.density_at(SETTLED))


class ComparedMethod(AttachedMethod):
    """A method on the DDP model, with an optimizer of its own that steps."""

    def __init__(self, method: NetworkMethod, module: torch.nn.Module, workers: int) -> None:
        super().__init__(method, module, workers)
        self.optimizer = OPTIMIZERS[method.optimizer](module.parameters())
        if self.handle is not None:
            assert self.handle.plan.optimizer is not None
            self.optimizer = self.handle.plan.optimizer
            self.handle.start().step = SETTLED

    def steps(
        self, ddp: DistributedDataParallel, switch: HookSwitch, count: int, skipped: int = 0, goes_on: bool = False
    ) -> float:
        """Make steps and return the seconds of each that is not skipped, from a barrier on.

        Args:
            goes_on: nobody else has made steps since the last ones.
        """
        switch.current = self
        if self.auto is not None and not goes_on:
            self.auto.pause()
        dist.barrier()
        begun = time.perf_counter()
        for number in range(skipped + count):
            if number == skipped:
                begun = time.perf_counter()
            self.optimizer.zero_grad()
            self.before_step()
            ddp().backward()
            self.optimizer.step()
        return (time.perf_counter() - begun) / count


@dataclass
class Times:
    """What the turns of a method took, a step each, on one rank or on the slowest; ``decided``: what 'auto' is at."""

    method: NetworkMethod
    seconds: list[float]
    decided: str = ""


@dataclass(frozen=True)
class ComparisonResult:
    """What came of a cell.

    Args:
        link: bits a second that a plain transfer from host to host reached.
        methods: all of them; those that took no part in the comparison have one time alone.
    """

    cell: StepCell
    workers: int
    link: float
    methods: list[Times]

    def median(self, name: str) -> float:
        return statistics.median(next(own.seconds for own in self.methods if own.method.name == name))

    @property
    def rival(self) -> Times:
        """The fastest of dense steps in bf16 and the fixed sparse methods."""
        rivals = [own for own in self.methods if own.method.name not in (AUTO, DENSE) and len(own.seconds) > 1]
        return min(rivals, key=lambda own: statistics.median(own.seconds))

    @property
    def ratio(self) -> float:
        """How many times as long as the rival 'auto' takes."""
        return self.median(AUTO) / statistics.median(self.rival.seconds)

    @property
    def equal_runs(self) -> float:
        """By which factor two equal runs differ: the rival's, or auto's, odd and even turns."""
        own = next(own for own in self.methods if own.method.name == AUTO)
        return max(_halves(self.rival.seconds), _halves(own.seconds))

    @property
    def holds(self) -> bool:
        """Whether 'auto' is not slower."""
        return self.ratio <= max(MARGIN, self.equal_runs)


def _halves(seconds: Sequence[float]) -> float:
    one, other = statistics.median(seconds[::2]), statistics.median(seconds[1::2])
    return max(one, other) / min(one, other)


def compare_cell(workers: LocalWorkers, network: Star, cell: StepCell, optimizer: str) -> ComparisonResult:
    """Time a cell on workers that are on the network's hosts."""
    network.set_rate(cell.rate)
    link = workers.run(measure_link, network, cell.rate)[0]
    by_rank: list[list[Times]] = workers.run(_comparison, cell, optimizer)
    merged = []
    for ranks in zip(*by_rank, strict=True):
        slowest = [max(turn) for turn in zip(*(rank.seconds for rank in ranks), strict=True)]
        merged.append(Times(ranks[0].method, slowest, ranks[0].decided))
    return ComparisonResult(cell, workers.count, link, merged)


def _comparison(worker: Worker, cell: StepCell, optimizer: str) -> list[Times]:
    model = EmulatedModel(shapes_of(cell.model), cell.compute, seed=worker.rank)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
    switch = HookSwitch()
    ddp.register_comm_hook(switch, switched_hook)

    def make(name: str) -> ComparedMethod:
        return ComparedMethod(SettledMethod(name, optimizer=optimizer), model, worker.count)

    make(LOCAL).steps(ddp, switch, 2)  # DDP regroups its buckets
    alone = {name: _alone(make(name), ddp, switch) for name in (BF16, *SPARSE)}
    best = min(SPARSE, key=lambda name: alone[name])
    fastest = min(alone.values())
    auto = make(AUTO)
    decides = auto.auto
    if decides is None:
        raise ValueError(f"auto sends every entry of {cell.model} whatever the links: there is no comparison")
    for _ in range(MOST_SETTLING):
        auto.steps(ddp, switch, 1, goes_on=True)
        if decides.policy.settled and not decides.draining:
            break
    expected = {BF16: alone[BF16], best: alone[best], AUTO: fastest, DENSE: 2 * alone[BF16]}
    methods = {name: auto if name == AUTO else make(name) for name in expected}
    turns = {name: list[float]() for name in expected}
    until = time.monotonic() + cell.seconds
    for turn in range(MOST):
        names = [name for name in expected if turn < (FEW if expected[name] > FAR * fastest else MOST)]
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            count, skipped = (1, 0) if name == DENSE or expected[name] > LONG else (TURN, SKIPPED)
            turns[name].append(methods[name].steps(ddp, switch, count, skipped))
        close = [seconds for name, seconds in turns.items() if name in names and name != DENSE]
        if _over(turn + 1, close, time.monotonic() > until):
            break
    decided = "; ".join(map(str, decides.policy.decisions))
    for method in methods.values():
        method.close()
    found = [Times(methods[name].method, turns[name], decided if name == AUTO else "") for name in expected]
    rest = [name for name in SPARSE if name != best]
    return [*found, *(Times(SettledMethod(name, optimizer=optimizer), [alone[name]]) for name in rest)]


def _over(made: int, close: Sequence[Sequence[float]], late: bool) -> bool:
    """Return whether there were enough turns, as the first rank has it: it is late, or turns hardly differ."""
    enough = made >= FEWEST and (late or max(map(_halves, close)) < TIGHT)
    told = torch.tensor(int(enough))
    dist.broadcast(told, 0)
    return bool(told)


def _alone(method: ComparedMethod, ddp: DistributedDataParallel, switch: HookSwitch) -> float:
    """Return what a step of a method takes when it is alone, on the slowest rank; then it is gone."""
    took = [_slowest(method.steps(ddp, switch, 1))]
    if method.handle is not None or took[0] < LONG:
        took = []  # it made buffers, or compiled
    while len(took) < 5 and sum(took) < 2 * LONG:
        took.append(_slowest(method.steps(ddp, switch, 1)))
    method.close()
    return statistics.median(took)


def _slowest(seconds: float) -> float:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)
