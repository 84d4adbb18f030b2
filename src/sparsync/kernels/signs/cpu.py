"""Round values to signs of one scale by a loop that numba compiles; ``wire/values.py`` has the specification."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from sparsync.kernels.cpu import array, bits, compiled

MAGNITUDE, INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)  # every bit but the sign; the bits of infinity
SHARES = np.float32(2**24)  # of the largest magnitude, in which all others are counted
LARGEST, TINY = np.float32(np.finfo(np.float32).max), np.float32(np.finfo(np.float32).tiny)
LEAST = 2.0**-14  # of the largest magnitude: no scale is smaller
SIGNIFICANT = np.int32(-0x10000)  # bits of a scale


@compiled("boolean(float32[::1], int32[::1], float32, int32[::1])")
def _round(values, words, most, out):
    """Write the bits of values as they travel; ``words``: theirs. Returns whether all values are finite."""
    peak = np.int32(0)
    for i in range(words.shape[0]):
        size = np.int32(words[i] & MAGNITUDE)
        peak = size if size > peak else peak
    if peak >= INFINITE:
        return False
    largest = np.int32(peak).view(np.float32)
    divisor, total = max(largest, TINY), np.int64(0)
    for i in range(values.shape[0]):
        total += np.int32(np.float32(np.abs(values[i]) / divisor) * SHARES)
    mean = np.float64(largest) * (np.float64(total) / (np.float64(values.shape[0]) * np.float64(SHARES)))
    exact = np.float32(min(max(mean, np.float64(largest) * LEAST), np.float64(LARGEST)))
    scale = min(np.int32(exact.view(np.int32) & SIGNIFICANT).view(np.float32), most)
    word, half = np.float32(scale).view(np.int32), np.float32(scale * np.float32(0.5)).view(np.int32)
    for i in range(words.shape[0]):
        out[i] = (word | (words[i] & ~MAGNITUDE)) if np.int32(words[i] & MAGNITUDE) >= half else np.int32(0)
    return True


def round_signs(values: Tensor, most: float) -> Tensor | None:
    """Return values of one segment, fp32 and 1-D, as signs of one scale, which is at most ``most``; ``None`` if they
    are not finite."""
    out = torch.empty_like(values)
    limit = np.float32(math.inf if math.isinf(most) else most)
    return out if _round(array(values), bits(values), limit, bits(out)) else None
