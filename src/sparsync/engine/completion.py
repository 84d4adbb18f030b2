"""News of exchanges that the device decides: the host hears what came of them when a later step begins."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparsync.collectives import Channel, Report
from sparsync.engine.stats import Exchange, Stats
from sparsync.layout import Layout
from sparsync.sparse import NONFINITE
from sparsync.wire import Header

log = logging.getLogger("sparsync")


@dataclass
class Pending:
    """What a step's exchanges came to: not heard of yet."""

    step: int
    report: Report
    device: torch.device
    exchanges: list[tuple[Exchange, Layout]]
    said: tuple[bool, list[list[Header]]] | None = None  # whether it was bad, and each exchange's headers


class News:
    """What is on its way from the device, in order.

    Args:
        stats: learn how many entries were sent.
    """

    def __init__(self, channel: Channel, stats: Stats) -> None:
        self.channel, self.stats = channel, stats
        self._started: list[tuple[Exchange, Layout]] = []  # in the step under way
        self._pending: list[Pending] = []

    def of_exchange(self, exchange: Exchange, layout: Layout) -> None:
        """The last exchange was of this layout."""
        self._started.append((exchange, layout))

    def of_step(self, step: int, device: torch.device) -> None:
        """All exchanges of this step have been started."""
        report = self.channel.device_status(device).close_step()
        self._pending.append(Pending(step, report, device, self._started))
        self._started = []

    def hear(self, before: int) -> Iterator[bool]:
        """Of each step before this one, whether it was bad; raises, on every rank alike, what went wrong in it."""
        while self._pending and self._pending[0].step < before:
            news = self._pending.pop(0)
            bad, exchanges = self._read(news)
            for (_, layout), headers in zip(news.exchanges, exchanges, strict=True):
                self.channel.check(headers)
                for rank, header in enumerate(headers):
                    if header.flags & NONFINITE:
                        warn(news.step, layout.spans[header.where].name, rank)
            yield bad

    def learn(self) -> None:
        """Let the statistics have all there is to hear of past steps; whether they went well is heard later."""
        for news in self._pending:
            self._read(news)

    def forget(self) -> None:
        """Nothing more is going to be heard."""
        self._started, self._pending = [], []

    def _read(self, news: Pending) -> tuple[bool, list[list[Header]]]:
        """What a report says."""
        if news.said is None:
            self.channel.await_report(news.report)
            news.said = self.channel.device_status(news.device).read(news.report)
            if len(news.said[1]) != len(news.exchanges):
                raise RuntimeError(
                    f"step {news.step}: headers were verified {len(news.said[1])} times in {len(news.exchanges)} "
                    "exchanges; a collective with deferrable=True must do it once in each"
                )
            for (exchange, layout), headers in zip(news.exchanges, news.said[1], strict=True):
                self.stats.learn(exchange, headers[self.channel.rank].entries, layout.sendable)
        return news.said


def warn(step: int, name: str, rank: int) -> None:
    """Say whose gradient was not finite."""
    log.warning("step %d: the gradient of %s was not finite on rank %d", step, name, rank)
