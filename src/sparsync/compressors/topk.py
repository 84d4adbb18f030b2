"""Exact top-k: the entries of largest magnitude."""

from dataclasses import dataclass

from torch import Tensor

from sparsync.compressors.base import Context, State, segment_scales
from sparsync.compressors.floored import Floored, on_device
from sparsync.kernels import Memory, Rows, largest, launch_exact
from sparsync.layout import Layout, Segment
from sparsync.sparse import SparseGrad


@dataclass(frozen=True)
class TopK(Floored):
    """The k entries of largest magnitude of every segment, exactly; of equals, the lower index goes first.

    On a GPU one pass collects what is above a floor carried over from the step before, and the k largest are found
    among that; where it is too little, or too much to keep, they are found in the residual.

    Args:
        density: share of the entries to send, in (0, 1].
    """

    def compress(self, grad: Tensor, memory: Memory | None, layout: Layout, ctx: Context, state: State) -> SparseGrad:
        assert memory is not None
        if on_device(grad, memory, layout, ctx):
            return launch_exact.largest(grad, memory, layout, state, ctx.values, segment_scales(grad, layout, ctx))
        return super().compress(grad, memory, layout, ctx, state)

    def choose(self, u: Tensor, rows: Rows, segment: Segment, ctx: Context, state: State) -> Tensor:
        return largest(u, rows, segment.k)
