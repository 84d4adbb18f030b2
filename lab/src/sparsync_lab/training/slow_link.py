"""How long a measured step would take if its workers were machines of their own, with links of 1 Gb/s."""

from __future__ import annotations

import torch

from sparsync.planner import Link, ModelShape, Network
from sparsync.planner.costs import FixedCosts
from sparsync.planner.forecast import forecast
from sparsync.planner.methods import METHODS, Method
from sparsync_lab import models
from sparsync_lab.data import SHAPES, Images
from sparsync_lab.training.settings import Training, attach_options

LINK = Link.at(1e9)


def seconds_on_slow_link(training: Training, workers: int, step_s: float) -> float:
    """Return the planner's forecast: the step as it was measured here, choosing and coding of entries included, and
    what backward does not hide of its exchanges.

    Args:
        step_s: seconds of a step here.
    """
    given, costs = attach_options(training), FixedCosts()
    method = METHODS["dense fp32"]
    if given is not None:
        # Whichever momentum an SGD has, the messages are the same; a plan for others needs the optimizer.
        method = Method("", given if "recipe" in given else {**given, "momentum": "keep"})
    model = _shape(training)
    step = forecast(training.method, method, model, workers, costs, training.optimizer, step=training.steps)
    return step.seconds(Network(LINK), model.timeline(step_s, costs.blocking))


def _shape(training: Training) -> ModelShape:
    channels, side = SHAPES[training.data]
    x, y = torch.empty(0, channels, side, side), torch.empty(0, dtype=torch.long)
    with torch.device("meta"):
        return ModelShape.of_module(models.make_image_model(training.model, Images(x, y, x, y, 10)))
