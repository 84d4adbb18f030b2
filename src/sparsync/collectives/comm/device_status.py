"""What came of an exchange, decided on the device; Python hears of it later, without waiting for it now."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparsync.kernels.device import on_device_of
from sparsync.kernels.launcher import Launcher
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad
from sparsync.wire import HEADER, MAGIC, VERSION, Header

BLOCK, PROGRAMS = 1024, 264
WORDS = 4096  # of a message that are summed at a time
FIRST = 2  # word of a report that is a header's
PAUSE = 20e-6  # seconds between two looks at the device


@dataclass
class Report:
    """Words on their way from the device to the host."""

    words: Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, words: Tensor, spare: list[Tensor]) -> Report:
        """Send ``words``; ``spare``: host buffers that are free again."""
        fitting = next((i for i, buffer in enumerate(spare) if buffer.numel() == words.numel()), None)
        if words.device.type != "cuda":
            return cls(words.view(-1).clone(), None)
        if fitting is not None:
            buffer = spare.pop(fitting)
        else:
            buffer = torch.empty(words.numel(), dtype=words.dtype, pin_memory=True, device="cpu")
        buffer.copy_(words.view(-1), non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return cls(buffer, arrived)

    def there(self, seconds: float) -> bool:
        """Wait at most ``seconds``; whether the words have come."""
        until = time.monotonic() + seconds
        while self.arrived is not None and not self.arrived.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > until:
                return False
            time.sleep(PAUSE)
        return True

    def read(self, spare: list[Tensor]) -> list[int]:
        """Return the words, once they are there."""
        if self.arrived is not None:
            spare.append(self.words)
        words: list[int] = self.words.tolist()
        return words


class Outcome(NamedTuple):
    """What came of a step: whether it was bad, the number of the first exchange that failed, if any, and the headers
    that each of the step's exchanges saw."""

    bad: bool
    failed_exchange: int
    exchanges: list[list[Header]]


class ExchangeNumber:
    """The number of the exchange under way, where kernels look it up: so that a launch is the same in every step."""

    def __init__(self, device: torch.device) -> None:
        self._word, self.known = torch.zeros((), dtype=torch.int32, device=device), 0

    def at(self, number: int) -> Tensor:
        """Return where it stands, as a 0-d int32 tensor."""
        if number != self.known:
            self._word.fill_(number & 0x7FFFFFFF)  # a long training wraps round
            self.known = number
        return self._word


class DeviceStatus:
    """Decides on the device what an exchange comes to.

    ``failed_exchange``: the number (from 1) of the first exchange whose headers disagreed, in which a rank failed or a
    message was damaged, or 0: from it on nothing is applied, until the host hears of it. ``bad``: 1 if in this step a
    gradient, or a sum of them, was not finite. The host hears of a step's exchanges all at once: ``bad``,
    ``failed_exchange``, then the headers of each of them.
    """

    def __init__(self, workers: int, device: torch.device) -> None:
        self.workers, self.device, self._launch = workers, device, Launcher()
        self.failed_exchange = torch.zeros((), dtype=torch.int32, device=device)
        self.number = ExchangeNumber(device)
        self._sums = torch.zeros(workers + 1, dtype=torch.int64, device=device)  # for messages that are checked
        self._report = torch.zeros(FIRST + workers * HEADER, dtype=torch.int32, device=device)
        self.bad, self._written = self._report[0], FIRST  # words that this step has written
        self._again = torch.zeros(workers * HEADER, dtype=torch.int32, device=device)  # headers of a further round
        self._spare: list[Tensor] = []

    @property
    def place(self) -> tuple[int, int]:
        """Where the headers of the next exchange are reported: a pointer, and words behind it."""
        return self._report.data_ptr(), self._written

    def go_to(self, number: int, words: int) -> None:
        """Go on with another exchange than the next, and so many words further on: kernels were replayed, or they were
        recorded and have not run."""
        self.number.known = number
        self._written += words

    def begin(self) -> None:
        """Begin a step."""
        self.bad.zero_()
        self._written = FIRST

    def write_header(self, sent: SparseGrad, header: Tensor, sequence: int, layout: Layout) -> Tensor:
        """Write the header of ``sent``, sealed."""
        from sparsync.kernels.message.header_triton import write_header

        with on_device_of(header):
            self._launch(
                write_header, (1,),
                header, 0, sent.count, sent.flags, sent.where, self.failed_exchange, header, MAGIC << 16 | VERSION,
                self.number.at(sequence), layout.id, layout.digest, BLOCK=1024, SEALED=True,
            )  # fmt: skip
        return header

    def check_messages(self, rows: Tensor, number: int, again: bool = False) -> None:
        """Look at the messages ``rows`` of exchange ``number``, and at their headers. ``again``: they are of a further
        round; if that is the first to fail, its headers are reported, instead of those of the round before."""
        from sparsync.kernels.status import triton as kernels

        words, counter = rows.shape[1], self.number.at(number - 1)  # which the kernel makes ``number``
        self.number.known = number
        programs = min(PROGRAMS, -(-words // WORDS))
        with on_device_of(rows):
            self._written += 0 if again else self.workers * HEADER
            if self._written > self._report.numel():
                self._make_room()
            self._launch(
                kernels.check_messages, (programs, self.workers),
                rows, rows.stride(0), words, self.workers, programs, MAGIC << 16 | VERSION, counter, self._sums,
                self.failed_exchange, self.bad, self._report, self._written - self.workers * HEADER, self._again,
                BLOCK=WORDS, LANES=32, AGAIN=again,
            )  # fmt: skip

    def check_finite(self, result: Tensor) -> None:
        """Make the step bad if the result is not finite."""
        from sparsync.kernels.status import triton as kernels

        with on_device_of(result):
            programs = _programs(result.numel())
            self._launch(kernels.check_finite, (programs,), result, result.numel(), self.bad, programs, BLOCK=BLOCK)

    def poison(self, result: Tensor, starts: Tensor, undone: bool) -> None:
        """Once an exchange has failed, the result is 0; in a bad step, the optimizer shall see NaN at ``starts``.

        ``undone``: a step with a failed exchange is undone as a whole, so there too it shall see NaN.
        """
        from sparsync.kernels.status import triton as kernels

        with on_device_of(result):
            programs = _programs(result.numel())
            self._launch(
                kernels.poison, (programs,),
                result, result.numel(), starts, starts.numel(), self.failed_exchange, self.bad, programs, BLOCK=BLOCK,
                UNDONE=int(undone),
            )  # fmt: skip

    def put_back(self, residual: Tensor, rejected: SparseGrad, number: int) -> None:
        """Add what exchange ``number`` of this step rejected to the residual, where sums saturate, if the rest of it is
        applied."""
        from sparsync.kernels.status import triton as kernels

        assert rejected.indices is not None
        size = rejected.indices.shape[-1]
        rows = rejected.indices.numel() // max(1, size)
        with on_device_of(residual):
            for row in range(rows):
                self._launch(
                    kernels.put_back, (-(-size // BLOCK),),
                    residual, rejected.indices, rejected.values, row * size, size, self.bad, self.failed_exchange,
                    number, BLOCK=BLOCK,
                )  # fmt: skip

    def restore(self, residual: Tensor, sent: SparseGrad, number: int) -> None:
        """Put what was sent in exchange ``number`` of this step back into the residual if it is not applied."""
        from sparsync.kernels.status import triton as kernels

        with on_device_of(residual):
            if sent.indices is None:
                programs = _programs(sent.numel)
                self._launch(
                    kernels.restore_dense,
                    (programs,),
                    residual,
                    sent.values,
                    sent.numel,
                    self.bad,
                    self.failed_exchange,
                    number,
                    programs,
                    BLOCK=BLOCK,
                )
                return
            self._launch(
                kernels.restore,
                (-(-sent.indices.numel() // BLOCK),),
                residual,
                sent.indices,
                sent.values,
                sent.count,
                self.bad,
                self.failed_exchange,
                number,
                BLOCK=BLOCK,
            )

    def close_step(self) -> Report:
        """Send what came of the step to the host."""
        with on_device_of(self._report):
            self._report[1].copy_(self.failed_exchange)
            return Report.of(self._report[: self._written], self._spare)

    def read(self, report: Report) -> Outcome:
        """Return what ``close_step`` said."""
        words = report.read(self._spare)
        headers = [Header(*words[i : i + HEADER]) for i in range(FIRST, len(words), HEADER)]
        exchanges = [headers[i : i + self.workers] for i in range(0, len(headers), self.workers)]
        return Outcome(bool(words[0]), words[1], exchanges)

    def _make_room(self) -> None:
        """Make room for twice as many exchanges."""
        larger = self._report.new_zeros(2 * self._report.numel() - FIRST)
        larger[: self._report.numel()] = self._report
        self._report, self.bad = larger, larger[0]


def _programs(numel: int) -> int:
    """Few enough to cost nothing when there is nothing to do."""
    return min(PROGRAMS, -(-numel // BLOCK))
