"""What a step has in flight: whatever of it is not applied goes back to the residual, along this one edge."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from sparsync.collectives.comm.device_status import DeviceStatus
from sparsync.engine.bucketing import Unit
from sparsync.feedback import Feedback
from sparsync.sparse import SparseGrad


class Cause(Enum):
    """Why entries that were taken out of the residual are not applied."""

    REJECTED = "dropped by the rank that summed them, or without room in a message"
    NON_FINITE = "a gradient of the step, or a sum, was not finite"
    EXCHANGE_FAILED = "their exchange failed, or one before it in the step"
    NEVER_SENT = "an earlier exchange had failed already"
    UNDONE = "the step is undone as a whole"


@dataclass
class InFlight:
    """Entries of one unit that were sent or, with negative values, that are back in the residual already.

    ``exchange``: the number of the last exchange they travelled in, where the device decides.
    """

    unit: Unit
    sent: SparseGrad
    exchange: int = 0


class SentCopy:
    """A copy of a gradient that is sent whole."""

    def __init__(self, values: Tensor) -> None:
        self.values = torch.empty_like(values)


class Ledger:
    """What one worker has in flight in the step under way.

    Args:
        feedback: whose residual it came from, and goes back to.
        on_stream: gives the stream that a device's exchanges run on.
    """

    def __init__(self, feedback: Feedback, on_stream: Callable[[torch.device], AbstractContextManager[Any]]) -> None:
        self.feedback, self._on_stream = feedback, on_stream
        self._entries: list[InFlight] = []

    def begin(self) -> None:
        """Begin a step: what the last one sent was applied."""
        self._entries = []

    def record_sent(self, unit: Unit, sent: SparseGrad, overwritten: bool = False) -> None:
        """Note entries that travel; ``overwritten``: the sum over the ranks may be made in their place."""
        if overwritten and sent.indices is None and unit.keeps and not self.feedback.transactional:
            copy = unit.workspace.get(SentCopy, sent.values.device, lambda: SentCopy(sent.values))
            sent = replace(sent, values=copy.values.copy_(sent.values))
        self._entries.append(InFlight(unit, sent))

    def record_rejected(self, unit: Unit, rejected: SparseGrad | None) -> None:
        """Note entries of the unit recorded last that are back in the residual already (``Cause.REJECTED``)."""
        if rejected is not None:
            # Before what was sent: taken out again first, the sums that follow are those of ``compress``, and exact.
            self._entries.insert(-1, InFlight(unit, replace(rejected, values=-rejected.values)))

    def number(self, unit: Unit, exchange: int) -> None:
        """Note in which exchange the unit's entries travelled."""
        for entry in self._entries:
            if entry.unit is unit:
                entry.exchange = exchange

    def restore(self, cause: Cause) -> None:
        """Put everything in flight back into the residual; nothing of this step is going to be applied.

        A step that can be undone is undone as a whole instead.
        """
        if cause is Cause.UNDONE:
            self.feedback.rollback()
        elif not self.feedback.transactional:
            for entry in self._entries:
                if entry.unit.keeps:
                    with self._on_stream(entry.unit.grad.device):
                        self.feedback.restore_to_residual(entry.unit.key, entry.sent)
        self._entries = []

    def restore_on_device(self, status: DeviceStatus) -> None:
        """Do the same where the device knows whether the step was bad, and since when nothing was applied."""
        for entry in self._entries:
            residual = self.feedback.working(entry.unit.key) if entry.unit.keeps else None
            if residual is not None and not self.feedback.transactional:
                status.restore(residual, entry.sent, entry.exchange)
        self._entries = []
