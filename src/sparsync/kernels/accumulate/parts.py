"""Add a gradient to the residual in parts, as these come; by the loops that numba compiles."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from sparsync.kernels.accumulate.reference import ROW, Collected, Rows, rows_of
from sparsync.kernels.memory import Memory
from sparsync.kernels.path import KernelPath
from sparsync.layout import Segment, Span


class AddedParts:
    """A gradient of one segment on its way into the residual.

    Args:
        low: bits of the magnitude from which on entries are collected as they are added; 0: none are.

    Attributes:
        seconds: that adding took so far.
    """

    def __init__(self, memory: Memory, segment: Segment, low: int) -> None:
        self.memory, self.seconds = memory, 0.0
        self._rows = rows_of(memory, [(span.start, span.stop) for span in segment.spans], KernelPath.NUMBA)
        self._rows.collected = Collected(low)
        self._missing, row = dict[str, tuple[Span, int]](), 0
        for span in segment.spans:
            self._missing[span.name] = span, row
            row += -(-span.numel // ROW)
        self._bad: list[int] = []
        self._error: Exception | None = None

    def add(self, names: Sequence[str], parts: Sequence[Tensor], unused: frozenset[str]) -> None:
        """Add the gradients of parameters; the residual of those that are ``unused`` is only carried over. What goes
        wrong is raised by ``finish``."""
        begun = time.perf_counter()
        try:
            self._add(names, parts, unused)
        except Exception as error:
            self._error = self._error or error
        self.seconds += time.perf_counter() - begun

    def finish(self, grad: Tensor) -> tuple[Rows, int]:
        """Add what no part has brought, from the whole gradient; returns what ``reference.accumulate`` does."""
        spans = [span for span, _ in self._missing.values()]
        self.add([span.name for span in spans], [grad[span.start : span.stop] for span in spans], frozenset())
        if self._error is not None:
            raise self._error
        return self._rows, min(self._bad, default=-1)

    def _add(self, names: Sequence[str], parts: Sequence[Tensor], unused: frozenset[str]) -> None:
        from sparsync.kernels.accumulate import cpu

        pieces = []
        for name, part in zip(names, parts, strict=True):
            span, row = self._missing.pop(name)
            if name in unused:
                self.memory.carry_over(span.start, span.stop)
                self._rows.peak[row : row - (-span.numel // ROW)] = 0  # nothing is sent from there
            else:
                pieces.append(cpu.GradientPiece(part, span.start, row))
        bad = cpu.add(pieces, self.memory, self._rows) if pieces else -1
        self._bad += [bad] if bad >= 0 else []
