"""Time single calls with cold caches, and watch what they ask of a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

FLUSH = 1 << 28  # bytes, more than any cache
HEAD_START = 8

Call = Callable[[], object]


class Clock:
    """Time calls on one device.

    Args:
        head_start: how often, on a GPU, more than its caches is written before a call: meanwhile the host queues it.
    """

    def __init__(self, device: torch.device, head_start: int = HEAD_START) -> None:
        self.device, self.head_start = device, head_start
        self.flush = torch.empty(FLUSH, dtype=torch.int8, device=device)

    def time(self, call: Call) -> tuple[float, float]:
        """Return milliseconds that the call takes on the device, and that it keeps the host."""
        return self._on_gpu(call) if self.device.type == "cuda" else self._on_cpu(call)

    def _on_cpu(self, call: Call) -> tuple[float, float]:
        self.flush.zero_()
        begun = time.perf_counter()
        call()
        took = 1e3 * (time.perf_counter() - begun)
        return took, took

    def _on_gpu(self, call: Call) -> tuple[float, float]:
        # Several times: as in a backward pass, the device stays busy while the host queues the call.
        for _ in range(self.head_start):
            self.flush.zero_()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        begun = time.perf_counter()
        call()
        host = 1e3 * (time.perf_counter() - begun)
        last.record()
        last.synchronize()
        return first.elapsed_time(last), host


def allocations(calls: Sequence[Call]) -> int:
    """Return how many blocks of GPU memory the calls ask for."""
    before: int = torch.cuda.memory_stats()["allocation.all.allocated"]
    for call in calls:
        call()
    return int(torch.cuda.memory_stats()["allocation.all.allocated"]) - before


def synchronizes(calls: Sequence[Call]) -> bool:
    """Return whether any of the calls makes the host wait for the GPU; that call is broken off."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False
