"""Measure the network that a process group runs on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from sparsync.collectives import DenseAllReduce, Transfer
from sparsync.layout import Layout, Span
from sparsync.planner.links import Link
from sparsync.wire import Wire

ENTRIES = (2**8, 2**19, 2**21)  # fp32 numbers of each all-reduce
WARM_UPS, ROUNDS = 2, 7


def measure_link(device: torch.device, group: dist.ProcessGroup | None = None) -> Link:
    """Return latency and bandwidth as all-reduces of several sizes show them; the same on every rank.

    All ranks call it. What it finds is what dense sums get, so the backend's own costs are in it.
    """
    workers = dist.get_world_size(group)
    if workers < 2:
        raise ValueError("a network is measured between two workers or more, and there is one")
    times = slowest([_all_reduce_seconds(entries, device, group) for entries in ENTRIES], device, group)
    return link_of([all_reduce_transfer(entries, workers) for entries in ENTRIES], times)


def link_of(transfers: Sequence[Transfer], seconds: Sequence[float]) -> Link:
    """Return the link that explains measured times: by the two largest what a byte takes, by the smallest the rest.

    A link that was idle lets a first part pass at once (buffers, the burst of a shaped link), which would make it look
    faster: it is in both of the largest, so that their difference is without it.

    Args:
        transfers: rings, of three sizes or more, the smallest first.
        seconds: that each took.
    """
    first, large, largest = transfers[0], transfers[-2], transfers[-1]
    per_byte = (seconds[-1] - seconds[-2]) / (largest.bytes - large.bytes)
    if per_byte <= 0:  # something else was in the way
        per_byte = seconds[-1] / largest.bytes
    return Link(max(0.0, seconds[0] - per_byte * first.bytes) / first.rounds, per_byte)


def all_reduce_transfer(entries: int, workers: int) -> Transfer:
    """Return what an all-reduce of so many fp32 numbers puts on the network."""
    layout = Layout.cut([Span("all", 0, entries)], numel=entries, scope="global", density=1.0)
    return DenseAllReduce().traffic(layout, Wire(), workers).transfers[-1]


def slowest(seconds: Sequence[float], device: torch.device, group: dist.ProcessGroup | None = None) -> list[float]:
    """Return, of each time, that of the slowest rank."""
    times = torch.tensor(seconds, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    found: list[float] = times.tolist()
    return found


def _all_reduce_seconds(entries: int, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Return the median of several all-reduces, each begun together."""
    tensor, times = torch.zeros(entries, dtype=torch.float32, device=device), []
    for _ in range(WARM_UPS + ROUNDS):
        dist.barrier(group)
        begun = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[WARM_UPS:])
