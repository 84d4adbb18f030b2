"""Kernels that Triton's interpreter runs are watched: whatever they read or write must lie within their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class Fence:
    """Stands before the interpreter's memory accesses."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.starts = self.stops = np.zeros(0, dtype=np.uint64)
        self.kernel, self.looks = "", 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def enclose(self, kernel: str, arguments: list[Any]) -> None:
        """From now on only the memory of ``arguments`` may be touched."""
        storages = [a.untyped_storage() for a in arguments if hasattr(a, "untyped_storage")]
        ranges = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages if s.nbytes()})
        self.starts, self.stops = np.array(ranges, dtype=np.uint64).reshape(-1, 2).T
        self.kernel = kernel

    def check(self, what: str, pointers: Any, mask: Any, size: int) -> None:
        self.looks += 1
        where = np.asarray(pointers, dtype=np.uint64)[np.asarray(mask, dtype=bool)]
        place = np.searchsorted(self.starts, where, side="right").astype(np.int64) - 1
        inside = (place >= 0) & (where + np.uint64(size) <= self.stops[np.maximum(place, 0)])
        assert inside.all(), f"{self.kernel} {what} {int((~inside).sum())} of {where.size} entries outside its tensors"

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self.check("reads", pointers, mask, np.dtype(dtype).itemsize)
        return self.real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self.check("writes", pointers, mask, value.dtype.itemsize)
        return self.real.store(pointers, value, mask)

    def atomic_rmw(self, kind: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        self.check("updates", pointers, mask, value.dtype.itemsize)
        return self.real.atomic_rmw(kind, pointers, value, mask, order)


@contextmanager
def fenced() -> Iterator[Fence]:
    """Watch every kernel that is interpreted meanwhile."""
    from triton.runtime import interpreter

    fence = Fence(interpreter._interpreter)
    init = interpreter.GridExecutor._init_args_hst

    def watched(executor: Any, args: Any, kwargs: Any) -> Any:
        ready = init(executor, args, kwargs)
        fence.enclose(executor.fn.__name__, [*ready[0], *ready[1].values()])
        return ready

    interpreter._interpreter, interpreter.GridExecutor._init_args_hst = fence, watched
    try:
        yield fence
    finally:
        interpreter._interpreter, interpreter.GridExecutor._init_args_hst = fence.real, init
