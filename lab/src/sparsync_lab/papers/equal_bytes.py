"""At which density a method sends as many bytes as TopK-SGD at 0.1 %.

Trainings are named after their density. Those that are stored were made while a header had 32 bytes: so these are
counted here, whatever a header has now, and all of them are still found.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from sparsync.collectives import AllGather, Balanced, Collective, GTopK
from sparsync.engine.budget import four_digits
from sparsync.engine.traffic import units_of
from sparsync.layout import Layout, Parameter
from sparsync.wire import HEADER, WORD, Wire
from sparsync_lab.papers.run import Run
from sparsync_lab.papers.step_times import spans_of
from sparsync_lab.papers.sweep import Method, Setting, method_of
from sparsync_lab.papers.trainings import plan_of, traffic_per_step

COUNTED = 32  # bytes of a header


def budget(model: str, workers: int) -> float:
    """Return the bytes of a step of TopK-SGD: 0.1 % of all entries, 32 + 32 bits each, gathered."""
    spans = spans_of(model)
    layout = Layout.cut(spans, numel=spans[-1].stop, scope="global", density=0.001)
    return AllGather().traffic(layout, Wire(), workers).mean_bytes - _excess(AllGather(), workers)


def counted_traffic(run: Run) -> Callable[[float], float]:
    """Return what ``traffic_per_step`` does, with headers as they are counted here."""
    plan, tensors = plan_of(run)
    parameters = [Parameter.of(name, tensor) for name, tensor in tensors.items()]
    units, sketches = units_of(plan, parameters, plan.dense_names(tensors), torch.device("meta"))
    every = [*units, *(sketch.unit for sketch in sketches)]
    cost, excess = traffic_per_step(run), sum(_excess(unit.collective, run.workers) for unit in every)
    return lambda density: cost(density) - excess


@cache
def density_of(setting: Setting, label: str, length: int) -> float:
    """Return the largest density at which a method sends no more than TopK-SGD, over the whole training."""
    method = method_of(label)
    if method.front == 1 and length > 0:
        return density_of(setting, label, 0)
    options = {**options_in(setting, method), "density": 0.001}
    run = Run(label, setting.model, method.name, options, method.settings, setting.workers, front=method.front,
              steps=setting.lengths[length])  # fmt: skip
    return within(run, budget(setting.model, setting.workers))


def within(run: Run, allowed: float) -> float:
    """Return the largest density at which a step of the run sends no more than that."""
    cost, low, high = counted_traffic(run), 1e-5, 0.05
    if cost(high) <= allowed:
        low, high = high, 0.5
    for _ in range(16):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if cost(middle) <= allowed else (low, middle)
    if cost(low) > allowed:
        raise ValueError(f"{run.label} sends {cost(low):,.0f} bytes a step, most of them dense, of {allowed:,.0f}")
    return four_digits(low)  # they are part of the run's name


def options_in(setting: Setting, method: Method) -> dict[str, Any]:
    """Return a method's options; where the optimizer has no momentum of SGD's kind, there is none to correct."""
    options = dict(method.options)
    if setting.momentum > 0 and setting.optimizer == "sgd":
        return options
    if method.name == "dgc":
        return options | {"momentum": "keep"}
    corrects = options.get("momentum") == "correct"
    return {name: value for name, value in options.items() if not (corrects and name in ("momentum", "beta"))}


def _excess(collective: Collective, workers: int) -> float:
    """Return the bytes of an exchange's headers, a worker, beyond those that are counted."""
    sent = {Balanced: 2.0, GTopK: 2 / workers}.get(type(collective), 1.0)
    return sent * (workers - 1) * (WORD * HEADER - COUNTED)
