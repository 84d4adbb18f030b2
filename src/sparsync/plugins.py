"""What the author of a compressor or a collective needs; ``docs/extending.md`` has an example of each."""

from sparsync.collectives import Channel, Collective, Reduced, Traffic
from sparsync.collectives.base import MeanOf, bad_ranks, bad_ranks_of, shape_of
from sparsync.compressors import Compressor, Context, Selecting, State
from sparsync.kernels import KernelPath, Memory
from sparsync.kernels.accumulate import Rows
from sparsync.layout import Layout, Segment, locate
from sparsync.sparse import SparseGrad
from sparsync.wire import Wire
from sparsync.workspace import Workspace

__all__ = [
    "Channel",
    "Collective",
    "Compressor",
    "Context",
    "KernelPath",
    "Layout",
    "MeanOf",
    "Memory",
    "Reduced",
    "Rows",
    "Segment",
    "Selecting",
    "SparseGrad",
    "State",
    "Traffic",
    "Wire",
    "Workspace",
    "bad_ranks",
    "bad_ranks_of",
    "locate",
    "shape_of",
]
