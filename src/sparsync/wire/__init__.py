"""A sparse gradient as one flat message, and back."""

from sparsync.kernels.message.header import HEADER, Header
from sparsync.wire.indices import INDEX_CODECS, IndexCodec
from sparsync.wire.message import MAGIC, VERSION, Wire, read_headers, seal, within
from sparsync.wire.shape import WORD, Shape
from sparsync.wire.values import CODECS, ValueCodec

__all__ = [
    "CODECS",
    "HEADER",
    "INDEX_CODECS",
    "MAGIC",
    "VERSION",
    "WORD",
    "Header",
    "IndexCodec",
    "Shape",
    "ValueCodec",
    "Wire",
    "read_headers",
    "seal",
    "within",
]
