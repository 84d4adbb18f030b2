"""Warnings of gradients that are not finite: once, and then rarely, however many tensors, ranks and steps have them."""

from __future__ import annotations

import logging

from sparsync.layout import Layout

log = logging.getLogger("sparsync")


class NonFiniteLog:
    """Logs whose gradients were not finite: as a warning in the first such step, the 10th, the 100th and so on, of one
    tensor and rank; everything else for debugging.

    Args:
        first: this is the first rank; others do not warn.
    """

    def __init__(self, first: bool) -> None:
        self._first, self._steps, self._last = first, 0, -1

    def note(self, step: int, layout: Layout, rank: int, where: int) -> None:
        """Log a gradient; ``where``: the number of its parameter, as that rank says."""
        new = step != self._last
        self._steps, self._last = self._steps + new, step
        known = 0 <= where < len(layout.spans)
        name = layout.spans[where].name if known else f"a parameter that does not exist ({where})"
        said = f"step {step}: the gradient of {name} was not finite on rank {rank}"
        if self._first and new and self._steps == 1:
            log.warning("%s", said)
        elif self._first and new and self._steps == 10 ** (len(str(self._steps)) - 1):
            log.warning("%s", f"{said}; that makes {self._steps} such steps")
        else:
            log.debug("%s", said)
