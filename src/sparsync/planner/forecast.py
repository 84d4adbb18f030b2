"""What a step takes with each method: traffic, local costs and the network on one timeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from sparsync.collectives import Transfer
from sparsync.config.nodes import check_nodes_fit
from sparsync.engine.traffic import PlannedExchange, ddp_buckets, exchanges_of
from sparsync.layout import Parameter
from sparsync.number_checks import is_whole
from sparsync.planner.costs import CostBook, FixedCosts, LocalCost, MethodCost
from sparsync.planner.links import INSIDE, Network
from sparsync.planner.methods import METHODS, ROUND, SUMMED, Method
from sparsync.planner.model import ModelShape
from sparsync.planner.overlap import Job, Timeline

SETTLED = 10**9  # a step after which densities do not change any more
SLOWEST, FASTEST = 1e5, 1e14  # bits a second, between which a break-even is looked for
WORTH = 1.02  # times as fast as dense a sparse method must be to be advised
GRID = 12  # bandwidths a decade that are looked at


class LocalJob(NamedTuple):
    """An exchange whose network time is still to be found."""

    bucket: int
    select: float
    finish: float
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class StepForecast:
    """A step with one method on a model with P workers; asking it for a network is a few additions a bucket.

    Args:
        workers: that exchange; of what is summed inside machines first, one a machine.
        jobs: its exchanges in their order.
        traffic: bytes that a worker sends, on average over the workers.
        summed: gradients are summed inside machines first.
    """

    method: str
    workers: int
    jobs: tuple[LocalJob, ...]
    traffic: float
    summed: bool = False

    @cached_property
    def local_seconds(self) -> float:
        """Seconds of choosing, coding and summing."""
        return sum(job.select + job.finish for job in self.jobs)

    def network_seconds(self, network: Network) -> float:
        """Return how long the network is busy."""
        network = self._links(network)
        return sum(network.transfer_seconds(part, self.workers) for job in self.jobs for part in job.transfers)

    def seconds(self, network: Network, timeline: Timeline) -> float:
        """Return how long a step takes."""
        network = self._links(network)
        return timeline.step_seconds(
            [
                Job(bucket, select, finish, sum(network.transfer_seconds(part, self.workers) for part in parts))
                for bucket, select, finish, parts in self.jobs
            ]
        )

    def _links(self, network: Network) -> Network:
        """Return the network as those who exchange see it: the first of a machine's workers has its link alone."""
        return replace(network, per_node=1) if self.summed else network


class ForecastRow(NamedTuple):
    """What a method comes to on a network.

    Args:
        seconds: of a step.
        efficiency: compute alone, as a share of it.
        traffic: bytes that a worker sends.
        network, local: seconds of it, part of them hidden behind backward.
    """

    method: str
    seconds: float
    efficiency: float
    traffic: float
    network: float
    local: float


class Planner:
    """Forecasts of all methods for one model, made once; then any network can be asked for.

    Args:
        workers: P.
        compute: seconds of a step's passes on one worker.
        costs: what methods take on the device.
        optimizer: ``"sgd"``, ``"adam"`` or ``"adamw"``.
        step: in which densities are taken; by default after a budget's first steps, which send more.
        per_node: workers in each machine: where there are several, methods that sum inside machines are among them.
    """

    def __init__(
        self,
        model: ModelShape,
        workers: int,
        compute: float,
        costs: CostBook,
        optimizer: str = "sgd",
        methods: Mapping[str, Method] = METHODS,
        step: int = SETTLED,
        per_node: int = 1,
    ) -> None:
        if not (is_whole(workers) and workers >= 1):
            raise ValueError(f"workers must be a whole number, 1 or more, got {workers!r}")
        if not (is_whole(per_node) and per_node >= 1):
            raise ValueError(f"per_node must be a whole number, 1 or more, got {per_node!r}")
        check_nodes_fit(per_node, workers)
        if methods is METHODS and 1 < per_node < workers:
            methods = {**METHODS, **SUMMED}
        self.model, self.workers, self.compute, self.methods, self._costs = model, workers, compute, methods, costs
        self.timeline = model.timeline(compute, costs.blocking)
        self.forecasts = {
            name: forecast(name, method, model, workers, costs, optimizer, step, per_node)
            for name, method in methods.items()
        }

    def rows(self, network: Network) -> list[ForecastRow]:
        """Return what every method comes to."""
        found = []
        for name, own in self.forecasts.items():
            seconds = own.seconds(network, self.timeline)
            busy = own.network_seconds(network)
            found.append(ForecastRow(name, seconds, self.compute / seconds, own.traffic, busy, own.local_seconds))
        return found

    def fastest(self, network: Network, chosen: Callable[[Method], bool]) -> ForecastRow | None:
        """Return the fastest of the chosen methods."""
        rows = [row for row in self.rows(network) if chosen(self.methods[row.method])]
        return min(rows, key=lambda row: row.seconds, default=None)

    def pays(self, network: Network) -> bool:
        """Return whether a sparse method that keeps the accuracy is worth its while: faster than every dense one, by
        more than such a forecast can tell."""
        sparse = self.fastest(network, lambda method: method.accurate and not method.dense)
        dense = self.fastest(network, lambda method: method.dense)
        return sparse is not None and dense is not None and WORTH * sparse.seconds < dense.seconds

    def break_even(self, network: Network) -> float | None:
        """Return the bandwidth of machines' links above which no sparse method pays; ``None``: it never does.

        Infinite where latency alone makes it pay.
        """
        return highest_bandwidth(network, self.pays)

    @cached_property
    def round(self) -> StepForecast:
        """The forecast of a round of ``OuterLoop``; by the costs of ``default`` where a file lacks its own."""
        try:
            return forecast("round", ROUND, self.model, self.workers, self._costs, "")
        except ValueError:
            own = forecast("round", ROUND, self.model, self.workers, FixedCosts(), "")
            return replace(own, jobs=(*own.jobs, LocalJob(0, self.forecasts["default"].local_seconds, 0.0, ())))

    def outer_seconds(self, network: Network, every: int, beside: bool) -> float:
        """Return how long a local step of ``OuterLoop`` takes.

        Args:
            every: local steps of a round.
            beside: rounds travel while local steps are made; else these wait.
        """
        own = self.round
        local, busy = own.local_seconds / every, own.network_seconds(network) / every
        return max(self.compute + local, busy) if beside else self.compute + local + busy

    def outer_break_even(self, network: Network, every: int) -> float | None:
        """Return the bandwidth above which local steps are no faster than the fastest exchange of every step."""

        def pays(at: Network) -> bool:
            best = self.fastest(at, lambda method: method.accurate)
            return best is not None and WORTH * self.outer_seconds(at, every, beside=True) < best.seconds

        return highest_bandwidth(network, pays)


def highest_bandwidth(network: Network, pays: Callable[[Network], bool]) -> float | None:
    """Return the bandwidth of machines' links above which something does not pay; ``None``: it never does."""
    steps = round(GRID * math.log10(FASTEST / SLOWEST))
    grid = [FASTEST / 10 ** (step / GRID) for step in range(steps + 1)]
    for step, bits in enumerate(grid):
        if pays(network.with_bandwidth(bits)):
            if step == 0:
                return math.inf
            low, high = bits, grid[step - 1]
            while high / low > 1.001:
                middle = math.sqrt(low * high)
                low, high = (middle, high) if pays(network.with_bandwidth(middle)) else (low, middle)
            return low
    return None


def forecast(
    name: str,
    method: Method,
    model: ModelShape,
    workers: int,
    costs: CostBook,
    optimizer: str,
    step: int = SETTLED,
    per_node: int = 1,
) -> StepForecast:
    """Return the forecast of one method."""
    if method.summed:
        workers = math.ceil(workers / per_node)
    plan = method.plan(model.tensors, workers, optimizer)
    exchanges = exchanges_of(plan, model.tensors, workers, model.caps)(plan.density_at(step))
    if method.plain:
        # DDP's own sums have no headers.
        cost = costs.cast() if plan.values == "bf16" else LocalCost()
        cast = [cost.seconds(exchange.layout.numel, exchange.traffic) for exchange in exchanges]
        jobs = [LocalJob(e.bucket, 0.0, own, e.traffic.transfers[-1:]) for e, own in zip(exchanges, cast, strict=True)]
        return StepForecast(name, workers, tuple(jobs), sum(part.bytes for job in jobs for part in job.transfers))
    compressed = costs.of(plan)
    dense = MethodCost()
    if any(exchange.unit.compressor is not plan.compressor and not exchange.sketch for exchange in exchanges):
        dense = costs.of(METHODS["dense fp32"].plan(model.tensors, workers))

    def job(exchange: PlannedExchange) -> LocalJob:
        # Sketching is part of what was measured for the entries.
        cost = compressed if exchange.unit.compressor is plan.compressor else MethodCost() if exchange.sketch else dense
        numel, traffic = exchange.layout.sendable, exchange.traffic
        select, finish = (part.seconds(numel, traffic) for part in cost)
        return LocalJob(exchange.bucket, select, finish, (*traffic.transfers, *inside(exchange)))

    def inside(exchange: PlannedExchange) -> list[Transfer]:
        """Return what a machine's workers are given by the first of them; of sketches also what it is given."""
        ways = 0 if not method.summed else 2 if exchange.sketch else 1
        return [Transfer(INSIDE, per_node - 1, 4.0 * exchange.layout.numel)] * ways

    jobs = [*_sums_inside(model, per_node), *map(job, exchanges)] if method.summed else [*map(job, exchanges)]
    sent = sum(exchange.traffic.mean_bytes for exchange in exchanges)
    return StepForecast(name, workers, tuple(sorted(jobs, key=lambda own: own.bucket)), sent, method.summed)


def _sums_inside(model: ModelShape, per_node: int) -> list[LocalJob]:
    """Return the sums of all buckets at the first of a machine's workers, as they become ready."""
    parameters = [Parameter.of(name, tensor) for name, tensor in model.tensors.items()]
    sizes = [4.0 * sum(p.numel for p in bucket) for bucket in ddp_buckets(parameters, model.caps)]
    return [LocalJob(number, 0.0, 0.0, (Transfer(INSIDE, per_node - 1, size),)) for number, size in enumerate(sizes)]
