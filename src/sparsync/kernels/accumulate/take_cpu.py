"""Take entries out of the residual, by loops that numba compiles."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsync.kernels.accumulate.reference import Rounding, round_values
from sparsync.kernels.cpu import array, compiled
from sparsync.kernels.memory import Memory

FLOATS = "float32[::1]"


@compiled(f"void({FLOATS}, int64[::1], {FLOATS})")
def _gather(u, indices, out):
    for i in range(out.shape[0]):
        out[i] = u[indices[i]]


@compiled(f"int64({FLOATS}, {FLOATS}, boolean, int64[::1], {FLOATS}, {FLOATS}, int64[::1], {FLOATS})")
def _take(after, velocity, masking, indices, values, sent, out_indices, out_values):
    """Take ``sent`` out of the residual, all but what could not be put together again exactly; write what goes, with
    zeros behind it, and return how much that is."""
    for i in range(indices.shape[0]):
        rest = np.float32(values[i] - sent[i])
        exact = (np.float32(rest + sent[i]) == values[i]) & (np.float32(values[i] - rest) == sent[i])
        out_values[i] = sent[i] if exact else np.float32(0)
    for i in range(indices.shape[0]):  # alone, so that memory answers many at a time
        after[indices[i]] = values[i] - out_values[i]
    count = 0
    for i in range(indices.shape[0]):  # without a branch, which might be unpredictable
        value = out_values[i]
        out_indices[count], out_values[count] = indices[i], value
        count += value != 0
    out_indices[count:], out_values[count:] = 0, 0
    if masking:
        for i in range(count):
            velocity[out_indices[i]] = 0
    return count


def take(
    memory: Memory,
    indices: Tensor,
    segments: Tensor,
    parts: int,
    rounding: Rounding | None,
    most: float,
    capacity: int,
    values: Tensor | None = None,
) -> tuple[Tensor, Tensor, int]:
    """Do as ``reference.take`` without unused parameters, and mask velocities; returns indices and values of what goes,
    ``capacity`` of each with zeros at the end, and how many go.

    Args:
        values: what stands at ``indices``, where that is known already.
    """
    velocity, masking = memory.after, False
    if memory.velocity is not None:
        velocity, masking = memory.velocity.after, memory.velocity.masking
    if values is None:
        values = torch.empty(indices.numel(), dtype=torch.float32, device="cpu")
        _gather(array(memory.after), array(indices), array(values))
    sent = round_values(values, segments, parts, rounding, most)
    # One more than can go: the loop writes every entry, and counts it afterwards.
    out = tuple(torch.empty(capacity + 1, dtype=dtype, device="cpu") for dtype in (torch.int64, torch.float32))
    number = _take(
        array(memory.after), array(velocity), masking, array(indices), array(values), array(sent), *map(array, out)
    )
    return out[0][:capacity], out[1][:capacity], number
