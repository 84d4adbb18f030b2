"""The memory-bound loops. ``reference`` is plain PyTorch and is the specification.

Here the version is picked that runs: on the CPU the compiled one, where numba is installed and there is enough to do.
"""

from collections.abc import Sequence

from torch import Tensor

from sparsync.kernels import compiled, floors, reference
from sparsync.kernels.memory import Memory, Velocity
from sparsync.kernels.reference import Rows, Run, clip_scale, limit, sampled_threshold, take


def sweep(grad: Tensor, memory: Memory, runs: Sequence[Run], scale: float = 1.0) -> tuple[Rows, int]:
    """As ``reference.sweep``."""
    kept = [memory.before, *([memory.velocity.before, memory.velocity.after] if memory.velocity else [])]
    if compiled.usable(memory.after, grad, *kept):
        return compiled.sweep(grad, memory, runs, scale)
    return reference.sweep(grad, memory, runs, scale)


def above(u: Tensor, rows: Rows, threshold: float) -> Tensor:
    """As ``reference.above``."""
    return compiled.above(u, rows, threshold) if compiled.usable(u) else reference.above(u, rows, threshold)


def largest(u: Tensor, rows: Rows, k: int) -> Tensor:
    """As ``reference.largest``."""
    return compiled.largest(u, rows, k) if compiled.usable(u) else reference.largest(u, rows, k)


def histogram(u: Tensor, found: Tensor, floor: int) -> tuple[Tensor, Tensor]:
    """As ``floors.histogram``."""
    return compiled.histogram(u, found, floor) if compiled.usable(u) else floors.histogram(u, found, floor)


__all__ = [
    "Memory",
    "Rows",
    "Velocity",
    "above",
    "clip_scale",
    "histogram",
    "largest",
    "limit",
    "sampled_threshold",
    "sweep",
    "take",
]
