"""Where Triton's kernels run."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def interpreted() -> bool:
    """Return whether Triton's kernels are run by its interpreter, on the CPU: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable_on(device: torch.device) -> bool:
    """Return whether Triton's kernels run on ``device``."""
    return (device.type == "cuda" or interpreted()) and _installed()


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make this tensor's device the current one, on which kernels are launched."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call,no-any-return]
