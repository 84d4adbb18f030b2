"""What a pass over a gradient reads and writes beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from sparsync.workspace import Workspace

if TYPE_CHECKING:  # which import this
    from sparsync.kernels.precondition.reference import Tables
    from sparsync.kernels.sketch.reference import Sketched


@dataclass
class Velocity:
    """Momentum correction: ``after = beta * before + gradient`` enters the residual in the gradient's place.

    ``masking``: entries that are sent clear theirs.
    """

    before: Tensor
    after: Tensor
    beta: float
    masking: bool


@dataclass
class Update:
    """Preconditioned feedback: the update that a gradient asks for enters the residual in the gradient's place.

    ``before`` and ``after``: velocity. ``tensors``: what the flat gradient consists of, the same object from step to
    step. ``tables``: the step's preconditioner.
    """

    before: Tensor
    after: Tensor
    tensors: Sequence[Sketched]
    tables: Tables


@dataclass
class Memory:
    """The residual of one flat gradient, aligned with it entry by entry.

    ``before`` is read and ``after`` written; they are the same tensor unless the step can be rolled back.
    ``energy`` is the sum of squares of what a pass found there, before anything was taken out. ``workspace`` lives as
    long as the residual: a pass may keep its buffers there.
    """

    before: Tensor
    after: Tensor
    velocity: Velocity | None = None
    update: Update | None = None
    energy: float = 0.0
    workspace: Workspace = field(default_factory=Workspace)

    def carry_over(self, start: int, stop: int) -> None:
        """Keep residual and velocity as they were from ``start`` to before ``stop``."""
        both = [(self.before, self.after)]
        both += [(self.velocity.before, self.velocity.after)] if self.velocity else []
        for before, after in both:
            after[start:stop].copy_(before[start:stop])
