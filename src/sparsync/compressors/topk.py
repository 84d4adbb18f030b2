"""Exact top-k: the entries of largest magnitude."""

from dataclasses import dataclass

from torch import Tensor

from sparsync.compressors.base import Context, Selecting, State
from sparsync.kernels import Rows, largest
from sparsync.layout import Segment


@dataclass(frozen=True)
class TopK(Selecting):
    """The k entries of largest magnitude of every segment, exactly; of equals, the lower index goes first.

    Args:
        density: share of the entries to send, in (0, 1].
    """

    def choose(self, u: Tensor, rows: Rows, segment: Segment, ctx: Context, state: State) -> Tensor:
        return largest(u, rows, segment.k)
