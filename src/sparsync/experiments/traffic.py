"""What a worker puts on the network, from what it hands to ``torch.distributed``.

Both collectives run as rings in Gloo: of P workers, each sends a message that is gathered P - 1 times, and of a tensor
that is summed 2(P - 1)/P times its size.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparsync import DenseAllReduce, Handle
from sparsync.stats import Exchange
from sparsync.wire import HEADER, WORD


def is_dense(exchange: Exchange, handle: Handle) -> bool:
    """Whether the exchange sums whole tensors: all do without compression, else those of the small tensors."""
    return isinstance(handle.collective, DenseAllReduce) or exchange.unit.startswith("small")


def sent_bytes(handle: Handle, workers: int) -> float:
    """Bytes this worker put on the network in the last step, headers included."""
    return sum(_on_the_wire(e, workers, is_dense(e, handle)) for e in _timeline(handle))


def dense_bytes(numel: int, workers: int) -> float:
    """Bytes a worker puts on the network when plain DDP averages ``numel`` fp32 entries."""
    return 2 * (workers - 1) / workers * numel * 4


def _timeline(handle: Handle) -> Sequence[Exchange]:
    return handle.stats().timeline


def _on_the_wire(exchange: Exchange, workers: int, dense: bool) -> float:
    if not dense:
        return (workers - 1) * exchange.bytes
    header = HEADER * WORD
    return (workers - 1) * (header + 2 / workers * (exchange.bytes - header))
