"""How entries are summed over ranks: one file per method, one protocol in ``base``."""

from sparsync.collectives.allgather import AllGather
from sparsync.collectives.balanced import Balanced
from sparsync.collectives.base import Collective, Reduced, Traffic
from sparsync.collectives.channel import Channel
from sparsync.collectives.dense import DenseAllReduce
from sparsync.collectives.gtopk import GTopK
from sparsync.collectives.shared import SharedIndexAllReduce
from sparsync.collectives.verdicts import Report

__all__ = [
    "AllGather",
    "Balanced",
    "Channel",
    "Collective",
    "DenseAllReduce",
    "GTopK",
    "Reduced",
    "Report",
    "SharedIndexAllReduce",
    "Traffic",
]
