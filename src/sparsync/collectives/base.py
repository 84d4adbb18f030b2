"""How entries are summed over ranks: the protocol of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsync.collectives.comm.channel import Channel
from sparsync.layout import Layout
from sparsync.sparse import NONFINITE, SparseGrad, write_mean
from sparsync.wire import Header, Shape, Wire

State = dict[str, Any]


@dataclass
class Reduced:
    """What came of an exchange.

    Args:
        total: the result is the sum of these, in this order ...
        divisor: ... divided by this.
        rejected: entries this rank sent, or summed for others, that did not make it into the result: they go back into
            this rank's residual.
        bad: ``(rank, number of the parameter)`` of each rank whose gradient was not finite.
    """

    total: Sequence[SparseGrad]
    divisor: int
    rejected: SparseGrad | None = None
    bad: list[tuple[int, int]] = field(default_factory=list)

    def write_mean(self, out: Tensor, overflow: Tensor | None = None) -> None:
        """Overwrite ``out`` with the result; ``overflow`` becomes 1 if that is not finite."""
        written = write_mean(out, self.total, self.divisor)
        if overflow is not None:
            overflow.logical_or_(torch.isfinite(written).all().logical_not())


@dataclass(frozen=True)
class Traffic:
    """What one exchange costs: bytes a worker puts on the network (mean and maximum over workers) and rounds.

    Packet headers come on top, and what the backend sends around each of its messages: 144 bytes with Gloo, which cuts
    a gathered message in 2 and a summed tensor in 2P or more. ``sparsync bench traffic`` measures both.
    """

    mean_bytes: float
    max_bytes: float
    rounds: int


class Collective(Protocol):
    """Frozen configuration; state lives beside it.

    ``reduce`` may overwrite what is sent, if that is dense. ``shared``: every rank must send the same entries.
    ``blocks``: what a rank sends travels as it is, so that a block's start can stand for its indices. ``deferrable``:
    it needs nothing from the host between its rounds, and verifies the headers of one of them.
    """

    shared: bool
    blocks: bool
    deferrable: bool

    def check(self, wire: Wire, dense: bool, random: bool) -> None:
        """Refuse, with a sentence, what this collective cannot carry; ``dense``, ``random``: what the compressor is."""
        ...

    def init(self, layout: Layout, workers: int) -> State:
        """Fresh state for exchanges of ``layout``."""
        ...

    def reduce(self, sent: SparseGrad, layout: Layout, channel: Channel, state: State) -> Reduced:
        """Sum what every rank sent. Runs on the communication thread, in the same order on every rank."""
        ...

    def reduce_local(self, sents: Sequence[SparseGrad], layout: Layout, state: State, wire: Wire) -> list[Reduced]:
        """The same sum with all ranks in one process: what each rank would get."""
        ...

    def traffic(self, layout: Layout, wire: Wire, workers: int, dtype: torch.dtype = torch.float32) -> Traffic:
        """What an exchange of this layout costs, padding included; ``dtype`` is the residual's."""
        ...


def shape_of(layout: Layout, dtype: torch.dtype) -> Shape:
    """The shape of a message about ``layout``; ``dtype`` is the residual's."""
    return Shape(layout.numel, layout.capacity, len(layout.segments), dtype, layout.slots)


def as_sent(sums: Tensor, segments: Tensor, parts: int, wire: Wire) -> Tensor:
    """Sums as they travel. One that overflowed goes as it is, so that every rank sees it and gives the step up.

    Args:
        segments: of each, its number below ``parts``.
    """
    if wire.codec.round is None:
        return sums
    finite = sums.isfinite()
    return torch.where(finite, wire.codec.round(torch.where(finite, sums, 0), segments, parts), sums)


def left_of(sums: Tensor, chosen: Tensor, sent: Tensor) -> Tensor:
    """What is left of ``sums`` once ``sent`` went from ``chosen``; of one that overflowed nothing: its parts come home
    to who sent them."""
    return torch.where(sums.isfinite(), sums.index_add(0, chosen, -sent), 0)


def local_bad_ranks(sents: Sequence[SparseGrad]) -> list[tuple[int, int]]:
    """The same from what the ranks send."""
    return [(rank, int(sent.where)) for rank, sent in enumerate(sents) if int(sent.flags) & NONFINITE]


def bad_ranks(headers: Sequence[Header]) -> list[tuple[int, int]]:
    """``(rank, parameter)`` of each rank that says its gradient was not finite."""
    return [(rank, header.where) for rank, header in enumerate(headers) if header.flags & NONFINITE]
