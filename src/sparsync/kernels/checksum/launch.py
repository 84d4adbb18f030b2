"""Launch the kernel that sums up messages."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsync.kernels.device import on_device_of
from sparsync.kernels.launcher import Launcher

BLOCK = 1024  # words
PROGRAMS = 256  # that share a message, at most


def add_checksums(rows: Tensor, sums: Tensor, launch: Launcher) -> None:
    """Add the checksums of the messages ``rows`` to ``sums``, one each."""
    from sparsync.kernels.checksum import triton as kernels

    words = rows.shape[1]
    programs = min(PROGRAMS, -(-words // BLOCK))
    with on_device_of(rows):
        launch(
            kernels.sum_messages, (programs, rows.shape[0]), rows, rows.stride(0), words, sums, programs, BLOCK=BLOCK
        )


def checksum(messages: Tensor) -> Tensor:
    """Do as ``reference.checksum``, in memory that is asked for anew."""
    rows = messages.contiguous().view(-1, messages.shape[-1])
    sums = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    add_checksums(rows, sums, Launcher())
    return sums.view(messages.shape[:-1])
