"""What a pass over a gradient reads and writes beside it."""

from dataclasses import dataclass, field

from torch import Tensor

from sparsync.workspace import Workspace


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
class Memory:
    """The residual of one flat gradient, aligned with it entry by entry.

    ``before`` is read and ``after`` written; they are the same tensor unless the step can be rolled back.
    ``energy`` is the sum of squares of what a pass found there, before anything was taken out. ``workspace`` lives as
    long as the residual: a pass may keep its buffers there.
    """

    before: Tensor
    after: Tensor
    velocity: Velocity | None = None
    energy: float = 0.0
    workspace: Workspace = field(default_factory=Workspace)
