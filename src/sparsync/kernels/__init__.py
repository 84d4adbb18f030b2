"""The memory-bound loops. ``reference`` is plain PyTorch and is the specification."""

from sparsync.kernels.memory import Memory, Velocity
from sparsync.kernels.reference import (
    Rows,
    above,
    clip_scale,
    largest,
    limit,
    sampled_threshold,
    sweep,
    take,
    take_all,
)

__all__ = [
    "Memory",
    "Rows",
    "Velocity",
    "above",
    "clip_scale",
    "largest",
    "limit",
    "sampled_threshold",
    "sweep",
    "take",
    "take_all",
]
