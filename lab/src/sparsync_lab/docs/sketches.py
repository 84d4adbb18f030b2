"""What sketches take of a preconditioned step's bytes: counted by the library, for models that nobody has to train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from sparsync.config import resolve
from sparsync.engine.bucketing import Unit
from sparsync.engine.traffic import bytes_per_step, units_of
from sparsync.layout import Parameter
from sparsync_lab.docs.sources import Sources, percent, table
from sparsync_lab.models import CATALOGUE
from sparsync_lab.models.gpt import GPT

BUDGET, WORKERS = 60, 16


def block(width: int, bias: bool) -> Callable[[], nn.Module]:
    """Return what makes a transformer's block: four matrices and two layer norms."""
    return lambda: nn.TransformerEncoderLayer(width, 16, 4 * width, batch_first=True, bias=bias)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "block of width 1024 without biases": block(1024, bias=False),
    "block of width 1024": block(1024, bias=True),
    "block of width 1792": block(1792, bias=True),
    "GPT of width 256, 4 layers": GPT,
    "GPT of width 1024, 24 layers": lambda: GPT(50_257, 24, 1024, 16),
    "GPT of width 4096, 32 layers": lambda: GPT(50_257, 32, 4096, 64),
    "ResNet-20": CATALOGUE["resnet20"].make,
}


@dataclass(frozen=True)
class Cost:
    """What a worker sends in a preconditioned step.

    Args:
        entries: of the model.
        numbers: in all sketches.
        sketches, exact: bytes of the sketches, and of the tensors that travel dense with them, as shares of a dense
            fp32 ring's.
        least: share that is sent with as few entries as there can be.
    """

    entries: int
    numbers: int
    sketches: float
    exact: float
    least: float


def cost_of(make: Callable[[], nn.Module], workers: int = WORKERS) -> Cost:
    """Count what a model's preconditioned step takes."""
    meta = torch.device("meta")
    with meta:
        model = make()
    tensors = dict(model.named_parameters())
    plan = resolve(optimizer=torch.optim.AdamW(model.parameters()), density=0.01)
    names = plan.dense_names(tensors)
    parameters = [Parameter.of(name, tensor) for name, tensor in tensors.items()]
    entries = sum(parameter.numel for parameter in parameters)
    dense = 2 * (workers - 1) / workers * 4 * entries

    def share(units: Sequence[Unit]) -> float:
        sent = (unit.traffic(unit.layout_at(1.0)[0], plan.wire, workers, torch.float32) for unit in units)
        return sum(traffic.mean_bytes for traffic in sent) / dense

    messages = [found.unit for found in units_of(plan, parameters, names, meta)[1]]
    alone = [found.unit for found in units_of(plan, [p for p in parameters if p.name not in names], names, meta)[1]]
    return Cost(
        entries=entries,
        numbers=sum(unit.grad.numel() for unit in alone),
        sketches=share(alone),
        exact=share(messages) - share(alone),
        least=bytes_per_step(plan, tensors, workers)(0.5 / entries) / dense,
    )


def cost(sources: Sources) -> str:
    """Return what sketches and 1-D tensors take of a budget, by model."""
    rows = []
    for name, make in MODELS.items():
        found = cost_of(make)
        shares = [percent(found.sketches, 3), percent(BUDGET * found.sketches), percent(BUDGET * found.exact)]
        shares.append(percent(BUDGET * (found.sketches + found.exact)))
        rows.append([name, f"{found.entries:,}", f"{found.numbers:,}", *shares, f"1/{1 / found.least:,.0f}"])
    headings = ["model", "entries", "numbers in sketches", "their bytes, of dense's", f"of a budget of 1/{BUDGET}"]
    return table([*headings, "tensors that travel dense, of it", "both", "smallest budget"], rows)
