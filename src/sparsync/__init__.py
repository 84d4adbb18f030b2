"""Sparse gradient communication for PyTorch: send the entries that matter, keep the rest, lose nothing."""

from sparsync.collectives import AllGather, Balanced, DenseAllReduce, GTopK, SharedIndexAllReduce
from sparsync.compressors import (
    DGCK,
    BlockRandomK,
    GaussianK,
    NoCompression,
    RandomK,
    Selecting,
    ThresholdK,
    TopK,
    TrimmedK,
)
from sparsync.config.recipes import RECIPES
from sparsync.errors import Mismatch, PeerFailed, PeerLost, SparsyncError, StepFailed
from sparsync.hosts.ddp import attach, comm_hook
from sparsync.hosts.handle import Handle
from sparsync.schedule import Constant, ExponentialWarmup, FrontLoaded
from sparsync.version import __version__

__all__ = [
    "DGCK",
    "RECIPES",
    "AllGather",
    "Balanced",
    "BlockRandomK",
    "Constant",
    "DenseAllReduce",
    "ExponentialWarmup",
    "FrontLoaded",
    "GTopK",
    "GaussianK",
    "Handle",
    "Mismatch",
    "NoCompression",
    "PeerFailed",
    "PeerLost",
    "RandomK",
    "Selecting",
    "SharedIndexAllReduce",
    "SparsyncError",
    "StepFailed",
    "ThresholdK",
    "TopK",
    "TrimmedK",
    "__version__",
    "attach",
    "comm_hook",
]
