"""Sum up messages, so that whoever reads them knows whether they came as they were sent."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsync.kernels.checksum import reference
from sparsync.kernels.checksum.reference import FIRST, STEP
from sparsync.kernels.cpu import Array, available, loaded
from sparsync.kernels.device import usable_on
from sparsync.kernels.message.header import SUM

LEAST = 1 << 16  # words that are worth loading numba


def checksum(messages: Tensor) -> Tensor:
    """Do as ``reference.checksum``, by what is fastest where the messages are."""
    if messages.device.type == "cpu":
        return torch.from_numpy(checksum_on_host(messages.numpy())).view(messages.shape[:-1])
    if messages.is_cuda and usable_on(messages.device):
        from sparsync.kernels.checksum import launch

        return launch.checksum(messages)
    return reference.checksum(messages)


def checksum_on_host(messages: Array) -> Array:
    """Return the checksums, int64 and 1-D: on messages of a few words, tensors would cost more than the sum."""
    words = np.ascontiguousarray(messages).view(np.uint32)
    rows = words.reshape(-1, words.shape[-1])
    if (loaded() or rows.size >= LEAST) and available():
        from sparsync.kernels.checksum import cpu

        return cpu.checksum(rows).view(np.int64)
    numbers = rows.astype(np.uint64)
    numbers[:, SUM : SUM + 2] = 0
    sums: Array = numbers @ np.arange(FIRST, FIRST + STEP * rows.shape[1], STEP, dtype=np.uint64)
    return sums.view(np.int64)


__all__ = ["checksum", "checksum_on_host"]
