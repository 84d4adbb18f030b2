"""Sparse gradient communication for PyTorch: send the entries that matter, keep the rest, lose nothing."""

from sparsync import log_prefix as log_prefix
from sparsync.collectives import (
    AllGather,
    Balanced,
    Collective,
    DenseAllReduce,
    GTopK,
    Reduced,
    SharedIndexAllReduce,
    Traffic,
)
from sparsync.compressors import (
    DGCK,
    BlockRandomK,
    Compressor,
    Context,
    GaussianK,
    NoCompression,
    RandomK,
    Selecting,
    ThresholdK,
    TopK,
    TrimmedK,
)
from sparsync.config.recipes import RECIPES
from sparsync.errors import Damaged, Excluded, Mismatch, PeerFailed, PeerLost, SparsyncError, StepFailed
from sparsync.hosts.ddp import attach, comm_hook
from sparsync.hosts.handle import Handle
from sparsync.hosts.planning import plan
from sparsync.hosts.survival import Change
from sparsync.layout import Layout
from sparsync.local_steps.outer_loop import OuterLoop
from sparsync.schedule import Constant, ExponentialWarmup, FrontLoaded
from sparsync.sparse import SparseGrad
from sparsync.version import __version__

__all__ = [
    "DGCK",
    "RECIPES",
    "AllGather",
    "Balanced",
    "BlockRandomK",
    "Change",
    "Collective",
    "Compressor",
    "Constant",
    "Context",
    "Damaged",
    "DenseAllReduce",
    "Excluded",
    "ExponentialWarmup",
    "FrontLoaded",
    "GTopK",
    "GaussianK",
    "Handle",
    "Layout",
    "Mismatch",
    "NoCompression",
    "OuterLoop",
    "PeerFailed",
    "PeerLost",
    "RandomK",
    "Reduced",
    "Selecting",
    "SharedIndexAllReduce",
    "SparseGrad",
    "SparsyncError",
    "StepFailed",
    "ThresholdK",
    "TopK",
    "Traffic",
    "TrimmedK",
    "__version__",
    "attach",
    "comm_hook",
    "plan",
]
