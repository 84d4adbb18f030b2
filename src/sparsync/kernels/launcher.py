"""Kernels that are launched again and again with the same arguments.

At every launch Triton looks at each argument, and at each constant the kernel uses, to find the compiled kernel that
fits: 15 to 35 microseconds of Python. Step after step ours are launched on the same buffers, for which it finds the
same one; so that is remembered, beside the buffers.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from operator import is_, itemgetter
from typing import Any

from torch import Tensor

MOST = 1024  # arguments that a kernel is known with: those of every unit
# Triton loads the launchers of all kernels under one name: of two threads at once, one could get the other's.
ONE_AT_A_TIME = threading.Lock()


class Bound:
    """A compiled kernel, its grid, and the arguments it was found for.

    Tensors are known by themselves: what Triton asks of them (their type, and whether their memory is aligned) stays.
    They are not kept alive. ``do_not_specialize`` names arguments whose value Triton does not ask for.
    """

    def __init__(self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: Sequence[Any], meta: dict[str, Any]):
        names = [parameter.name for parameter in kernel.params]
        fixed = [i for i in range(len(args)) if not kernel.params[i].do_not_specialize]
        self.grid, self.meta, self._fixed = grid, meta, itemgetter(*fixed)
        self._known = [_reference(argument) for argument in self._fixed(args)]
        self._constants = [meta[name] for name in names[len(args) :]]
        self._run = compiled[(*grid, 1, 1)[:3]]

    def fits(self, grid: tuple[int, ...], args: Sequence[Any], meta: dict[str, Any]) -> bool:
        if grid != self.grid or meta != self.meta:
            return False
        fixed, known = self._fixed(args), [reference() for reference in self._known]
        return all(map(is_, fixed, known)) or all(map(_same, fixed, known))

    def alive(self) -> bool:
        """Return whether all its tensors are still there."""
        return all(reference() is not None for reference in self._known)

    def launch(self, args: Sequence[Any]) -> None:
        self._run(*args, *self._constants)


class Launcher:
    """Launches kernels on one device, each in turn with the arguments that it had a step before."""

    def __init__(self) -> None:
        self._bound: defaultdict[int, deque[Bound]] = defaultdict(lambda: deque(maxlen=MOST))

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        """Launch ``kernel[grid](*args, **meta)``; all its arguments but constants go by position."""
        bound = self._find(id(kernel), grid, args, meta)
        if bound is not None:
            bound.launch(args)
            return
        with ONE_AT_A_TIME:
            compiled = kernel[grid](*args, **meta)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._bound[id(kernel)].append(Bound(kernel, compiled, grid, args, meta))

    def _find(self, kernel: int, grid: tuple[int, ...], args: Sequence[Any], meta: dict[str, Any]) -> Bound | None:
        """Arguments come in the same order in every step: those that were used are next behind all others."""
        known = self._bound[kernel]
        for _ in range(len(known)):
            bound = known.popleft()
            if bound.fits(grid, args, meta):
                known.append(bound)
                return bound
            if bound.alive():
                known.append(bound)
        return None


def _reference(argument: Any) -> Callable[[], Any]:
    return weakref.ref(argument) if isinstance(argument, Tensor) else lambda: argument


def _same(argument: Any, known: Any) -> bool:
    """Tensors are compared by what they are, numbers by their value."""
    if argument is known or isinstance(argument, Tensor):
        return argument is known
    return type(argument) is type(known) and bool(argument == known)
