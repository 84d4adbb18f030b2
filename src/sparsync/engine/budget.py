"""A plan within a byte budget: how many entries are sent, how they travel and how they are summed.

All of it follows from what a plan's own messages take (``bytes_per_step``), for P workers and the model at hand:

1. *Nothing is compressed* where every entry fits as it is, or as bf16. Headers of these sums come on top.
2. *What travels dense*: 1-D and small tensors, if they take at most a fifth of the budget; otherwise the largest of
   them are compressed until the others do. With a preconditioner they always travel dense.
3. *Collective*: all-gather, whose result holds up to P k entries, or balanced, which takes about 3 k whatever P is for
   2 k of them: the one whose result holds more. Balanced must hold a quarter more, as it takes two rounds.
   Where both hold all entries, the one to which every worker sends more. With a preconditioner all-gather, if with it
   a worker can send 1 % of the entries: signs of sums lose more than signs of updates.
4. *Values*: the most exact with which enough entries travel: fp16 from a half of all entries on, levels from a quarter
   on, else signs, and these for at most half of the entries. With Laplacian entries that is about where the next one
   brings more of their energy for the same bytes.
5. *Density*: as large as it can be while the mean over the training is within the budget, and no step is above 8 times
   the budget or above dense. (Compact indices take a bit less each from a power of two on, so that a density beyond one
   that does not fit may fit again, with a few per cent more entries; that is not looked for.)

What is given does not follow. Random kinds have a density alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from sparsync.collectives import AllGather, Balanced, Collective, DenseAllReduce
from sparsync.compressors import NoCompression
from sparsync.config import ExchangePlan
from sparsync.config.budget import MOST, Budget, Spending, share_text
from sparsync.config.nodes import Groups
from sparsync.engine.traffic import bytes_per_step
from sparsync.layout import Parameter
from sparsync.schedule import FrontLoaded, as_schedule

DENSE_PART = 1 / 5  # of the budget, for what travels dense
VALUES = {"fp16": (1 / 2, 1.0), "levels": (1 / 4, 1.0), "sign": (0.0, 1 / 2)}  # densities: from, and at most
COLLECTIVES: tuple[tuple[Collective, Callable[[int], float]], ...] = (  # entries of the result, as they count, in k
    (AllGather(), lambda workers: workers),
    (Balanced(2.0), lambda workers: 2.0 / 1.25),
)
FIRST = 0.04  # the largest density that a training begins with because bytes are spent early, if it is preconditioned
ENOUGH = 0.01  # entries that a worker sends by all-gather, if it is preconditioned, where nothing else is asked
NEAR = 3e-5  # a search ends so near to the whole budget, or to the largest density


def plan_for(plan: ExchangePlan, tensors: Mapping[str, Tensor], workers: int, nodes: Groups = ()) -> ExchangePlan:
    """Return the plan for so many workers, with all that follows from its budget.

    Args:
        tensors: the parameters that are trained, by name.
        workers: P.
        nodes: the ranks of each, if there are any: what goes between them is counted. Of a single one nothing does, so
            all that its sum holds is applied.
    """
    plan = within_budget(plan, tensors, len(nodes) or workers)
    if len(nodes) == 1 and not plan.compressor.dense:
        return replace(plan, density=as_schedule(1.0), values="fp32", spending=None)
    return plan


def within_budget(plan: ExchangePlan, tensors: Mapping[str, Tensor], workers: int) -> ExchangePlan:
    """Return the plan with all that follows from its budget; a plan without one as it is.

    Args:
        tensors: the parameters that are trained, by name.
        workers: P. A single worker sends nothing, and has the plan that two would have.
    """
    if plan.budget is None:
        return plan
    search, share = BudgetSearch(plan, plan.budget, tensors, workers), plan.budget.share
    while (found := search.plan_within(share)) is None:
        if plan.budget.asked or share == 1:
            raise ValueError(search.refusal())
        share = min(1.0, 2 * share)  # a recipe's own gives way to a small model
    return found


def largest_density(spent: Callable[[float], float], low: float, high: float) -> float:
    """Return the largest density with which no more than the whole budget is spent.

    Bytes grow nearly as a power of the density, so two rounds of three go to where a line through the logarithms says;
    the third halves what is left.

    Args:
        spent: share of the budget, 1 or less at ``low``; every call takes time.
    """
    if spent(high) <= 1:
        return high
    at, left, right = [math.log(low), math.log(high)], math.log(spent(low)), math.log(spent(high))
    turn = 0
    while at[1] - at[0] > NEAR and left < -NEAR:
        turn += 1
        part = left / (left - right) if turn % 3 else 0.5
        middle = at[0] + min(0.99, max(0.01, part)) * (at[1] - at[0])
        found = math.log(spent(math.exp(middle)))
        if found <= 0:
            at[0], left = middle, found
        else:
            at[1], right = middle, found
    return math.exp(at[0])


def four_digits(density: float) -> float:
    """Return a density cut off after four digits."""
    unit = 10.0 ** (math.floor(math.log10(density)) - 3)
    return round(math.floor(density / unit) * unit, 12)


@dataclass(frozen=True)
class Candidate:
    """A plan whose density is still to be found, the largest it may have, and its bytes at any density."""

    plan: ExchangePlan
    most: float
    cost: Callable[[float], float]


class BudgetSearch:
    """The search for plans within a budget.

    Args:
        plan: what does not follow from the budget.
        tensors, workers: as ``within_budget`` takes them.
    """

    def __init__(self, plan: ExchangePlan, budget: Budget, tensors: Mapping[str, Tensor], workers: int) -> None:
        self.plan, self.budget, self.tensors = plan, budget, tensors
        self.asked_workers, self.workers = workers, max(2, workers)
        self.parameters = [Parameter.of(name, tensor) for name, tensor in tensors.items()]
        self.numel = max(1, sum(parameter.numel for parameter in self.parameters))
        self.ring = 2 * (self.workers - 1) / self.workers  # how often a dense sum sends an entry
        self.dense = 4 * self.ring * self.numel
        self.least = 0.5 / self.numel  # a density with which every segment sends one entry
        draws, known = plan.compressor.random, VALUES.get(plan.values, (0.0, 1.0))
        own = (plan.collective, lambda workers: workers)
        self.collectives = COLLECTIVES if budget.follows("collective") and not draws else (own,)
        self.values = VALUES if budget.follows("values") and not draws else {plan.values: (0.0, known[1])}
        carried = {codec: bounds for codec, bounds in self.values.items() if self._carried(codec)}
        self.values = carried or {plan.values: (0.0, 1.0)}  # which no budget holds, and that is said later

    def _carried(self, values: str) -> bool:
        """Return whether the first collective can carry these values: one that was given may not."""
        try:
            replace(self.plan, collective=self.collectives[0][0], values=values)
        except ValueError:
            return False
        return True

    def plan_within(self, share: float) -> ExchangePlan | None:
        """Return the plan for a budget of this share, if there is one."""
        uncompressed = self._uncompressed(share)
        if uncompressed is not None:
            return self._spent(uncompressed, share, 1.0)
        for names in dict.fromkeys((self._dense_names(share), self._always_dense)):
            found = self._best(names, share * self.dense)
            if found is not None:
                return self._spent(found, share, self._last_density(found, share * self.dense))
        return None

    def refusal(self) -> str:
        """Return why the budget cannot be reached, in words."""
        found = [
            self._candidate(collective, [*self.values][-1], self._always_dense) for collective, _ in self.collectives
        ]
        least = min(candidate.cost(self.least) for candidate in found) / self.dense
        unit = 10.0 ** (math.floor(math.log10(least)) - 3)
        smallest = f"the smallest possible is {math.ceil(least / unit) * unit:.4g}"
        if least > 1:
            smallest = f"for a model of {self.numel:,} entries that is more than all of them dense"
        return (
            f"budget={share_text(self.budget.share)} cannot be reached with {self.workers} workers: headers, an entry "
            f"a segment and what travels dense are sent at any density; {smallest}"
        )

    def _uncompressed(self, share: float) -> Candidate | None:
        """Return the plan that sends every entry, if the values fit."""
        if not self.budget.follows("compressor", "collective", "precondition"):
            return None
        momentum = "keep" if self.budget.follows("momentum") else self.plan.momentum
        for values in ("fp32", "bf16"):
            sizes = (2 if values == "bf16" else p.dtype.itemsize for p in self.parameters)
            taken = self.ring * sum(size * p.numel for size, p in zip(sizes, self.parameters, strict=True))
            if taken <= share * self.dense and (self.budget.follows("values") or self.plan.values == values):
                whole = replace(self.plan, compressor=NoCompression(), indices="int", momentum=momentum, values=values,
                                collective=DenseAllReduce(), precondition=False)  # fmt: skip
                return Candidate(whole, 1.0, bytes_per_step(whole, self.tensors, self.workers))
        return None

    @property
    def _always_dense(self) -> frozenset[str]:
        """What travels dense whatever it takes."""
        follows = self.budget.follows("dense_below", "dense_1d") and not self.plan.precondition
        return frozenset() if follows else self.plan.dense_names(self.tensors)

    def _dense_names(self, share: float) -> frozenset[str]:
        """Return what travels dense: of 1-D and small tensors the smallest, as many as take a fifth of the budget."""
        small, names = self.plan.dense_names(self.tensors), set(self._always_dense)
        left = DENSE_PART * share * self.dense
        for parameter in sorted(self.parameters, key=lambda p: (p.numel, p.name)):
            left -= self.ring * parameter.numel * parameter.dtype.itemsize if parameter.name in small else 0
            if parameter.name in small and left >= 0:
                names.add(parameter.name)
        return frozenset(names)

    def _candidate(self, collective: Collective, values: str, names: frozenset[str]) -> Candidate:
        plan = replace(self.plan, collective=collective, values=values, dense=names)
        return Candidate(plan, self.values[values][1], bytes_per_step(plan, self.tensors, self.workers))

    def _best(self, names: frozenset[str], allowed: float) -> Candidate | None:
        """Return the candidate with the collective and the values that suit a budget of so many bytes, if any."""
        coarsest, best, most = [*self.values][-1], None, (0.0, 0.0)
        for collective, counts in self.collectives:
            found = self._candidate(collective, coarsest, names)
            if found.cost(self.least) <= allowed:
                spent = lambda density, cost=found.cost: cost(density) / allowed  # noqa: E731
                density = largest_density(spent, self.least, 1.0)
                reaches = min(self.numel, counts(self.workers) * self.numel * density), self.numel * density
                best, most = (found, reaches) if reaches > most else (best, most)
                if self.plan.precondition and density >= ENOUGH:
                    break
        if best is None:
            return None
        for values, (since, _) in self.values.items():
            finer = best if values == coarsest else self._candidate(best.plan.collective, values, names)
            if finer.cost(max(since, self.least)) <= allowed:
                return finer
        return best

    def _schedule(self, found: Candidate, density: float) -> FrontLoaded:
        """Return the densities that end with this one. Updates that are preconditioned begin with few entries, too: of
        many, the first steps' would be the worst."""
        most = max(density, FIRST) if found.plan.precondition else 1.0
        return self.budget.schedule(density, min(most, found.most))

    def _last_density(self, found: Candidate, allowed: float) -> float:
        """Return the density with which a training within the budget ends."""

        def spent(density: float) -> float:
            stages = self._schedule(found, density).stages()
            sent = [(found.cost(now), count) for now, count in stages if count]
            mean = sum(cost * count for cost, count in sent) / self.budget.steps
            return max(mean / allowed, max(cost for cost, _ in sent) / min(MOST * allowed, self.dense))

        density = largest_density(spent, self.least, found.most)
        return four_digits(density) if spent(four_digits(density)) <= 1 else density

    def _spent(self, found: Candidate, share: float, density: float) -> ExchangePlan:
        """Return the candidate's plan, ending with a density, and what it spends."""
        schedule = self._schedule(found, density)
        mean = sum(found.cost(now) * count for now, count in schedule.stages()) / schedule.steps
        spending = Spending(
            share, self.asked_workers, self.dense, (schedule(0), density), found.cost(schedule(0)), found.cost(density),
            mean, schedule.steps,
        )  # fmt: skip
        return replace(found.plan, density=as_schedule(schedule), spending=spending)
