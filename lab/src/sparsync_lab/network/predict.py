"""The planner against the lab: what it predicts for a cell, from link and costs measured there, and what steps take.

Workers share this machine's processors, for choosing and coding entries as for all else. So costs are measured as they
are met: by all ranks at once, at the sizes of the model, and it is the median that counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sparsync.config import ExchangePlan
from sparsync.planner import METHODS, LocalCost, MethodCost, ModelShape, Network, Planner
from sparsync.planner.costs import cost_key
from sparsync.planner.links import fit_times
from sparsync.planner.measure_costs import COLUMNS, measure_cast, measure_step
from sparsync.planner.measure_link import measure_link, slowest
from sparsync.planner.shapes import TensorShape
from sparsync_lab.network.auto_contest import SettledMethod
from sparsync_lab.network.emulated_model import shapes_of
from sparsync_lab.network.methods import Method
from sparsync_lab.network.star import Star
from sparsync_lab.network.steps import StepCell, measure_cell
from sparsync_lab.network.sweep import key_of
from sparsync_lab.training.local_workers import LocalWorkers, Worker

# The planner's names, and the lab's.
COMPARED = {"dense fp32": "dense", "dense bf16": "bf16", "default": "default", "balanced": "balanced"}
CPU = torch.device("cpu")
SMALL = 2**15  # entries
NEAR = 0.15  # a prediction that is no more off is right


class SharedCosts:
    """What methods take while all ranks do the same; a ``CostBook``.

    Args:
        numel: entries of the model.
    """

    name, blocking = "workers that share the processors", True

    def __init__(self, numel: int) -> None:
        self.sizes = sorted({SMALL, max(SMALL, numel // COLUMNS * COLUMNS)})
        self._known: dict[str, MethodCost] = {}

    def of(self, plan: ExchangePlan) -> MethodCost:
        key = cost_key(plan)
        if key not in self._known:
            samples = []
            for numel in self.sizes:
                dist.barrier()
                own = measure_step(plan, numel, dist.get_world_size(), CPU, statistics.median)
                samples.append(slowest([own.select, own.finish], CPU))
            features = np.array([[1.0, float(numel)] for numel in self.sizes])
            parts = (np.maximum([sample[part] for sample in samples], 1e-7) for part in (0, 1))
            self._known[key] = MethodCost(*(LocalCost(*fit_times(features, times)) for times in parts))
        return self._known[key]

    def cast(self) -> LocalCost:
        dist.barrier()
        return LocalCost(*slowest(list(measure_cast(CPU)), CPU))


@dataclass(frozen=True)
class PredictionRow:
    """A method in a cell: seconds of a step as predicted and as measured."""

    cell: StepCell
    workers: int
    method: Method
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
            "predicted_ms": f"{1e3 * self.predicted:.2f}",
            "step_p50_ms": f"{1e3 * self.measured:.2f}",
            "error": f"{self.error:.4f}",
            "right": "yes" if abs(self.error) <= NEAR else "no",
        }


def check_cell(workers: LocalWorkers, network: Star, cell: StepCell, optimizer: str) -> list[PredictionRow]:
    """Predict and measure a cell."""
    network.set_rate(cell.rate)
    predicted: dict[str, float] = workers.run(_predict, cell, optimizer)[0]
    methods = [SettledMethod(name, optimizer=optimizer) for name in COMPARED.values()]
    measured = measure_cell(workers, network, cell, methods)
    return [
        PredictionRow(cell, workers.count, own.method, predicted[name], statistics.median(s.seconds for s in own.steps))
        for name, own in zip(COMPARED, measured.methods, strict=True)
    ]


def _predict(worker: Worker, cell: StepCell, optimizer: str) -> dict[str, float]:
    shapes = [TensorShape(shape) for shape in shapes_of(cell.model)]
    model = ModelShape.of_shapes(cell.model, shapes)
    # The emulated model's passes take as long for every matrix, and nothing for other tensors.
    work = {name: float(tensor.dim() > 1) for name, tensor in model.tensors.items()}
    model = ModelShape(model.title, model.tensors, work, model.caps)
    methods = {name: METHODS[name] for name in COMPARED}
    planner = Planner(model, worker.count, cell.compute, SharedCosts(model.numel), optimizer, methods)
    return {row.method: row.seconds for row in planner.rows(Network(measure_link(CPU)))}


def summarize(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return in how many cells predictions are right; ``rows``: of a CSV file."""
    right = sum(row["right"] == "yes" for row in rows)
    errors = sorted(abs(float(row["error"])) for row in rows)
    return (
        f"{right} of {len(rows)} predictions are within {NEAR:.0%} of the measured step "
        f"(median error {statistics.median(errors):.1%}, largest {errors[-1]:.1%})"
    )
