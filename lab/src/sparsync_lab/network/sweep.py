"""Many sets of links, cell by cell: the rows of a CSV file, which a run that was broken off goes on with."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sparsync_lab.environment import environment
from sparsync_lab.network.host_workers import host_workers
from sparsync_lab.network.methods import HOOKS, NetworkMethod
from sparsync_lab.network.namespace import check_requirements
from sparsync_lab.network.star import star
from sparsync_lab.network.steps import CellResult, MethodSteps, StepCell, measure_cell
from sparsync_lab.training.methods import DENSE

TOLERANCE = 0.05  # by which what interfaces count may differ from what the library says
KEY = ("workers", "rate_mbit", "model", "compute_ms", "method", "density", "optimizer")  # what makes a row that row


MACHINE = ("device", "cpus")  # rows of other machines stay beside


class CsvRow(Protocol):
    """One method's figures in a cell, of any sweep."""

    def to_csv(self) -> dict[str, Any]:
        """Return the row as columns, those of ``KEY`` among them, without machine and date."""
        ...


@dataclass(frozen=True)
class SweepRow:
    """One method's figures in a cell.

    Args:
        step_ms: 20th percentile, median and 80th percentile of a step, of its slowest rank.
        parts_ms: medians of compressing, exchanging and decoding.
        ratio: the median over that of the dense method beside it; ``None`` if there was none.
        payload, traffic: bytes a worker and step: what interfaces sent, without headers, and what the library says.
        resent: packets that TCP sent again, in all steps.
        decided: the way that 'auto' has settled on.
    """

    result: CellResult
    method: NetworkMethod
    rounds: int
    step_ms: tuple[float, float, float]
    parts_ms: tuple[float, float, float]
    ratio: float | None
    payload: float
    traffic: float
    resent: int
    decided: str = ""

    @property
    def counted(self) -> float:
        """What interfaces sent over what the library says; where that is nothing, 1."""
        return self.payload / self.traffic if self.traffic else 1.0

    @property
    def agrees(self) -> bool:
        return abs(self.counted - 1) <= TOLERANCE

    def to_csv(self) -> dict[str, Any]:
        """Return the row as columns, without machine and date."""
        cell = self.result.cell
        low, median, high = self.step_ms
        compress, exchange, decode = self.parts_ms
        return {
            **key_of(self.result.workers, cell, self.method),
            "compute": "waited for, not computed",
            "rounds": self.rounds,
            "link_mbit": f"{self.result.link / 1e6:.0f}",
            "step_p20_ms": f"{low:.2f}",
            "step_p50_ms": f"{median:.2f}",
            "step_p80_ms": f"{high:.2f}",
            "ratio_to_dense": "" if self.ratio is None else f"{self.ratio:.4f}",
            "compress_ms": f"{compress:.2f}",
            "exchange_ms": f"{exchange:.2f}",
            "decode_ms": f"{decode:.2f}",
            "interface_bytes": f"{self.payload:.0f}",
            "traffic_bytes": f"{self.traffic:.0f}",
            "interface_over_traffic": f"{self.counted:.4f}",
            "resent_packets": self.resent,
            "decided": self.decided,
        }


def key_of(workers: int, cell: StepCell, method: NetworkMethod) -> dict[str, str]:
    """Return the columns that tell rows apart, as text."""
    dense = method.name in HOOKS
    own = method.own_density
    values = (
        workers,
        f"{cell.rate.mbit:g}",
        cell.model,
        f"{1e3 * cell.compute:g}",
        method.name,
        "" if own is None else f"{own:.6g}",
        "" if dense else method.optimizer,
    )
    return dict(zip(KEY, map(str, values), strict=True))


def rows_of(result: CellResult) -> list[SweepRow]:
    """Return the figures of every method of a cell."""
    plain = [statistics.median(_times(own)) for own in result.methods if own.method.name == DENSE]
    rows = []
    for own in result.methods:
        low, median, high = np.percentile(_times(own), [20, 50, 80]).tolist()
        compress, exchange, decode = (1e3 * np.median([step.parts for step in own.steps], axis=0)).tolist()
        rows.append(
            SweepRow(
                result,
                own.method,
                len(own.steps),
                (low, median, high),
                (compress, exchange, decode),
                median / plain[0] if plain else None,
                statistics.fmean(step.payload for step in own.steps),
                statistics.fmean(step.traffic for step in own.steps),
                sum(step.resent for step in own.steps),
                own.decided,
            )
        )
    return rows


def _times(own: MethodSteps) -> list[float]:
    return [1e3 * step.seconds for step in own.steps]


class SweepFile:
    """A CSV file of rows, each under its key and machine: a new one takes the place of the old."""

    def __init__(self, path: Path, resume: bool) -> None:
        self.path, here = path, environment()
        self._here = tuple(here[name] for name in MACHINE)
        self._rows: dict[tuple[str, ...], Mapping[str, Any]] = {}
        if resume and path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    if not {*KEY, *MACHINE} <= set(row):
                        raise ValueError(f"{path} holds no rows of the network lab: give another file with --out")
                    self._rows[tuple(row[name] for name in (*KEY, *MACHINE))] = row

    def __contains__(self, key: Mapping[str, str]) -> bool:
        return (*key.values(), *self._here) in self._rows

    def median(self, key: Mapping[str, str]) -> float:
        """Return the median seconds of a step of the row with this key."""
        return float(self._rows[*key.values(), *self._here]["step_p50_ms"]) / 1e3

    def decided(self, key: Mapping[str, str]) -> str:
        """Return the way that 'auto' has settled on in the row with this key."""
        return str(self._rows[*key.values(), *self._here]["decided"])

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        """Return all rows."""
        return list(self._rows.values())

    def put(self, rows: Sequence[CsvRow]) -> None:
        """Add rows and write the file, as a whole: a run that ends now loses nothing."""
        where = environment()
        for row in rows:
            columns = {**row.to_csv(), **where}
            self._rows[tuple(columns[name] for name in (*KEY, *MACHINE))] = columns
        names = list(dict.fromkeys(name for columns in self._rows.values() for name in columns))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        from sparsync_lab.papers.store import replacing  # which brings all items

        with replacing(self.path) as part, part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self._rows.values())


def missing_cells(
    cells: Sequence[tuple[int, StepCell]], methods: Sequence[NetworkMethod], file: SweepFile
) -> list[tuple[int, StepCell]]:
    """Return the cells, each with its number of workers, of which the file does not hold every method."""
    return [
        (workers, cell)
        for workers, cell in cells
        if not all(key_of(workers, cell, method) in file for method in methods)
    ]


def run_cells(
    cells: Sequence[tuple[int, StepCell]], methods: Sequence[NetworkMethod], progress: Callable[[int], None]
) -> Iterator[CellResult]:
    """Measure cell after cell; those that follow each other with as many workers share hosts and processes."""
    if len(set(methods)) < len(methods):
        raise ValueError("a method was given twice")
    check_requirements()
    for count, own in groupby(cells, key=lambda pair: pair[0]):
        of_size = [cell for _, cell in own]
        with star(count, of_size[0].rate) as network, host_workers(network) as workers:
            for cell in of_size:
                yield measure_cell(workers, network, cell, methods, progress)
