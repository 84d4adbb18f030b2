"""What a pass over a gradient reads and writes beside it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Memory:
    """The residual of one flat gradient, aligned with it entry by entry.

    ``before`` is read and ``after`` written; they are the same tensor unless the step can be rolled back.
    ``energy`` is the sum of squares of what a pass found there, before anything was taken out.
    """

    before: Tensor
    after: Tensor
    energy: float = 0.0
