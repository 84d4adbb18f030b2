"""What goes wrong on one rank: every rank hears of it, and whoever waits for a bucket of the step hears why."""

from __future__ import annotations

from functools import partial

from sparsync.collectives import Channel
from sparsync.collectives.comm.comm_thread import CommThread
from sparsync.engine.bucketing import Unit
from sparsync.engine.ledger import Cause, Ledger
from sparsync.engine.step_vote import StepVote
from sparsync.errors import Damaged, SparsyncError, without_frames


class ErrorHandler:
    """Makes an error of this rank everybody's, and ends the step.

    Args:
        channel: to the other ranks, and to the store through which they hear of it.
        vote: which keeps the error, and which step the ranks have reached.
        ledger: of what was sent, and goes back to the residual.
        comm_thread: which may still be working on the step.
    """

    def __init__(self, channel: Channel, vote: StepVote, ledger: Ledger, comm_thread: CommThread) -> None:
        self.channel, self.vote, self.ledger, self.comm_thread = channel, vote, ledger, comm_thread
        self.current = vote.current

    @property
    def error(self) -> SparsyncError | None:
        """What ended this training, if anything has."""
        return self.vote.error

    def fail(self, error: Exception) -> None:
        """Give up: this rank can send nothing its peers could read, so they hear of it through the store."""
        self.current.open = False
        if self.error is None:
            kind = type(error) if isinstance(error, SparsyncError) else SparsyncError
            cause = f"{error}" if isinstance(error, SparsyncError) else f"{type(error).__name__}: {error}"
            told = self.channel.monitor.broadcast_error(kind(f"rank {self.channel.rank}: {cause}"))
            self.comm_thread.submit(partial(self.stop, self.vote.close(told)))

    def announced(self, what: str, error: Exception) -> SparsyncError:
        """Return an error of the communication thread that all ranks know of. What the library raises there is seen by
        all, in their headers, or was broadcast; anything else has happened here alone, as what cannot be read."""
        if isinstance(error, Damaged):
            return self.channel.monitor.broadcast_error(error)
        if isinstance(error, SparsyncError):
            return error
        own = f"rank {self.channel.rank}: {what}: {type(error).__name__}: {error}"
        return self.channel.monitor.broadcast_error(SparsyncError(own))

    def stop(self, error: SparsyncError, cause: Cause = Cause.EXCHANGE_FAILED) -> None:
        """Exchange nothing more; whoever waits for a bucket hears why."""
        error = self.vote.close(error)
        try:
            if self.vote.undone:
                self.ledger.restore(cause)
            else:  # it was applied, but for what was rejected
                self.ledger.restore_held()
        finally:
            for bucket in self.current.buckets:
                if not bucket.future.done():
                    bucket.future.set_exception(without_frames(error))  # type: ignore[arg-type]

    def tell_failed(self, unit: Unit, error: Exception) -> None:
        """Leave word why this rank has nothing to send; its message says only that."""
        cause = f"failed to compress {unit.key}: {type(error).__name__}: {error}"
        self.channel.monitor.tell(f"rank {self.channel.rank}: {cause}")
