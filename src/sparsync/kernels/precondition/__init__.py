"""Make the update that a gradient asks for: velocity over the square root of the second moment, times the rate."""

from sparsync.kernels.precondition.reference import Tables, precondition

__all__ = ["Tables", "precondition"]
