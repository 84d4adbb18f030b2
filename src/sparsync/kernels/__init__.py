"""The memory-bound loops. ``reference`` is plain PyTorch and is the specification."""

from sparsync.kernels.memory import Memory
from sparsync.kernels.reference import Rows, above, largest, limit, sampled_threshold, sweep, take, take_all

__all__ = ["Memory", "Rows", "above", "largest", "limit", "sampled_threshold", "sweep", "take", "take_all"]
