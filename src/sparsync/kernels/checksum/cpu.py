"""The checksum of messages by a loop that numba compiles."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsync.kernels.cpu import compiled
from sparsync.kernels.message.header import SUM

AT = 8  # where the checksum stands, which is left out
assert AT == SUM


@compiled("void(uint32[:, ::1], uint64[::1])")
def _checksum(rows, sums):
    """Fill ``sums``. A factor that is cut to 32 bits is multiplied by a vector instruction."""
    for row in range(rows.shape[0]):
        total = np.uint64(0)
        for i in range(rows.shape[1]):
            total += np.uint64(rows[row, i]) * np.uint64(np.uint32(2 * i + 3))
        for i in range(AT, AT + 2):
            total -= np.uint64(rows[row, i]) * np.uint64(2 * i + 3)
        sums[row] = total


def checksum(messages: Tensor) -> Tensor:
    """Do as ``reference.checksum``."""
    sums = torch.empty(messages.shape[:-1], dtype=torch.int64)
    rows = messages.contiguous().view(-1, messages.shape[-1]).numpy()
    _checksum(rows.view(np.uint32), sums.view(-1).numpy().view(np.uint64))
    return sums
