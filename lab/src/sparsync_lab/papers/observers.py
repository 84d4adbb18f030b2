"""Observe virtual workers while they train: gradient plus residual, and P3's condition."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsync import theory
from sparsync.layout import entries_for
from sparsync_lab.papers.gradient_shapes import SHARES, histogram
from sparsync_lab.virtual import VirtualWorkers

BINS = 60
MOST_ENTRIES = 4_000_000  # entries that are sorted; of more, every so many
SPREAD = 6  # deviations that a histogram spans either way


class StepObserver:
    """Take snapshots of a step of virtual workers: ``before`` it, and ``after`` its exchange.

    Args:
        kind: ``"shape"``: the first worker's gradient plus residual; ``"gtopk"``: P3's ratio, over all workers.
        clip: largest norm of a worker's gradient.
        density: share of the entries that is sent.
    """

    def __init__(self, virtual_workers: VirtualWorkers, kind: str, clip: float | None, density: float) -> None:
        self.virtual_workers, self.kind, self.clip, self.density = virtual_workers, kind, clip, density
        self.names = [name for name, parameter in virtual_workers.model.named_parameters() if parameter.requires_grad]
        self.kept: list[Tensor | float] = []

    def before(self) -> None:
        """Remember what the workers keep now."""
        ranks = range(1 if self.kind == "shape" else self.virtual_workers.workers)
        self.kept = [self._residual(rank) for rank in ranks]

    def after(self) -> dict[str, Any]:
        """Return the snapshot, once the gradients have been exchanged."""
        us = [kept + self._gradient(rank) for rank, kept in enumerate(self.kept)]
        self.kept = []
        if self.kind == "shape":
            return {"step": self.virtual_workers.step, **gradient_shape(us[0])}
        mean = torch.cat([self._grad(name).flatten() for name in self.names])
        if not all(u.isfinite().all() for u in us):
            return {"step": self.virtual_workers.step}
        k = entries_for(self.density, mean.numel())
        return {
            "step": self.virtual_workers.step,
            "ratio": theory.gtopk_ratio(us, mean * self.virtual_workers.workers, k),
        }

    def _residual(self, rank: int) -> Tensor | float:
        parts = [self.virtual_workers.residual(rank, name) for name in self.names]
        if all(part is None for part in parts):
            return 0.0
        shapes = [self.virtual_workers.model.get_parameter(name) for name in self.names]
        filled = [torch.zeros_like(s) if p is None else p for p, s in zip(parts, shapes, strict=True)]
        return torch.cat([part.detach().flatten() for part in filled])

    def _gradient(self, rank: int) -> Tensor:
        own = torch.cat([self.virtual_workers.gradient(rank, name).flatten() for name in self.names])
        norm = float(own.norm())
        return own * (self.clip / norm) if self.clip is not None and norm > self.clip else own.clone()

    def _grad(self, name: str) -> Tensor:
        grad = self.virtual_workers.model.get_parameter(name).grad
        assert grad is not None
        return grad


class CountObserver:
    """Count the entries that are sent, and how often the k largest went instead of a mask.

    Args:
        every: steps between snapshots.
    """

    def __init__(self, virtual_workers: VirtualWorkers, every: int) -> None:
        self.virtual_workers, self.every = virtual_workers, every
        self.counts: list[float] = []

    def after(self) -> list[dict[str, Any]]:
        """Return a snapshot, if it is time for one: least, mean and most entries of a worker in the steps since the
        last, and the fallbacks of all workers so far."""
        own, step = self.virtual_workers, self.virtual_workers.step
        self.counts.append(own.tally.entries)
        if step % self.every or len(self.counts) < 2:
            return []
        sent = [(b - a) / own.workers for a, b in zip(self.counts, self.counts[1:], strict=False)]
        self.counts = self.counts[-1:]
        found = {"step": step, "least": min(sent), "mean": sum(sent) / len(sent), "most": max(sent)}
        return [{**found, "fallbacks": own.fallbacks}]


def lose_residuals(virtual_workers: VirtualWorkers) -> None:
    """Clear what the workers keep: methods without error feedback."""
    named = [name for name, parameter in virtual_workers.model.named_parameters() if parameter.requires_grad]
    kept = [virtual_workers.residual(rank, name) for rank in range(virtual_workers.workers) for name in named]
    own = [residual for residual in kept if residual is not None]
    if own:
        torch._foreach_zero_(own)


def gradient_shape(u: Tensor) -> dict[str, Any]:
    """Return a gradient's histogram within six deviations, its exact ratios, and how far it meets what Theorem 1's
    proof takes."""
    deviation = float(u.double().std())
    if not (math.isfinite(deviation) and deviation > 0):
        return {"deviation": deviation}
    inner = u[u.abs() <= SPREAD * deviation]
    middles, density = histogram(inner, BINS)
    share = inner.numel() / u.numel()
    sample = u[:: -(-u.numel() // MOST_ENTRIES)] if u.numel() > MOST_ENTRIES else u
    shape = theory.bell_shape(sample)
    ks = [entries_for(s, sample.numel()) for s in SHARES]
    return {
        "deviation": deviation,
        "mean": float(u.double().mean()),
        "largest": float(u.abs().max()),
        "kurtosis": float(((u.double() - u.double().mean()) / deviation).pow(4).mean()),
        "x": middles,
        "density": [d * share for d in density],
        "errors": theory.topk_errors(sample, ks),
        "above_line": shape.above_line,
        "bend": shape.bend,
        "excess": shape.excess,
    }


def ratios(snapshot: Mapping[str, Any]) -> dict[float, float]:
    """Return the exact ratio by k/d, of a snapshot of a shape."""
    values: Sequence[float] = snapshot["errors"]
    return dict(zip(SHARES, values, strict=True))
