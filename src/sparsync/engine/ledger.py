"""What a step has in flight: whatever of it is not applied goes back to the residual, along this one edge."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from sparsync.collectives.comm.device_status import DeviceStatus
from sparsync.collectives.comm.header_checks import OnStream
from sparsync.engine.bucketing import Unit
from sparsync.feedback import Feedback
from sparsync.sparse import SparseGrad

log = logging.getLogger("sparsync")


class Cause(Enum):
    """Why entries that were taken out of the residual are not applied."""

    REJECTED = "dropped by the rank that summed them, or without room in a message"
    NON_FINITE = "a gradient of the step, or a sum, was not finite"
    EXCHANGE_FAILED = "their exchange failed, or one before it in the step"
    NEVER_SENT = "an earlier exchange had failed already"
    UNDONE = "the step is undone as a whole"


@dataclass
class InFlight:
    """Entries of one unit that were sent or, ``returned``, that are back in the residual already; or that were rejected
    and are ``held`` until the device knows that the step counts.

    ``exchange``: the number of the last exchange they travelled in, where the device decides.
    """

    unit: Unit
    entries: SparseGrad
    returned: bool = False
    held: bool = False
    exchange: int = 0

    def owed(self) -> SparseGrad:
        """Return what has to be added to the residual, so that it is as if nothing had been sent."""
        return replace(self.entries, values=-self.entries.values) if self.returned else self.entries


class SentCopy:
    """A copy of a gradient that is sent whole."""

    def __init__(self, values: Tensor) -> None:
        self.values = torch.empty_like(values)


class Ledger:
    """What one worker has in flight in the step under way, and the only way back to its residual.

    Args:
        feedback: whose residual it came from, and goes back to.
        on_stream: gives the stream that a device's exchanges run on.
    """

    def __init__(self, feedback: Feedback, on_stream: OnStream) -> None:
        self.feedback, self._on_stream = feedback, on_stream
        self._in_flight: list[InFlight] = []

    def record_sent(self, unit: Unit, sent: SparseGrad, overwritten: bool = False) -> None:
        """Note entries that travel; ``overwritten``: the sum over the ranks may be made in their place."""
        self._in_flight.append(InFlight(unit, self.keep(unit, sent) if overwritten else sent))

    def keep(self, unit: Unit, sent: SparseGrad) -> SparseGrad:
        """Return entries that travel, or a copy where the sum over the ranks is made in their place."""
        if sent.indices is None and unit.keeps and not self.feedback.transactional:
            copy = unit.workspace.get(SentCopy, sent.values.device, lambda: SentCopy(sent.values))
            return replace(sent, values=copy.values.copy_(sent.values))
        return sent

    def record_rejected(self, unit: Unit, rejected: SparseGrad | None, held: bool = False) -> None:
        """Note entries of the unit recorded last that ``restore_rejected`` has put back; or that are ``held``: then
        ``restore_on_device`` is going to."""
        if rejected is not None:
            # Before what was sent: taken out again first, the sums that follow are those of ``compress``, and exact.
            self._in_flight.insert(-1, InFlight(unit, rejected, not held, held))

    def record_exchange(self, unit: Unit, exchange: int) -> None:
        """Note in which exchange the unit's entries travelled."""
        for entry in self._in_flight:
            if entry.unit is unit:
                entry.exchange = exchange

    def restore_rejected(self, unit: Unit, rejected: SparseGrad | None) -> None:
        """Put entries back that did not make it into the result (``Cause.REJECTED``); a CUDA graph may replay this."""
        if rejected is not None:
            self.feedback.restore_to_residual(unit.key, rejected)

    def restore(self, cause: Cause) -> None:
        """Put everything in flight back into the residual; nothing of this step is going to be applied.

        A step that can be undone is undone as a whole, later (``Cause.UNDONE``).
        """
        if self._in_flight:
            log.debug("entries of %d units go back to the residual: %s", len(self._in_flight), cause.value)
        if cause is Cause.UNDONE:
            self.feedback.rollback()
        elif not self.feedback.transactional:
            for entry in self._in_flight:
                if entry.unit.keeps and not entry.held:
                    with self._on_stream(entry.unit.grad.device):
                        self.feedback.restore_to_residual(entry.unit.key, entry.owed())
        self.clear()

    def restore_held(self) -> None:
        """Put back what was rejected and is still held: the step was applied, and nobody is going to end it."""
        for entry in self._in_flight:
            if entry.held and entry.unit.keeps and not self.feedback.transactional:
                with self._on_stream(entry.unit.grad.device):
                    self.feedback.restore_to_residual(entry.unit.key, entry.entries)
        self._in_flight = [entry for entry in self._in_flight if not entry.held]

    def restore_on_device(self, status: DeviceStatus) -> None:
        """Put back what the device knows not to be applied: all of a bad step, or all since an exchange failed; of the
        others, what was rejected."""
        for entry in self._in_flight:
            residual = self.feedback.working(entry.unit.key) if entry.unit.keeps else None
            if residual is not None and entry.held:
                status.put_back(residual, entry.entries, entry.exchange)
            elif residual is not None and not self.feedback.transactional:
                status.restore(residual, entry.entries, entry.exchange)
        self.clear()

    def clear(self) -> None:
        """Forget what was in flight: it was applied, or it is back."""
        self._in_flight = []
