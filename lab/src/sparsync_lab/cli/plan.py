"""``sparsync plan`` with what the laboratory adds: its models by name, how long their passes take, and plots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import typer

from sparsync.cli.plan import plan as run_plan
from sparsync.planner import Plan
from sparsync.planner.shapes import SHAPES, Shapes, TensorShape
from sparsync_lab.models import CATALOGUE
from sparsync_lab.models.catalogue import build

BANDWIDTHS = (1e8, 1e11)  # bits a second, between which a plot is drawn
POINTS = 61
ROUNDS = 7


def plan(context: typer.Context) -> None:
    """Predict how long a step of a model takes with each method."""
    code = run_plan(context.args, models(), draw, time_model)
    if code:
        raise typer.Exit(code)


def models() -> dict[str, Shapes]:
    """Return the library's models and the laboratory's."""
    return {**{name: _shapes_of(name) for name in CATALOGUE}, **SHAPES}


def _shapes_of(name: str) -> Callable[[], list[TensorShape]]:
    def shapes() -> list[TensorShape]:
        with torch.device("meta"):
            return [TensorShape(tuple(parameter.shape)) for parameter in build(name).parameters()]

    return shapes


def time_model(name: str, device: torch.device) -> float:
    """Return the seconds of a forward and a backward pass of an image model, with the papers' batch."""
    from sparsync_lab.papers.step_times import pass_seconds

    if name not in CATALOGUE or CATALOGUE[name].data not in ("mnist", "cifar10"):
        known = [known for known, spec in CATALOGUE.items() if spec.data in ("mnist", "cifar10")]
        raise ValueError(f"--compute must be given: passes are timed of {', '.join(known)}, not of {name}")
    return sum(pass_seconds(name, CATALOGUE[name].batch, device, ROUNDS))


def draw(made: Plan, path: Path) -> None:
    """Draw how long a step takes with each method, over bandwidth."""
    from sparsync_lab.report import Curve, LineChart, png

    low, high = BANDWIDTHS
    rates = [low * (high / low) ** (point / (POINTS - 1)) for point in range(POINTS)]
    rows = [made.planner.rows(made.network.with_bandwidth(bits)) for bits in rates]
    curves = [
        Curve(name, [bits / 1e9 for bits in rates], [1e3 * own[number].seconds for own in rows])
        for number, name in enumerate(made.planner.methods)
    ]
    title = f"{made.planner.model.title}, {made.planner.workers:,} workers"
    chart = LineChart(title, "Gbit/s; time of a step", curves, y_unit="ms", log_x=True, log_y=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    png([chart], path)
