"""Draw random entries of every segment."""

from sparsync.kernels.random_indices.reference import RandomIndices, random_indices_of

__all__ = ["RandomIndices", "random_indices_of"]
