"""How large a value may be that travels, so that neither a sum over the workers nor a cast to the bucket's dtype
overflows; what is cut off stays in the residual of whoever cuts it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

HALF = 65504.0  # fp16's largest number


def largest_value(dtype: torch.dtype) -> float:
    """Return the largest magnitude of what one worker may send of an entry, in buckets of ``dtype``.

    In fp16 that is the end of its range, which the mean of such values does not leave. Elsewhere it is the last bit of
    the largest numbers of the residual's dtype, 2**104 in fp32: it can be subtracted exactly from any of them, and the
    sum of millions of workers is finite.
    """
    if dtype == torch.float16:
        return HALF
    kept = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    return power_below(kept.max) * kept.eps


def power_below(most: float) -> float:
    """Return the largest power of 2 that is at most ``most``."""
    return most if math.isinf(most) else 2.0 ** (math.frexp(most)[1] - 1)


def limit(sent: Tensor, values: Tensor, most: float) -> Tensor:
    """Return ``sent`` with magnitudes of at most ``most``; ``values``: what it was made from.

    What is sent instead can be subtracted exactly from most values: a number of 8 bits near ``most`` if there is one,
    and a power of 2 from the largest of them. Every codec carries both.
    """
    if math.isinf(most):
        return sent
    low = power_below(most)
    high = low * 255 / 128
    size = torch.where(values.abs() < low * 2**17, high, low) if high <= most else torch.full_like(values, low)
    return torch.where(sent.abs() > most, torch.copysign(size.to(sent.dtype), values), sent)


def cast_finite(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values in ``dtype``; what is finite stays so, where a sum was rounded beyond fp16's range."""
    if dtype != torch.float16 or values.dtype == torch.float16:
        return values.to(dtype)
    return torch.where(values.isfinite(), values.clamp(-HALF, HALF), values).to(dtype)
