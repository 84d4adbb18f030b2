"""Which entries are sent: one file per method, one protocol in ``base``."""

from sparsync.compressors.base import Compressor, Context, State
from sparsync.compressors.dgc import DGCK
from sparsync.compressors.gaussian import GaussianK
from sparsync.compressors.none import NoCompression
from sparsync.compressors.random import BlockRandomK, RandomK
from sparsync.compressors.selecting import Selecting
from sparsync.compressors.threshold import ThresholdK
from sparsync.compressors.topk import TopK
from sparsync.compressors.trimmed import TrimmedK

__all__ = [
    "DGCK",
    "BlockRandomK",
    "Compressor",
    "Context",
    "GaussianK",
    "NoCompression",
    "RandomK",
    "Selecting",
    "State",
    "ThresholdK",
    "TopK",
    "TrimmedK",
]
