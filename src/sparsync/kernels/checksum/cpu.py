"""The checksum of messages by a loop that numba compiles."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import numpy as np

from sparsync.kernels.cpu import Array, compiled
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


def checksum(rows: Array) -> Array:
    """Return the checksums of rows of unsigned words."""
    sums = np.empty(len(rows), np.uint64)
    _checksum(rows, sums)
    return sums
