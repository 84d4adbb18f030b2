"""Who looks at the headers of an exchange: the host as it ends, or the device, of which the host hears later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsync.collectives.comm.device_status import DeviceStatus, ExchangeNumber
from sparsync.collectives.comm.store_monitor import StoreMonitor
from sparsync.errors import Damaged, Mismatch, PeerFailed
from sparsync.layout import Layout
from sparsync.sparse import FAILED, SparseGrad
from sparsync.wire import HEADER, MAGIC, VERSION, Header, Wire, read_headers, seal
from sparsync.workspace import Workspace

OnStream = Callable[[torch.device], AbstractContextManager[Any]]
SAME = ("version", "sequence", "unit", "digest")  # fields that all ranks must agree on


class HeaderChecks(Protocol):
    """Makes and checks headers; chosen once, when the exchanges begin."""

    def header(self, wire: Wire, sent: SparseGrad, sequence: int, layout: Layout, workspace: Workspace) -> Tensor:
        """Return the header of ``sent`` alone, sealed."""
        ...

    def room(self, workspace: Workspace, make: Callable[[], Tensor]) -> Tensor:
        """Return room for every rank's header: ``make()``, or what it gave before where that can be used again."""
        ...

    def check(self, rows: Tensor, sequence: int, again: bool = False) -> list[Header]:
        """Check the messages ``rows``, and their headers; these are returned where the host knows them. ``again``: they
        are of a further round of the exchange that was checked last."""
        ...

    def failed_exchange(self, device: torch.device) -> Tensor:
        """Return the number (from 1) of the first exchange that failed, or 0, where kernels look it up."""
        ...

    def number(self, device: torch.device, sequence: int) -> Tensor:
        """Return ``sequence``, the number of the exchange under way, where kernels look it up."""
        ...


class HostChecks:
    """The host reads the headers, and raises on every rank alike if they disagree, a rank has failed or a message was
    damaged.

    Args:
        ranks: that send headers, by the monitor's numbers; all of them.
        failed_exchange: where to look that up instead.
    """

    def __init__(
        self,
        monitor: StoreMonitor,
        ranks: Sequence[int] | None = None,
        failed_exchange: Callable[[torch.device], Tensor] | None = None,
    ) -> None:
        self.monitor, self.ranks, self._elsewhere = monitor, ranks, failed_exchange
        self._zeros: dict[torch.device, Tensor] = {}
        self._numbers: dict[torch.device, ExchangeNumber] = {}

    def header(self, wire: Wire, sent: SparseGrad, sequence: int, layout: Layout, workspace: Workspace) -> Tensor:
        return seal(wire.header(sent, sequence, layout.id, layout.digest))

    def room(self, workspace: Workspace, make: Callable[[], Tensor]) -> Tensor:
        return make()

    def check(self, rows: Tensor, sequence: int, again: bool = False) -> list[Header]:
        headers = read_headers(rows)
        check_headers(headers, self.monitor, self.ranks)
        return headers

    def failed_exchange(self, device: torch.device) -> Tensor:
        if self._elsewhere is not None:
            return self._elsewhere(device)
        if device not in self._zeros:
            self._zeros[device] = torch.zeros((), dtype=torch.int32, device=device)
        return self._zeros[device]

    def number(self, device: torch.device, sequence: int) -> Tensor:
        if device not in self._numbers:
            self._numbers[device] = ExchangeNumber(device)
        return self._numbers[device].at(sequence)


class DeviceChecks:
    """The device reads the headers and keeps them; the host hears of them when a later step begins.

    Args:
        workers: ranks whose headers are read.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._status: dict[torch.device, DeviceStatus] = {}

    def status(self, device: torch.device) -> DeviceStatus:
        """Return what decides on that device."""
        if device not in self._status:
            self._status[device] = DeviceStatus(self.workers, device)
        return self._status[device]

    def begin_step(self, on_stream: OnStream) -> None:
        """Begin a step on every device; ``on_stream`` gives the stream that exchanges run on."""
        for device, status in self._status.items():
            with on_stream(device):
                status.begin()

    def header(self, wire: Wire, sent: SparseGrad, sequence: int, layout: Layout, workspace: Workspace) -> Tensor:
        device = sent.values.device
        words = workspace.get(HeaderBuffer, device, lambda: HeaderBuffer(device)).words
        return self.status(device).write_header(sent, words, sequence, layout)

    def room(self, workspace: Workspace, make: Callable[[], Tensor]) -> Tensor:
        buffer = workspace.find(HeaderBuffer)
        assert buffer is not None  # ``header`` has made it
        if buffer.rows is None:
            buffer.rows = make()
        return buffer.rows

    def check(self, rows: Tensor, sequence: int, again: bool = False) -> list[Header]:
        self.status(rows.device).check_messages(rows, sequence, again)
        return []

    def failed_exchange(self, device: torch.device) -> Tensor:
        return self.status(device).failed_exchange

    def number(self, device: torch.device, sequence: int) -> Tensor:
        return self.status(device).number.at(sequence)


class HeaderBuffer:
    """Room on the device for one header, and for those of all ranks."""

    def __init__(self, device: torch.device) -> None:
        self.words = torch.zeros(HEADER, dtype=torch.int32, device=device)
        self.rows: Tensor | None = None


def check_headers(headers: Sequence[Header], monitor: StoreMonitor, ranks: Sequence[int] | None = None) -> None:
    """Raise, on every rank alike, if headers disagree, a rank has failed or a message was damaged.

    Args:
        ranks: that they are of; the first.
    """
    ranks = range(len(headers)) if ranks is None else ranks
    check_intact(headers, ranks, monitor)
    for rank, header in zip(ranks, headers, strict=True):
        if header.flags & FAILED:
            raise PeerFailed(monitor.cause(rank))
    for field in SAME:
        said = [getattr(header, field) for header in headers]
        if len(set(said)) > 1:
            raise disagreement(field, ranks, said)


def check_intact(headers: Sequence[Header], ranks: Sequence[int], monitor: StoreMonitor) -> None:
    """Raise if what came from ``ranks`` are not messages as we send them. Other ranks may have got them whole: they are
    told."""
    for rank, header in zip(ranks, headers, strict=True):
        if header.version != MAGIC << 16 | VERSION:
            text = f"what rank {rank} sent is not a message of format {VERSION}: {header}"
            raise monitor.broadcast_error(Mismatch(text))
        if header.damaged:
            text = (
                f"the message of rank {rank} about unit {header.unit} did not arrive at rank {monitor.rank} as it was"
            )
            raise monitor.broadcast_error(Damaged(f"{text} sent: its checksum is another one"))


def check_fits(failed_exchange: int, monitor: StoreMonitor) -> None:
    """Raise if a message of that exchange, of which no header tells, named entries that do not exist."""
    if failed_exchange:
        text = (
            f"exchange {failed_exchange - 1}: a message that rank {monitor.rank} got has entries outside its gradient"
        )
        raise monitor.broadcast_error(Damaged(text))


def disagreement(field: str, ranks: Sequence[int], said: Sequence[int]) -> Mismatch:
    """Return the error of ranks that are not at the same exchange."""
    listing = ", ".join(f"rank {rank}: {value}" for rank, value in zip(ranks, said, strict=True))
    return Mismatch(f"the ranks are not at the same exchange, their {field} differs ({listing})")
