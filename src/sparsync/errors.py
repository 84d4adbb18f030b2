"""What Sparsync raises. Every error says which rank, which bucket and why, as far as that can be known."""

from collections.abc import Iterable


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as a sentence names them: ``rank 2``, ``ranks 0 and 3``, ``ranks 0, 1 and 3``."""
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def without_frames(error: Exception) -> Exception:
    """Return an error like this one that was raised nowhere: for a bucket's future. DDP holds that where no garbage
    collection looks; the frames of an error hold the model, which would stay for good."""
    try:
        return type(error)(*error.args)
    except Exception:  # it is made of something else
        return RuntimeError(f"{type(error).__name__}: {error}")


class SparsyncError(RuntimeError):
    """Base of all run-time errors of this library (wrong arguments raise ``ValueError``)."""


class PeerFailed(SparsyncError):
    """A rank reported a failure of its own in its message; every rank raises this, with the same text."""


class PeerLost(SparsyncError):
    """A rank did not take part in an exchange before the deadline, or its connection broke."""


class Mismatch(SparsyncError):
    """The ranks disagree: other configuration, other version, other bucket or other order of exchanges."""


class Damaged(SparsyncError):
    """A message did not arrive as it was sent: bits were flipped on the way, or it names entries that do not exist."""


class StepFailed(SparsyncError):
    """An earlier step failed, so this model cannot be trained on without building it anew."""


class Regroup(SparsyncError):
    """The ranks stop between two steps so that another can join them; ``Handle.surviving`` catches it."""


class Excluded(SparsyncError):
    """The other ranks have gone on without this one, which they took for lost; it may join anew."""
