"""Which version of an operation works on a gradient: decided once for each unit and layout, here."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from sparsync.kernels import cpu
from sparsync.kernels.device import usable_on
from sparsync.kernels.memory import Memory

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
UNLIMITED = 2**63 - 1


class KernelPath(StrEnum):
    """The versions. Their results are the same, bit for bit."""

    TRITON = "triton"  # kernels on the gradient's device; nothing waits for the host
    NUMBA = "numba"  # compiled loops on the CPU
    PYTORCH = "pytorch"  # the reference


def choose_path(grad: Tensor, memory: Memory | None, limit: int) -> KernelPath:
    """Return what shall work on this gradient.

    Args:
        memory: its residual, if there is one.
        limit: the Triton kernels can take gradients with fewer entries; 0 where there are no such kernels.
    """
    single = grad.dtype in DTYPES and (memory is None or memory.after.dtype == torch.float32)
    if single and 0 < grad.numel() < limit and grad.is_contiguous() and usable_on(grad.device):
        return KernelPath.TRITON
    if memory is None:
        return KernelPath.PYTORCH
    velocity = (memory.velocity.before, memory.velocity.after) if memory.velocity else ()
    return KernelPath.NUMBA if cpu.usable(memory.after, grad, memory.before, *velocity) else KernelPath.PYTORCH
