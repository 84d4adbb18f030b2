"""How entries are summed over ranks: the protocol of collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sparsync.collectives.comm.channel import Channel
from sparsync.layout import Layout
from sparsync.sparse import NONFINITE, SparseGrad, give_norm, write_mean
from sparsync.wire import Header, Shape, Wire
from sparsync.wire.device import DeviceMessage
from sparsync.workspace import Workspace


class FiniteFlag(Protocol):
    """Remembers, on the device, whether a result was not finite."""

    @property
    def bad(self) -> Tensor:
        """0-d int32 tensor: 1 once a result was not finite."""
        ...

    def check_finite(self, result: Tensor) -> None:
        """Set ``bad`` if an entry of ``result`` is not finite."""
        ...


class OverflowFlag:
    """A ``FiniteFlag`` in plain PyTorch."""

    def __init__(self, device: torch.device) -> None:
        self.bad = torch.zeros((), dtype=torch.int32, device=device)

    def check_finite(self, result: Tensor) -> None:
        self.bad.logical_or_(torch.isfinite(result).all().logical_not())


class Mean(Protocol):
    """The result of an exchange, still to be written."""

    def write(self, out: Tensor, flag: FiniteFlag | None = None) -> None:
        """Overwrite the flat tensor ``out``; ``flag`` is told if that is not finite (a sum may overflow)."""
        ...

    def write_parts(self, parts: Sequence[tuple[int, Tensor]], flag: FiniteFlag | None = None) -> bool:
        """Do the same where the flat tensor lies in ``parts``, all of it in ascending order: where each starts, and the
        part. Returns whether it could: if not, nothing is known of the parts."""
        return False

    def give_norm(self, out: Tensor, norms: Tensor, scale: float) -> Tensor:
        """Multiply what was just written into ``out`` as ``sparse.give_norm`` does, on every rank alike."""
        return give_norm(out, norms, scale)


@dataclass
class MeanOf(Mean):
    """The sum of ``terms``, in their order, divided once by ``divisor``."""

    terms: Sequence[SparseGrad]
    divisor: int

    def write(self, out: Tensor, flag: FiniteFlag | None = None) -> None:
        written = write_mean(out, self.terms, self.divisor)
        if flag is not None:
            flag.check_finite(written)


@dataclass
class MeanOfMessages:
    """The mean of the messages of all ranks, read and summed by kernels; 0 once an exchange has failed."""

    message: DeviceMessage
    rows: Tensor
    failed_exchange: Tensor
    number: Tensor  # of the exchange, one int32

    def write_parts(self, parts: Sequence[tuple[int, Tensor]], flag: FiniteFlag | None = None) -> bool:
        return False

    def write(self, out: Tensor, flag: FiniteFlag | None = None) -> None:
        self.message.write_mean(self.rows, self.failed_exchange, out, None if flag is None else flag.bad, self.number)

    def give_norm(self, out: Tensor, norms: Tensor, scale: float) -> Tensor:
        return self.message.give_norm(self.rows, out, norms, scale)


@dataclass
class Reduced:
    """What came of an exchange.

    Args:
        mean: the result, the same on every rank.
        rejected: entries this rank sent, or summed for others, that did not make it into the result: they go back into
            this rank's residual.
        bad_ranks: ``(rank, number of the parameter)`` of each rank whose gradient was not finite; empty where only the
            device knows.
    """

    mean: Mean
    rejected: SparseGrad | None = None
    bad_ranks: list[tuple[int, int]] = field(default_factory=list)


RING, PAIRS, TREE = "ring", "pairs", "tree"


@dataclass(frozen=True)
class Transfer:
    """One part of an exchange, for those who ask how long it takes.

    Args:
        pattern: ``RING``: every rank sends to the next, round after round; ``PAIRS``: every rank sends to every other
            at once; ``TREE``: up a binary tree of the ranks and down again.
        rounds: messages that wait for one another; with ``PAIRS`` messages that a rank sends.
        bytes: that pass one after another through the busiest worker.
    """

    pattern: str
    rounds: int
    bytes: float


@dataclass(frozen=True)
class Traffic:
    """What one exchange costs: bytes a worker puts on the network (mean and maximum over workers) and rounds.

    Packet headers come on top, and what the backend sends around each of its messages: 144 bytes with Gloo, which cuts
    a gathered message in 2 and a summed tensor in 2P or more. ``sparsync bench traffic`` measures both.

    Args:
        transfers: its parts, one after another; if none are given, a ring of so many rounds and bytes.
    """

    mean_bytes: float
    max_bytes: float
    rounds: int
    transfers: tuple[Transfer, ...] = ()

    def __post_init__(self) -> None:
        if not self.transfers:
            object.__setattr__(self, "transfers", (Transfer(RING, self.rounds, self.max_bytes),))

    @classmethod
    def of(cls, *transfers: Transfer) -> Traffic:
        """Return the traffic of transfers in which all workers send alike."""
        sent = sum(transfer.bytes for transfer in transfers)
        return cls(sent, sent, sum(transfer.rounds for transfer in transfers), transfers)


class Collective(Protocol):
    """Frozen configuration; buffers live in the workspace that is passed in. A class that names it as its base has its
    defaults.

    Attributes:
        shared: every rank must send the same entries.
        blocks: what a rank sends travels as it is, so that a block's start can stand for its indices.
        deferrable: it needs nothing from the host between its rounds, and verifies the headers of one of them, or of
            several: then of all but the first ``again``.
        graph_safe: ``reduce_local`` never waits for the host, so that a CUDA graph may replay it; where it is
            ``deferrable``, ``reduce`` neither, but for the channel's calls.
        node_sums: it divides by ``channel.divisor``, so that leaders of nodes may send sums of their nodes' gradients.
    """

    shared: bool = False
    blocks: bool = False
    deferrable: bool = False
    graph_safe: bool = False
    node_sums: bool = False

    def check(self, wire: Wire, dense: bool, random: bool) -> None:
        """Refuse, with a sentence, what this collective cannot carry; ``dense``, ``random``: what the compressor is."""
        if dense:
            name = type(self).__name__
            raise ValueError(f"a compressor that sends every entry goes with collective='dense', not with {name}")

    def reduce(self, sent: SparseGrad, layout: Layout, channel: Channel, workspace: Workspace) -> Reduced:
        """Sum what every rank sent; may overwrite what is sent, if that is dense.

        Runs on the communication thread, in the same order on every rank.
        """
        ...

    def reduce_local(
        self, sents: Sequence[SparseGrad], layout: Layout, wire: Wire, divisor: int | None = None
    ) -> list[Reduced]:
        """Return what each rank would get, all ranks being in this process: the same sum.

        Args:
            divisor: as the channel's; the number of those who send.
        """
        ...

    def traffic(self, layout: Layout, wire: Wire, workers: int, dtype: torch.dtype = torch.float32) -> Traffic:
        """Return what an exchange of this layout costs, padding included; ``dtype`` is the residual's."""
        ...

    def encoded_bytes(self, sents: Sequence[SparseGrad], layout: Layout, wire: Wire) -> list[float] | None:
        """Encode the messages and return the bytes that each worker puts on the network, to compare with ``traffic``.

        ``None`` where nothing is encoded, as values alone travel.
        """
        return None


def shape_of(layout: Layout, dtype: torch.dtype) -> Shape:
    """Return the shape of a message about ``layout``; ``dtype`` is the residual's."""
    return Shape(layout.numel, layout.capacity, len(layout.segments), dtype, layout.slots)


def message_bytes(sent: SparseGrad, layout: Layout, wire: Wire) -> int:
    """Encode one message and return its size."""
    header = wire.header(sent, 0, layout.id, layout.digest)
    return wire.encode(sent, layout.segment_of, shape_of(layout, sent.values.dtype), header).nbytes


def round_sums(sums: Tensor, segments: Tensor, parts: int, wire: Wire) -> Tensor:
    """Return sums as they travel. One that overflowed goes as it is, so that every rank gives the step up.

    Args:
        segments: of each, its number below ``parts``.
    """
    if wire.codec.round is None:
        return sums
    finite = sums.isfinite()
    if sums.device.type == "cpu" and bool(finite.all()):  # elsewhere nobody waits for that
        return wire.codec.round(sums, segments, parts, math.inf)
    return torch.where(finite, wire.codec.round(torch.where(finite, sums, 0), segments, parts, math.inf), sums)


def remainder_of(sums: Tensor, chosen: Tensor, sent: Tensor) -> Tensor:
    """Return what is left of ``sums`` once ``sent`` went from ``chosen``; 0 where a sum overflowed, as its parts go
    back to those who sent them."""
    return torch.where(sums.isfinite(), sums.index_add(0, chosen, -sent), 0)


def bad_ranks_of(sents: Sequence[SparseGrad]) -> list[tuple[int, int]]:
    """Return ``(rank, parameter)`` of each rank whose gradient was not finite, from what the ranks send."""
    return [(rank, int(sent.where)) for rank, sent in enumerate(sents) if int(sent.flags) & NONFINITE]


def bad_ranks(headers: Sequence[Header]) -> list[tuple[int, int]]:
    """Return ``(rank, parameter)`` of each rank that says its gradient was not finite."""
    return [(rank, header.where) for rank, header in enumerate(headers) if header.flags & NONFINITE]
