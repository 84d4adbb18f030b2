"""News of exchanges that the device decides: the host hears what came of them when a later step begins."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sparsync.collectives import Channel, Report
from sparsync.layout import Layout
from sparsync.sparse import NONFINITE
from sparsync.stats import Exchange, Stats
from sparsync.wire import Header

log = logging.getLogger("sparsync")


@dataclass
class Pending:
    """What a step's exchange came to, or (without ``exchange``) the step itself: not heard of yet."""

    step: int
    report: Report
    device: torch.device
    exchange: Exchange | None = None
    layout: Layout | None = None
    headers: Sequence[Header] = ()


class News:
    """What is on its way from the device, in order.

    Args:
        stats: learn how many entries were sent.
    """

    def __init__(self, channel: Channel, stats: Stats) -> None:
        self.channel, self.stats = channel, stats
        self._pending: list[Pending] = []

    def of_exchange(self, step: int, device: torch.device, exchange: Exchange, layout: Layout) -> None:
        """The last exchange was of this layout, and its report is on its way."""
        assert self.channel.report is not None
        self._pending.append(Pending(step, self.channel.report, device, exchange, layout))

    def of_step(self, step: int, device: torch.device) -> None:
        """All exchanges of this step have been started."""
        self._pending.append(Pending(step, self.channel.verdicts(device).close_step(), device))

    def hear(self, before: int) -> Iterator[bool]:
        """Of each step before this one, whether it was bad; raises, on every rank alike, what went wrong in it."""
        while self._pending and self._pending[0].step < before:
            news = self._read(self._pending.pop(0))
            if news.layout is None:
                self.channel.await_report(news.report)
                yield self.channel.verdicts(news.device).was_bad(news.report)
                continue
            self.channel.check(news.headers)
            spans = list(news.layout.spans)
            for rank, header in enumerate(news.headers):
                if header.flags & NONFINITE:
                    warn(news.step, spans[header.where].name, rank)

    def learn(self) -> None:
        """Let the statistics have all there is to hear; whether it went well is heard later."""
        for news in self._pending:
            self._read(news)

    def forget(self) -> None:
        """Nothing more is going to be heard."""
        self._pending = []

    def _read(self, news: Pending) -> Pending:
        """Read what a report says of an exchange."""
        if news.exchange is not None and news.layout is not None and not news.headers:
            self.channel.await_report(news.report)
            news.headers = self.channel.verdicts(news.device).headers(news.report)
            self.stats.learn(news.exchange, news.headers[self.channel.rank].entries, news.layout.sendable)
        return news


def warn(step: int, name: str, rank: int) -> None:
    """Say whose gradient was not finite."""
    log.warning("step %d: the gradient of %s was not finite on rank %d", step, name, rank)
