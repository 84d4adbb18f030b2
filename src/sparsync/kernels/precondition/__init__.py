"""Make the update that a gradient asks for: velocity over the square root of the second moment, times the rate."""

from sparsync.kernels.precondition.reference import Tables, precondition, write_scales

__all__ = ["Tables", "precondition", "write_scales"]
