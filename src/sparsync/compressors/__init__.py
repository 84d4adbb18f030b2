"""Which entries are sent: one file per method, one protocol in ``base``."""

from sparsync.compressors.base import Compressor, Context, Selecting, State
from sparsync.compressors.none import NoCompression
from sparsync.compressors.random import BlockRandomK, RandomK
from sparsync.compressors.threshold import ThresholdK
from sparsync.compressors.topk import TopK

__all__ = [
    "BlockRandomK",
    "Compressor",
    "Context",
    "NoCompression",
    "RandomK",
    "Selecting",
    "State",
    "ThresholdK",
    "TopK",
]
