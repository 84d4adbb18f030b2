"""A byte budget: what was asked for, what follows from it, and what came of it.

How densities are found within it is ``engine/budget.py``'s, which knows what a plan's messages take.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsync.number_checks import is_number, is_whole
from sparsync.schedule import FrontLoaded

DEFAULT = 1 / 60  # the recipe's own
STEPS = 2000  # of a training whose length is not known: over its first tenth bytes are spent early
MOST = 8.0  # times the budget, in a single step
FOLLOWS = ("compressor", "collective", "values", "momentum", "precondition", "dense_below", "dense_1d")


@dataclass(frozen=True)
class Budget:
    """What a worker may send in a step, on average over a training, as a share of what it would send dense.

    Dense is fp32 in a ring: 2 (P - 1) / P times 4 bytes for every entry that is trained. All that is sent counts:
    headers, padding, and the tensors that travel dense.

    Args:
        share: of dense's bytes, in (0, 1].
        total_steps: of the training; ``None``: not known.
        given: options that do not follow from it, as they were given; in alphabetical order.
        asked: the user named it, so that one which cannot be reached is refused; a recipe's own gives way.
    """

    share: float
    total_steps: int | None = None
    given: tuple[str, ...] = ()
    asked: bool = True

    def __post_init__(self) -> None:
        if not (is_number(self.share) and 0 < self.share <= 1):
            raise ValueError(f"budget must be a share of dense's bytes, above 0 and at most 1, got {self.share!r}")
        steps = self.total_steps
        if steps is not None and not (is_whole(steps) and steps >= 1):
            raise ValueError(f"total_steps must be a whole number, 1 or more, got {steps!r}")

    @property
    def steps(self) -> int:
        """Steps over which the mean is the budget."""
        return self.total_steps or STEPS

    def schedule(self, density: float, most: float) -> FrontLoaded:
        """Return the densities that end with this one, none above ``most``: bytes are spent early."""
        return FrontLoaded(density, self.steps, MOST, most)

    def follows(self, *options: str) -> bool:
        """Return whether none of these options was given."""
        return not set(options) & set(self.given)


@dataclass(frozen=True)
class Spending:
    """What came of a budget.

    Args:
        share: within which it is: what was asked for, or what a recipe's own was raised to.
        workers: that there are; a single one sends nothing, and has what two would have.
        dense: bytes that each would send dense in a step.
        densities: at first and at last.
        first, last: bytes that each sends in a step at these.
        mean: bytes that each sends in a step, over all of ``steps``.
    """

    share: float
    workers: int
    dense: float
    densities: tuple[float, float]
    first: float
    last: float
    mean: float
    steps: int

    def describe(self, budget: Budget) -> str:
        """Return it in words."""
        raised = f", raised to {share_text(self.share)} for so small a model" if self.share > budget.share else ""
        sent = f"{self.last:,.0f} bytes a step and worker"
        if self.densities[0] != self.densities[1]:
            first, last = self.densities
            sent = f"{self.first:,.0f} bytes a step and worker at first (density {first:.4g}), {self.last:,.0f} at last"
            sent += f" ({last:.4g}), {self.mean:,.0f} on average over {self.steps:,} steps"
        dense = f"{share_text(self.mean / self.dense)} of dense's {self.dense:,.0f}"
        alone = "; so it would be for two workers, one alone sends nothing" if self.workers == 1 else ""
        return f"{share_text(budget.share)}{raised}: {sent}, {dense}{alone}"


def share_text(share: float) -> str:
    """Return a share as people say it: 1/60."""
    return f"1/{1 / share:.3g}" if share < 2 / 3 else f"{share:.3g}"
