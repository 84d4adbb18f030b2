"""A plan in words: a table in plain text, and one sentence that says what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparsync.number_checks import is_whole
from sparsync.planner.forecast import ForecastRow, Planner
from sparsync.planner.links import Network
from sparsync.planner.quantities import bandwidth_text, bytes_text, count_text, seconds_text

HEADINGS = ("method", "step", "efficiency", "speed-up", "sent a step", "network", "local")


def check_every(every: int) -> None:
    """Refuse what is no number of local steps."""
    if not (is_whole(every) and every >= 1):
        raise ValueError(f"every must be a whole number of local steps, 1 or more, got {every!r}")


@dataclass(frozen=True)
class Plan:
    """What every method comes to on a network; ``print`` shows it.

    Attributes:
        planner: can be asked for other networks.
        rows: a method each.
        every: local steps of a round, of ``OuterLoop``.
    """

    planner: Planner
    network: Network
    costs_of: str = ""
    every: int = 30

    @property
    def rows(self) -> list[ForecastRow]:
        return self.planner.rows(self.network)

    @property
    def best(self) -> ForecastRow:
        """The fastest of the methods that keep dense's accuracy; the fastest dense one where none is worth it."""
        pays = self.planner.pays(self.network)
        found = self.planner.fastest(self.network, lambda method: method.accurate and method.dense is not pays)
        assert found is not None
        return found

    @property
    def dense(self) -> ForecastRow:
        """The fastest dense method."""
        found = self.planner.fastest(self.network, lambda method: method.dense)
        assert found is not None
        return found

    @property
    def speedup(self) -> float:
        """How many times faster than the fastest dense method the best is; 1 where that is dense."""
        return self.dense.seconds / self.best.seconds

    @property
    def pays(self) -> bool:
        """Whether a sparse method is the best."""
        return not self.planner.methods[self.best.method].dense

    @property
    def break_even(self) -> float | None:
        """Bits a second of machines' links above which no sparse method pays; ``None``: it never does."""
        return self.planner.break_even(self.network)

    def sentence(self) -> str:
        """Return what to do, and why."""
        dense, best = self.dense, self.best
        if self.pays:
            return (
                f"expect {self.speedup:.2g} × with `{best.method}`: {seconds_text(best.seconds)} a step instead of "
                f"{seconds_text(dense.seconds)} ({dense.method}), because it sends {bytes_text(best.traffic)} and not "
                f"{bytes_text(dense.traffic)}, which keep the network busy for {seconds_text(best.network)} and "
                f"{seconds_text(dense.network)}"
            )
        sparse = self.planner.fastest(self.network, lambda method: method.accurate and not method.dense)
        if sparse is None:
            return f"`{dense.method}` takes {seconds_text(dense.seconds)} a step"
        hidden = dense.seconds - self.planner.compute < 0.01 * self.planner.compute
        saved = max(0.0, dense.network - sparse.network)
        why = (
            "its exchange is hidden behind backward"
            if hidden
            else f"choosing and coding entries takes {seconds_text(sparse.local)}, to save {seconds_text(saved)} of "
            "network time, part of which is hidden behind backward"
        )
        return (
            f"don't: {dense.method} takes {seconds_text(dense.seconds)}, the best sparse method (`{sparse.method}`) "
            f"{seconds_text(sparse.seconds)}; {why}"
        )

    def limit(self) -> str:
        """Return, in words, the bandwidth above which nothing pays."""
        bits = self.break_even
        if bits is None:
            return "A sparse method pays at no bandwidth here."
        if math.isinf(bits):
            return "A sparse method pays at every bandwidth: the latency of dense's rounds alone takes longer."
        return f"Above {bandwidth_text(bits)} no sparse method pays."

    def local_steps(self) -> str:
        """Return what local steps would take, and up to which bandwidth they are faster than exchanges every step."""
        planner, every = self.planner, self.every
        waited, beside = (planner.outer_seconds(self.network, every, beside) for beside in (False, True))
        bits = planner.outer_break_even(self.network, every)
        limit = "at no bandwidth" if bits is None else f"below {bandwidth_text(bits)}"
        if bits is not None and math.isinf(bits):
            limit = "at every bandwidth"
        return (
            f"Local steps, OuterLoop(every={every}), with {bytes_text(planner.round.traffic)} a round: "
            f"{seconds_text(waited)} a step; {seconds_text(beside)} if rounds travel beside next steps, which is "
            f"faster than an exchange in every step {limit}. That is another algorithm, which learns less in a step: "
            "docs/outer-loop.md."
        )

    def notes(self) -> list[str]:
        """Return what is to be known beside the table."""
        found = []
        faster = [
            row.method
            for row in self.rows
            if not self.planner.methods[row.method].accurate and row.seconds < self.best.seconds
        ]
        if faster:
            names = ", ".join(f"`{name}`" for name in faster)
            found.append(f"{names}: faster still, but such trainings end below dense's accuracy.")
        if self.planner.workers > 1 and "default" in self.planner.forecasts:
            found.append(self.local_steps())
        if self.costs_of:
            found.append(f"Local: choosing, coding and summing entries, measured on {self.costs_of}.")
        return found

    def __str__(self) -> str:
        planner, link = self.planner, self.network.link
        nodes = ""
        if self.network.per_node > 1:
            nodes = f" in {count_text(math.ceil(planner.workers / self.network.per_node), 'machine')}"
        buckets, workers = count_text(len(planner.model.ready), "bucket"), count_text(planner.workers, "worker")
        title = (
            f"{planner.model.title}: {planner.model.numel:,} parameters in {buckets}; "
            f"{workers}{nodes}, {bandwidth_text(link.bandwidth)}, {seconds_text(link.latency)} a "
            f"message; compute {seconds_text(planner.compute)}"
        )
        best = f"Best: {self.sentence()}."
        return "\n".join([title, "", text_table(HEADINGS, self.cells()), "", best, self.limit(), *self.notes()])

    def cells(self) -> list[list[str]]:
        """Return the table's rows."""
        plain = self.rows[0].seconds
        return [
            [
                row.method,
                seconds_text(row.seconds),
                f"{100 * row.efficiency:.1f} %",
                f"{plain / row.seconds:.2f} ×",
                bytes_text(row.traffic),
                seconds_text(row.network),
                seconds_text(row.local) if row.local else "–",
            ]
            for row in self.rows
        ]


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in plain text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = []
    for cells in (headings, *rows):
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
