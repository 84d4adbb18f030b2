"""Loops on the CPU that numba compiles, where it is installed: each reads memory once.

What they leave and find equals the reference bit for bit; energy is summed in double precision. An operation's loops
stand in its own ``cpu.py`` or ``<part>_cpu.py``, above the functions that call them. They are compiled when that is
imported, or loaded from numba's cache, which is renewed when the file changes: so every constant and every other loop
that a loop uses stands in its file. They are written so that LLVM turns them into vector instructions: rows of a fixed
length, magnitudes compared as the integers their bits make, and nothing written where it may also be read.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
Array = np.ndarray[Any, Any]

SWITCH = "SPARSYNC_COMPILED"  # 0 in the environment: never
LEAST = 1 << 16  # entries of a flat gradient that are worth loading numba
SHARE = 1 << 18  # entries that are worth a thread
PIECE = 1 << 15  # entries of half precision made fp32 at a time; torch does not split so few among its threads
MODULES = (  # that have such loops
    "accumulate.cpu", "accumulate.take_cpu", "topk.cpu", "threshold.cpu", "signs.cpu", "precondition.cpu",
    "checksum.cpu", "message.encode_cpu", "message.decode_cpu", "balanced.cpu", "mean_velocity.cpu",
)  # fmt: skip
log = logging.getLogger("sparsync")


@cache
def available() -> bool:
    """Return whether there are compiled loops: not where numba is missing, broken or switched off.

    The first call takes seconds.
    """
    if os.environ.get(SWITCH) == "0":
        return False
    try:
        for module in MODULES:
            importlib.import_module(f"sparsync.kernels.{module}")
    except Exception as error:  # whatever is wrong with numba, plain PyTorch does the same
        log.debug("the CPU pass is not compiled: %s: %s", type(error).__name__, error)
        return False
    return True


def loaded() -> bool:
    """Return whether the compiled loops are there already, so that using them costs nothing."""
    return available.cache_info().currsize > 0 and available()


def usable(u: Tensor, *others: Tensor) -> bool:
    """Return whether these loops can work on the flat residual ``u``, and on tensors beside it."""
    plain = all(t.device.type == "cpu" and t.is_contiguous() for t in (u, *others))
    return plain and u.dtype == torch.float32 and u.numel() >= LEAST and available()


def compiled(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a loop for ``signature``; kept on disk if there is a place for it."""
    from numba import njit

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return njit(signature, cache=True, nogil=True, error_model="numpy")(function)
        except RuntimeError:  # no place can be written to
            return njit(signature, nogil=True, error_model="numpy")(function)

    return decorate


def threads_for(numel: int) -> int:
    """Return how many threads ``numel`` entries are worth."""
    return max(1, min(torch.get_num_threads(), numel // SHARE))


def run_together(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Run each job in a thread of its own, the first in this one. The loops do not hold Python's lock."""
    if len(jobs) == 1:
        return [jobs[0]()]
    with ThreadPoolExecutor(len(jobs) - 1) as pool:  # made for the call: it leaves nothing that a fork could break
        others = [pool.submit(job) for job in jobs[1:]]
        return [jobs[0](), *(other.result() for other in others)]


def array(flat: Tensor) -> Array:
    """Return the same memory as a numpy array."""
    same: Array = flat.detach().numpy()
    return same


def bits(flat: Tensor) -> Array:
    """Return the same memory as integers."""
    return array(flat).view(np.int32)


def as_fp32(grad: Tensor) -> Iterator[tuple[int, int, Array]]:
    """Return entries in full precision: where they start and stop, piece by piece where they are converted."""
    if grad.dtype == torch.float32:
        yield 0, grad.numel(), array(grad)
        return
    buffer = torch.empty(min(PIECE, grad.numel()), dtype=torch.float32, device="cpu")
    for a in range(0, grad.numel(), PIECE):
        b = min(a + PIECE, grad.numel())
        yield a, b, array(buffer[: b - a].copy_(grad[a:b]))
