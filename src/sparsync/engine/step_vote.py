"""The vote that closes a step: which step the survivors have reached, once one has failed.

While all is well it costs nothing, as it rides in the next message: a rank sends in an exchange only when it has
completed all those before, so a message of step t + 1, whose header carries the number of its exchange, is its sender's
vote for step t. Since nobody completes a step without a message from everybody, ranks are never more than one step
apart. When a step fails for some, the others may have completed it and cannot take it back: their weights have changed.
So the step that any survivor has completed is the committed one, and the error says who is behind. Where nobody has,
all are back at the step before.

Votes after a failure go through the store. If that is gone, or silent, each rank knows of itself alone, and says so;
``load_state_dict`` refuses states that do not belong together all the same.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from torch.distributed import DistError  # type: ignore[attr-defined]

from sparsync.collectives.comm.bounded_store import StoreSilent
from sparsync.collectives.comm.store_monitor import StoreMonitor
from sparsync.engine.bucketing import PendingBucket
from sparsync.engine.completion import Completion
from sparsync.errors import SparsyncError, name_ranks


@dataclass
class CurrentStep:
    """The step whose buckets are on their way, or were last; ``open``: between the first of them and the last."""

    number: int = 0
    buckets: list[PendingBucket] = field(default_factory=list)
    open: bool = False


class StepVote:
    """Keeps the error that ends a training, and knows how many steps were completed before it.

    Attributes:
        error: what ended it, if anything has.
        current: the last step that this rank began.
        completed: steps that this rank has completed, once there is an error.
    """

    def __init__(self, monitor: StoreMonitor, completion: Completion, current: CurrentStep) -> None:
        self.monitor, self.completion, self.current = monitor, completion, current
        self.error: SparsyncError | None = None
        self.completed = 0
        self._closing = threading.Lock()  # backward's thread and the communication thread may fail at once

    @property
    def undone(self) -> bool:
        """Whether the last step that was begun is not going to be applied."""
        return self.error is not None and self.completed <= self.current.number

    def close(self, error: SparsyncError) -> SparsyncError:
        """Make an error the one that ended the training, unless there is one; returns that, with the committed step if
        the ranks are not at the same one."""
        with self._closing:
            if self.error is None:
                step, buckets = self.current.number, self.current.buckets
                whole = any(one.bucket.last for one in buckets) and all(one.delivered for one in buckets)
                self.completed = self.completion.completed(step + whole)
                said = self._vote()
                self.error = type(error)(f"{error}; {said}") if said else error
        return self.error

    def _vote(self) -> str:
        """Tell the others how many steps this rank has completed, and return what theirs come to."""
        if self.monitor.size == 1:
            return ""
        self.monitor.leave_vote(self.completed)
        if not self.monitor.alarmed:  # all have seen the same headers
            return ""
        try:
            return describe(self.monitor.collect_votes(), self.monitor.size, self.monitor.lost)
        except (StoreSilent, DistError):
            return f"steps completed here: {self.completed}; those of other ranks not known, perhaps one more or less"


def describe(votes: dict[int, int], ranks: int, lost: frozenset[int]) -> str:
    """Return which step is the committed one and who is behind; nothing where all are at the same.

    Args:
        votes: steps completed, by rank.
        lost: ranks that are known not to vote.
    """
    committed, parts = max(votes.values()), []
    behind = [f"rank {rank} with {steps}" for rank, steps in votes.items() if steps < committed]
    if behind:
        ahead = name_ranks(rank for rank, steps in votes.items() if steps == committed)
        parts.append(f"steps committed: {committed}, by {ahead}; behind: {', '.join(behind)}")
    silent = [rank for rank in range(ranks) if rank not in votes and rank not in lost]
    if silent:
        parts.append(f"steps of {name_ranks(silent)} not known, perhaps one more")
    return "; ".join(parts)
