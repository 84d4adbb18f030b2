"""Density over the steps of a training: a number, or any callable from step to density."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparsync.number_checks import is_number

Schedule = Callable[[int], float]
STAGES, SHARE = 4, 0.1  # of a front-loaded training: how many, and the part of it that they take together


@dataclass(frozen=True)
class Constant:
    """The same density at every step."""

    density: float

    def __call__(self, step: int) -> float:
        return self.density


@dataclass(frozen=True)
class ExponentialWarmup:
    """Deep Gradient Compression's warm-up: in epoch e of E the density is max(rho^((e+1)/(E+1)), rho).

    Args:
        density: rho, the density after the warm-up, in (0, 1].
        epochs: E, how many epochs the warm-up lasts.
        steps_per_epoch: steps in one epoch.
    """

    density: float
    epochs: int
    steps_per_epoch: int

    def __post_init__(self) -> None:
        if not (is_number(self.density) and 0 < self.density <= 1):
            raise ValueError(f"density must be above 0 and at most 1, got {self.density!r}")
        if self.epochs < 0 or self.steps_per_epoch < 1:
            raise ValueError(
                f"epochs must be 0 or more and steps_per_epoch 1 or more, got {self.epochs} and {self.steps_per_epoch}"
            )

    def __call__(self, step: int) -> float:
        epoch = step // self.steps_per_epoch
        return max(float(self.density ** ((epoch + 1) / (self.epochs + 1))), self.density)


@dataclass(frozen=True)
class FrontLoaded:
    """Bytes spent early, when they help most: over the first tenth of a training the density falls to its last one, in
    four stages of equal ratio.

    With a factor of 8 and 40 steps or more, as much is sent in all as with 1.33 times the last density from the first
    step on.

    Args:
        density: the last one, in (0, 1].
        steps: of the whole training.
        factor: of the last density at the first step, 1 or more.
        most: the largest density, in (0, 1].
    """

    density: float
    steps: int
    factor: float = 8.0
    most: float = 1.0

    def __post_init__(self) -> None:
        if not (is_number(self.density) and 0 < self.density <= 1):
            raise ValueError(f"density must be above 0 and at most 1, got {self.density!r}")
        if not (isinstance(self.steps, int) and self.steps >= 1):
            raise ValueError(f"steps must be a whole number, 1 or more, got {self.steps!r}")
        if not (isinstance(self.factor, int | float) and self.factor >= 1):
            raise ValueError(f"factor must be a number, 1 or more, got {self.factor!r}")
        if not self.density <= self.most <= 1:
            raise ValueError(f"most must be at least the density and at most 1, got {self.most!r}")

    def __call__(self, step: int) -> float:
        stage = step // self._length
        return min(self.most, self.density * self.factor ** (1 - stage / STAGES)) if stage < STAGES else self.density

    def stages(self) -> list[tuple[float, int]]:
        """Densities, and for how many steps each."""
        begins = [stage * self._length for stage in range(STAGES)]
        counts = [max(0, min(self._length, self.steps - begin)) for begin in begins]
        return [*zip(map(self, begins), counts, strict=True), (self.density, self.steps - sum(counts))]

    @property
    def _length(self) -> int:
        return max(1, round(SHARE * self.steps / STAGES))


def as_schedule(density: float | Schedule) -> Schedule:
    """Return a schedule from a number or a callable; what the callable returns is checked at every step."""
    schedule: Schedule = density if callable(density) else Constant(density)

    def checked(step: int) -> float:
        now = schedule(step)
        if not (is_number(now) and 0 < now <= 1):
            raise ValueError(f"density must be above 0 and at most 1, got {now!r} at step {step}")
        return float(now)

    checked(0)
    return checked
