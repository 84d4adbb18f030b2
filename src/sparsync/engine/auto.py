"""Exchange in the way that is fastest now, dense or sparse: time steps, let ``AutoPolicy`` decide, and change over."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsync.collectives import Balanced, DenseAllReduce
from sparsync.compressors import NoCompression
from sparsync.config import ExchangePlan
from sparsync.config.recipes import RECIPES
from sparsync.engine.auto_policy import AutoPolicy, Figures
from sparsync.engine.bucket_mapper import BucketMapper
from sparsync.engine.budget import largest_density
from sparsync.engine.dense_step import DenseStep
from sparsync.engine.reducer import Reducer
from sparsync.engine.step_order import StepOrder, choose_order
from sparsync.engine.traffic import bytes_per_step
from sparsync.layout import Parameter
from sparsync.schedule import as_schedule

log = logging.getLogger("sparsync")

DENSE = "dense bf16"
PROBE = 2**18  # entries of a probe of the network
BALANCED = RECIPES["balanced"].options
DENSITY = BALANCED["compressor"].density
LEAST = 0.01 * DENSITY  # to which a budget may force it down
Clock = Callable[[], float]


@dataclass
class Way:
    """A way to exchange gradients: a plan, and all that is made for it once."""

    plan: ExchangePlan
    buckets: BucketMapper
    order: StepOrder


def sparse_plans(
    plan: ExchangePlan, tensors: Mapping[str, Tensor], workers: int, waits: bool
) -> dict[str, ExchangePlan]:
    """Return the sparse plans within the accuracy budget, by name; all keep the same tensors dense.

    Args:
        plan: what was asked for.
        tensors: the parameters that are trained, by name.
        waits: the host waits for exchanges; else collectives that need it are left out.
    """
    found, budget, spending = {"default": plan}, plan.budget, plan.spending
    if plan.scope == "global" and not plan.precondition:
        found["default in buckets"] = replace(plan, scope="bucket")
    follows = budget is not None and budget.follows("compressor", "collective", "values")
    other = follows and not isinstance(plan.collective, Balanced) and (waits or BALANCED["collective"].deferrable)
    if other and spending is not None:
        own = replace(plan, collective=BALANCED["collective"], values=BALANCED["values"], budget=None, spending=None)
        cost, allowed = bytes_per_step(own, tensors, workers), spending.share * spending.dense
        if cost(LEAST) < allowed:
            density = largest_density(lambda density: cost(density) / allowed, LEAST, DENSITY)
            found["balanced"] = replace(own, density=as_schedule(density))
    return found


class AutoSwitch:
    """Changes a reducer over between ways of exchanging.

    Args:
        reducer: which has the sparse plan, and has made no step yet.
        tensors: the parameters that are trained, by name; their ``device``.
        dense_names, may_skip: as the reducer has them.
        clock: seconds; by default of this process, or of its GPU.
    """

    def __init__(
        self,
        reducer: Reducer,
        tensors: Mapping[str, Tensor],
        dense_names: frozenset[str],
        may_skip: bool,
        device: torch.device,
        clock: Clock = time.perf_counter,
    ) -> None:
        plan, parameters = reducer.plan, [Parameter.of(name, tensor) for name, tensor in tensors.items()]
        self.reducer, self.device, self.clock = reducer, device, clock

        def way(plan: ExchangePlan, names: frozenset[str], order: StepOrder) -> Way:
            return Way(plan, BucketMapper(parameters, plan, names, may_skip), order)

        whole = replace(plan, scope="bucket")
        if not plan.precondition:
            whole = replace(
                whole, compressor=NoCompression(), collective=DenseAllReduce(), values="bf16", indices="int",
                budget=None, spending=None,
            )  # fmt: skip
        self._dense = DenseStep(reducer.path)
        self._ways = {DENSE: way(whole, dense_names if plan.precondition else frozenset(), self._dense)}
        workers, waits = max(2, reducer.channel.size), reducer.completion.waits
        for name, own in sparse_plans(replace(plan, dense=dense_names), tensors, workers, waits).items():
            self._ways[name] = way(own, dense_names, choose_order(reducer.path))
        self.sparse = plan
        self.policy = AutoPolicy(list(self._ways))
        self._last: Any = None  # when the last step began
        self._steps: list[tuple[Any, Any]] = []  # when those that count began and were over
        self._waits: list[float] = []
        self._use(self.policy.current)
        reducer.before_step = self.begin_step

    # ---- steps ----------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Hear that the first bucket of a step is about to come; what follows from the last ones is done before it."""
        if self.reducer.channel.size == 1:  # sends nothing, in whatever way
            return
        before, self._last = self._last, self._now()
        if before is None:
            return
        if self.policy.counts:
            self._steps.append((before, self._last))
            self._waits.append(self.reducer.waited if self.device.type != "cuda" else 0.0)
        if self.policy.advance() and self._steps:
            self._decide()

    def pause(self) -> None:
        """Do not count the time until the next step: something else is done meanwhile."""
        self._last = None

    def _decide(self) -> None:
        """Let all ranks know what steps took, and change over if that is decided."""
        policy, step, before = self.policy, self.reducer.step, self.policy.current
        # After this all ranks are here.
        seconds, waited = self.reducer.slowest([statistics.median(self._periods()), statistics.median(self._waits)])
        probe = self.reducer.slowest([self._probe()])[0] if policy.wants_probe(step) else 0.0
        policy.decide(step, Figures(seconds, waited, probe, self.sparse.density_at(step)))
        self._steps, self._waits = [], []
        if policy.settled and policy.decisions and policy.decisions[-1].step == step:
            told = log.info if self.reducer.channel.rank == 0 else log.debug
            told("auto: %s", policy.decisions[-1])
        if policy.current != before:
            self._use(policy.current)
        if policy.drains:
            self._dense.drain()
            policy.drains = False

    def _use(self, name: str) -> None:
        way = self._ways[name]
        if way.order is self._dense and self.reducer.step > 0:
            self._dense.enter()
        self.reducer.use(way.plan, way.buckets, way.order)

    def _probe(self) -> float:
        """Return the seconds of a small dense exchange."""
        tensor = torch.zeros(PROBE, dtype=torch.bfloat16, device=self.device)
        begun = time.perf_counter()
        self.reducer.channel.all_reduce(tensor)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begun

    def _now(self) -> Any:
        """Return this moment: a number, or an event on the GPU, whose work lags behind the host."""
        if self.device.type != "cuda":
            return self.clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _periods(self) -> list[float]:
        if self.device.type != "cuda":
            return [after - before for before, after in self._steps]
        self._last.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in self._steps]

    # ---- what a handle asks for -----------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether residuals are on their way out."""
        return self.dense_now and self._dense.draining > 0

    @property
    def dense_now(self) -> bool:
        """Whether every entry is sent now."""
        return self.policy.current == DENSE

    def describe(self) -> dict[str, str]:
        """Return what is on and why, a line each."""
        if self.reducer.channel.size == 1:
            return {"auto": "one worker alone sends nothing, in whatever way"}
        policy = self.policy
        now = policy.current + ("" if policy.settled else ", being timed")
        tried = ", ".join(policy.names)
        decided = {f"decision {n}": str(one) for n, one in enumerate(policy.decisions, 1)}
        return {"auto": f"{now}; of {tried}", **decided}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed training goes on with."""
        return {**self.policy.state_dict(), "workers": self.reducer.channel.size}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse what ``load_state_dict`` cannot go on from."""
        found = state.get("auto")
        if found is not None and not (isinstance(found, Mapping) and AutoPolicy.fits(found)):
            raise ValueError(f"the state is damaged: 'auto' is not what a state has there: {found!r:.200}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, which the reducer has loaded; one of a training without ``auto`` says nothing."""
        for way in self._ways.values():
            way.buckets.forget_layouts()
        found = state.get("auto")
        self.policy = AutoPolicy(list(self._ways))
        if found:
            same = found["workers"] == self.reducer.channel.size
            self.policy.load_state_dict(found, self.reducer.step, same)
        self._last, self._steps, self._waits, self._dense.draining = None, [], [], 0
        self._use(self.policy.current)
        self._dense.enter()
        if self.dense_now and self.policy.settled:  # of residuals that were on their way out; in a trial they wait
            self._dense.drain()
        self.policy.drains = False
