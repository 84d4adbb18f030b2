"""The planner against the lab: what it predicts for steps on links of given rates, and what they take there.

What the planner does not know of a machine is measured once for a model and a number of workers, on links that nearly
nothing holds back and without compute: a step that exchanges nothing, and one of each method. The rest is predicted:
how long the bytes take at a rate, and what of that backward hides.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsync.config import ExchangePlan
from sparsync.planner import METHODS, FixedCosts, Link, LocalCost, MethodCost, ModelShape, Network, Planner
from sparsync.planner.costs import cost_key
from sparsync.planner.shapes import TensorShape
from sparsync_lab.network.auto_comparison import SettledMethod
from sparsync_lab.network.emulated_model import shapes_of
from sparsync_lab.network.methods import LOCAL, NetworkMethod
from sparsync_lab.network.shaping import HIGHEST, Rate
from sparsync_lab.network.star import Star
from sparsync_lab.network.steps import MethodSteps, StepCell, measure_cell
from sparsync_lab.network.sweep import key_of
from sparsync_lab.training.local_workers import LocalWorkers

# The planner's names, and the lab's.
COMPARED = {"dense fp32": "dense", "dense bf16": "bf16", "default": "default", "balanced": "balanced"}
FREE = Rate(HIGHEST)
NEAR = 0.15  # a prediction that is no more off is right


@dataclass(frozen=True)
class FreeStep:
    """What a step takes on links that hold nothing back, without compute; seconds.

    Args:
        whole: all of it, on the slowest rank.
        select: choosing entries, which keeps backward waiting.
    """

    whole: float
    select: float = 0.0


class CalibratedCosts:
    """What methods take where all ranks share the processors; a ``CostBook``.

    Args:
        model: whose steps were measured.
        free: by the planner's names, and of a step that exchanges nothing.
    """

    name, blocking = "workers that share the processors", True

    def __init__(self, model: ModelShape, workers: int, free: Mapping[str, FreeStep], optimizer: str) -> None:
        self.numel, self.own = model.numel, free[LOCAL].whole
        methods = {name: METHODS[name] for name in COMPARED}
        bare = Planner(model, workers, 0.0, FixedCosts(), optimizer, methods).forecasts
        sent = {name: bare[name].network_seconds(Network(Link(0.0, 1.0))) for name in methods}  # bytes
        self.per_byte = max(0.0, free["dense fp32"].whole - self.own) / sent["dense fp32"]
        self._known = dict[str, MethodCost]()
        for name in methods:
            rest = free[name].whole - self.own - free[name].select - self.per_byte * sent[name]
            parts = (LocalCost(per_entry=max(0.0, seconds) / model.numel) for seconds in (free[name].select, rest))
            self._known[_key(methods[name].plan(model.tensors, workers, optimizer))] = MethodCost(*parts)

    def of(self, plan: ExchangePlan) -> MethodCost:
        return self._known[_key(plan)] if not plan.compressor.dense else MethodCost()

    def cast(self) -> LocalCost:
        return self._known["bf16"].finish

    def network(self, rate: Rate) -> Network:
        """Return links of a rate, over which a byte takes at least what the processors take for it."""
        return Network(Link(0.0, max(Link.at(rate.bits).seconds_per_byte, self.per_byte)))


def _key(plan: ExchangePlan) -> str:
    return plan.values if plan.compressor.dense else cost_key(plan)


@dataclass(frozen=True)
class Calibration:
    """A planner's knowledge of one model on so many hosts of this machine."""

    model: ModelShape
    workers: int
    optimizer: str
    free: Mapping[str, FreeStep]

    def predict(self, cell: StepCell) -> dict[str, float]:
        """Return what steps take on links of a rate, by method."""
        costs = CalibratedCosts(self.model, self.workers, self.free, self.optimizer)
        methods = {name: METHODS[name] for name in COMPARED}
        planner = Planner(self.model, self.workers, cell.compute + costs.own, costs, self.optimizer, methods)
        return {row.method: row.seconds for row in planner.rows(costs.network(cell.rate))}


def calibrate(workers: LocalWorkers, network: Star, cell: StepCell, optimizer: str) -> Calibration:
    """Measure what the planner does not know, of a cell's model."""
    free = StepCell(FREE, cell.model, 0.0, cell.rounds, cell.seconds)
    methods = [SettledMethod(name, optimizer=optimizer) for name in (LOCAL, *COMPARED.values())]
    found = [_free(own) for own in measure_cell(workers, network, free, methods).methods]
    return Calibration(
        model_of(cell.model), workers.count, optimizer, dict(zip((LOCAL, *COMPARED), found, strict=True))
    )


def _free(own: MethodSteps) -> FreeStep:
    return FreeStep(own.typical, statistics.median(step.parts[0] for step in own.steps))


def model_of(name: str) -> ModelShape:
    """Return a model of the lab as the planner sees it: its passes take as long for every matrix, and nothing for
    other tensors."""
    model = ModelShape.of_shapes(name, [TensorShape(shape) for shape in shapes_of(name)])
    work = {name: float(tensor.dim() > 1) for name, tensor in model.tensors.items()}
    return ModelShape(model.title, model.tensors, work, model.caps)


@dataclass(frozen=True)
class PredictionRow:
    """A method in a cell: seconds of a step on links that hold nothing back, without compute, as predicted for this
    cell, and as measured there."""

    cell: StepCell
    workers: int
    method: NetworkMethod
    free: float
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def to_csv(self) -> dict[str, Any]:
        """Return the row as columns, without machine and date."""
        return {
            **key_of(self.workers, self.cell, self.method),
            "compute": "waited for, not computed",
            "free_ms": f"{1e3 * self.free:.2f}",
            "predicted_ms": f"{1e3 * self.predicted:.2f}",
            "step_p50_ms": f"{1e3 * self.measured:.2f}",
            "error": f"{self.error:.4f}",
            "right": "yes" if abs(self.error) <= NEAR else "no",
        }


def check_cell(workers: LocalWorkers, network: Star, cell: StepCell, known: Calibration) -> list[PredictionRow]:
    """Predict and measure a cell."""
    predicted = known.predict(cell)
    methods = [SettledMethod(name, optimizer=known.optimizer) for name in COMPARED.values()]
    measured = measure_cell(workers, network, cell, methods)
    return [
        PredictionRow(cell, workers.count, own.method, known.free[name].whole, predicted[name], own.typical)
        for name, own in zip(COMPARED, measured.methods, strict=True)
    ]


def summarize(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return in how many cells predictions are right; ``rows``: of a CSV file."""
    right = sum(row["right"] == "yes" for row in rows)
    errors = sorted(abs(float(row["error"])) for row in rows)
    return (
        f"{right} of {len(rows)} predictions are within {NEAR:.0%} of the measured step "
        f"(median error {statistics.median(errors):.1%}, largest {errors[-1]:.1%})"
    )
