"""How entries are summed over ranks: one file per method, one protocol in ``base``."""

from sparsync.collectives.allgather import AllGather
from sparsync.collectives.balanced import Balanced
from sparsync.collectives.base import Collective, Reduced, Traffic, Transfer
from sparsync.collectives.by_parts import ReduceByParts
from sparsync.collectives.comm.channel import Channel
from sparsync.collectives.comm.device_status import Report
from sparsync.collectives.dense import DenseAllReduce
from sparsync.collectives.gtopk import GTopK
from sparsync.collectives.shared_index import SharedIndexAllReduce

__all__ = [
    "AllGather",
    "Balanced",
    "Channel",
    "Collective",
    "DenseAllReduce",
    "GTopK",
    "ReduceByParts",
    "Reduced",
    "Report",
    "SharedIndexAllReduce",
    "Traffic",
    "Transfer",
]
