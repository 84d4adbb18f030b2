"""The specification's loops on the CPU, compiled by numba where it is installed: each reads memory once.

Residual, velocity, peaks and indices equal ``reference`` bit for bit. Energy is summed in double precision.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparsync.kernels.floors import BINS, FINE, MIDDLE, MIDDLE_BITS, MIDDLE_FROM, WIDE, WIDE_BITS, WIDE_FROM, from_above
from sparsync.kernels.memory import Memory
from sparsync.kernels.reference import ROW, Rows, Run, rows_of

T = TypeVar("T")
Array = np.ndarray[Any, Any]

SWITCH = "SPARSYNC_COMPILED"  # 0 in the environment: never
LEAST = 1 << 16  # entries of a flat gradient that are worth loading numba
SHARE = 1 << 18  # entries that are worth a thread
PIECE = 1 << 15  # entries of half precision made fp32 at a time; torch does not split so few among its threads
# Of each kind of bin: how far above the floor it begins, bits within a bin, its first bin.
EDGES = np.array([(0, FINE, 0), (MIDDLE_BITS, MIDDLE, MIDDLE_FROM), (WIDE_BITS, WIDE, WIDE_FROM)])
log = logging.getLogger("sparsync")


@cache
def loops() -> ModuleType | None:
    """The compiled loops, or ``None`` where numba is missing, broken or switched off. The first call takes seconds."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        from sparsync.kernels import loops as compiled
    except Exception as error:  # whatever is wrong with numba, plain PyTorch does the same
        log.debug("the CPU pass is not compiled: %s: %s", type(error).__name__, error)
        return None
    assert compiled.ROW == ROW
    return compiled


def usable(u: Tensor, *others: Tensor) -> bool:
    """Whether these loops can work on the flat residual ``u``, and on tensors beside it."""
    plain = all(t.device.type == "cpu" and t.is_contiguous() for t in (u, *others))
    return plain and u.dtype == torch.float32 and u.numel() >= LEAST and loops() is not None


def sweep(grad: Tensor, memory: Memory, runs: Sequence[Run], scale: float = 1.0) -> tuple[Rows, int]:
    """As ``reference.sweep``."""
    rows = rows_of(memory, runs)
    shares = _shares(runs, torch.get_num_threads())
    jobs = [partial(_sweep, grad, memory, rows.peak, share, scale) for share in shares]
    found = _together(jobs)
    memory.energy += sum(energy for energy, _ in found)
    return rows, next((first for _, first in found if first >= 0), -1)


def _sweep(
    grad: Tensor, memory: Memory, peak: Tensor, pieces: Sequence[tuple[int, int, int]], scale: float
) -> tuple[float, int]:
    """Sweep ``pieces``: where each starts and stops, and the number of its first row."""
    kernel, velocity = _loops().sweep, memory.velocity
    before, after, peaks = _array(memory.before), _array(memory.after), _bits(peak)
    slow, fast = (_array(velocity.before), _array(velocity.after)) if velocity else (before, after)
    beta, momentum = velocity.beta if velocity else 0.0, velocity is not None
    energy, first = 0.0, -1
    for start, stop, row in pieces:
        for a, b, came in _as_fp32(grad, start, stop):
            own = peaks[row + (a - start) // ROW :]
            more, bad = kernel(
                came, before[a:b], after[a:b], slow[a:b], fast[a:b], own, np.float32(scale), np.float32(beta), momentum
            )
            energy += more
            first = a + bad if first < 0 <= bad else first
    return energy, first


def _as_fp32(grad: Tensor, start: int, stop: int) -> Iterator[tuple[int, int, Array]]:
    if grad.dtype == torch.float32:
        yield start, stop, _array(grad[start:stop])
        return
    buffer = torch.empty(min(PIECE, stop - start))
    for a in range(start, stop, PIECE):
        b = min(a + PIECE, stop)
        yield a, b, _array(buffer[: b - a].copy_(grad[a:b]))


def above(u: Tensor, rows: Rows, threshold: float) -> Tensor:
    """As ``reference.above``."""
    bound = torch.tensor(threshold, dtype=torch.float32).clamp(min=0).view(torch.int32)
    low = max(1, int(bound))  # what is zero is never found
    number = rows.peak.numel()
    threads = max(1, min(torch.get_num_threads(), number * ROW // SHARE))
    cuts = [number * i // threads for i in range(threads + 1)]
    jobs = [partial(_above, u, rows, slice(a, b), low) for a, b in pairwise(cuts)]
    found = _together(jobs)
    return torch.from_numpy(found[0] if threads == 1 else np.concatenate(found))


def _above(u: Tensor, rows: Rows, own: slice, low: int) -> Array:
    peaks = _bits(rows.peak)[own]
    hot = int(np.count_nonzero(peaks >= low))
    room, numbers = np.empty(hot * ROW, np.int64), np.empty(peaks.size, np.int64)
    count = _loops().above(
        _bits(u), _array(rows.start)[own], _array(rows.stop)[own], peaks, np.int32(low), numbers, room
    )
    return room[:count] if 2 * count > room.size else room[:count].copy()  # not to keep what was never written to


def largest(u: Tensor, rows: Rows, k: int) -> Tensor:
    """As ``reference.largest``."""
    threshold = 0.0
    if k <= rows.peak.numel():
        kth = _loops().kth_largest(_bits(rows.peak), k)
        threshold = float(np.int32(kth).view(np.float32))
    found = above(u, rows, threshold)
    return found[: _loops().keep_largest(_bits(u), _array(found), k)]


def histogram(u: Tensor, found: Tensor, floor: int) -> tuple[Tensor, Tensor]:
    """As ``floors.histogram``."""
    bins, counts = torch.empty(found.numel(), dtype=torch.int32), torch.zeros(BINS, dtype=torch.int64)
    _loops().histogram(_bits(u), _array(found), floor, EDGES, _array(bins), _array(counts))
    return bins, from_above(counts)


def _shares(runs: Sequence[Run], threads: int) -> list[list[tuple[int, int, int]]]:
    """The work of every thread, if it is enough for several: pieces of ``runs`` that hold whole rows."""
    numel = sum(stop - start for start, stop in runs)
    threads = max(1, min(threads, numel // SHARE))
    size = -(-numel // (threads * ROW)) * ROW
    shares: list[list[tuple[int, int, int]]] = [[] for _ in range(threads)]
    done = row = 0
    for start, stop in runs:
        for a in range(start, stop, size):
            b = min(a + size, stop)
            shares[min(threads - 1, done // size)].append((a, b, row))
            done, row = done + b - a, row + -(-(b - a) // ROW)
    return shares


def _together(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Each in a thread of its own, the first in this one. The loops do not hold Python's lock."""
    if len(jobs) == 1:
        return [jobs[0]()]
    with ThreadPoolExecutor(len(jobs) - 1) as pool:  # made for the call: it leaves nothing that a fork could break
        others = [pool.submit(job) for job in jobs[1:]]
        return [jobs[0](), *(other.result() for other in others)]


def _loops() -> ModuleType:
    compiled = loops()
    assert compiled is not None
    return compiled


def _array(flat: Tensor) -> Array:
    array: Array = flat.detach().numpy()
    return array


def _bits(flat: Tensor) -> Array:
    return _array(flat).view(np.int32)
