"""Some ranks of a channel, who exchange among themselves: those of a node, or the leaders of all nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsync.collectives.comm.channel import Channel
from sparsync.collectives.comm.header_checks import HostChecks


class SubChannel(Channel):
    """A process group of some ranks, with the monitor of all: whatever fails here, every rank can be told.

    Where they wait is a place in the order of the whole channel: a rank that waits for a leader and the leader, who
    waits for another one, are at the same exchange.

    Args:
        whole: the channel of all ranks.
        ranks: of them, in ascending order; this rank is one of them.
        group: of these.
    """

    def __init__(self, whole: Channel, ranks: Sequence[int], group: Any) -> None:
        self.whole, self.ranks, self._local = whole, ranks, whole._local
        self.rank, self.size, self.divisor = ranks.index(whole.rank), len(ranks), whole.size
        self.wire, self.monitor, self.backend, self.may_defer = whole.wire, whole.monitor, whole.backend, False
        # What kernels note of messages is looked up at the whole channel's checks.
        self.checks = HostChecks(whole.monitor, ranks, whole.checks.failed_exchange)
        self.sequence, self._bytes, self._messages, self.recording = 0, 0, None, None
        self._hold(group)

    @property
    def place(self) -> str:
        return self.whole.place

    def close(self) -> None:
        """Give the process group back."""
        self._abandon_messages()
        self.group = None
        self._release()


def split(whole: Channel, parts: Sequence[Sequence[int]]) -> SubChannel:
    """Return the channel of the part that this rank is in; all ranks call this, with the same parts.

    Args:
        parts: of the ranks, each rank in one of them. Torch names some groups after the number of those that a rank is
            in: it stays the same on all ranks.
    """
    groups = [whole.new_group(ranks) for ranks in parts]
    number = next(number for number, ranks in enumerate(parts) if whole.rank in ranks)
    return SubChannel(whole, parts[number], groups[number])
