"""Exact top-k: the entries of largest magnitude."""

from dataclasses import dataclass

from torch import Tensor

from sparsync.compressors.base import Context, State
from sparsync.compressors.carried_threshold import CarriedThreshold
from sparsync.compressors.selecting import segment_scales
from sparsync.kernels import Memory
from sparsync.kernels.accumulate import Rows
from sparsync.kernels.topk import largest
from sparsync.kernels.topk.launch import select
from sparsync.layout import Layout, Segment
from sparsync.sparse import SparseGrad


@dataclass(frozen=True)
class TopK(CarriedThreshold):
    """The k entries of largest magnitude of every segment, exactly; of equals, the lower index goes first.

    On a GPU one pass collects what is above a threshold carried over from the step before, and the k largest are found
    among that; where it is too little, or too much to keep, they are found in the residual.

    Args:
        density: share of the entries to send, in (0, 1].
    """

    graph_safe = True

    def launch(self, grad: Tensor, memory: Memory, layout: Layout, ctx: Context, state: State) -> SparseGrad:
        return select(grad, memory, layout, state, ctx.values, segment_scales(grad, layout, ctx))

    def choose(self, u: Tensor, rows: Rows, segment: Segment, ctx: Context, state: State) -> Tensor:
        return largest(u, rows, segment.k)
