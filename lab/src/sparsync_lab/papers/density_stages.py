"""Density that falls in stages, as in the code of P1's authors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DensityStages:
    """A density for each of the first parts of a training, and one for the rest.

    Args:
        stages: the share of the training at which a density ends, and that density; shares ascend.
        steps: of the training.
        last: the density after all stages.
    """

    stages: Sequence[Sequence[float]]
    steps: int
    last: float

    def __call__(self, step: int) -> float:
        return next((density for until, density in self.stages if step < until * self.steps), self.last)
