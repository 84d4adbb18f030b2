"""Comparisons of 'auto' over many sets of links: the rows of a CSV file, and in how many cells it is not slower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from sparsync.config.recipes import AUTO
from sparsync_lab.network.auto_comparison import BF16, SPARSE, ComparisonResult, SettledMethod, Times, compare_cell
from sparsync_lab.network.host_workers import host_workers
from sparsync_lab.network.namespace import check_requirements
from sparsync_lab.network.star import star
from sparsync_lab.network.steps import StepCell
from sparsync_lab.network.sweep import key_of
from sparsync_lab.training.methods import DENSE

METHODS = (BF16, DENSE, *SPARSE, AUTO)


@dataclass(frozen=True)
class AutoRow:
    """One method's figures in a cell."""

    result: ComparisonResult
    own: Times

    def to_csv(self) -> dict[str, Any]:
        """Return the row as columns, without machine and date."""
        low, median, high = (1e3 * np.percentile(self.own.seconds, [20, 50, 80])).tolist()
        columns = {
            **key_of(self.result.workers, self.result.cell, self.own.method),
            "compute": "waited for, not computed",
            "turns": len(self.own.seconds),
            "link_mbit": f"{self.result.link / 1e6:.0f}",
            "step_p20_ms": f"{low:.2f}",
            "step_p50_ms": f"{median:.2f}",
            "step_p80_ms": f"{high:.2f}",
        }
        outcome = {"rival": "", "ratio": "", "equal_runs": "", "holds": "", "decided": ""}
        if self.own.method.name == AUTO:
            outcome = {
                "rival": self.result.rival.method.name,
                "ratio": f"{self.result.ratio:.4f}",
                "equal_runs": f"{self.result.equal_runs:.4f}",
                "holds": "yes" if self.result.holds else "no",
                "decided": self.own.decided,
            }
        return {**columns, **outcome}


def rows_of(result: ComparisonResult) -> list[AutoRow]:
    """Return the rows of a cell."""
    return [AutoRow(result, own) for own in result.methods]


def methods_for(optimizer: str) -> list[SettledMethod]:
    """Return what is timed in every cell."""
    return [SettledMethod(name, optimizer=optimizer) for name in METHODS]


def compare_cells(cells: Sequence[tuple[int, StepCell]], optimizer: str) -> Iterator[ComparisonResult]:
    """Time cell after cell, each with its number of workers."""
    check_requirements()
    for count, own in groupby(cells, key=lambda pair: pair[0]):
        of_size = [cell for _, cell in own]
        with star(count, of_size[0].rate) as network, host_workers(network) as workers:
            for cell in of_size:
                yield compare_cell(workers, network, cell, optimizer)


def summarize(rows: Sequence[Mapping[str, str]]) -> str:
    """Return in how many cells 'auto' is not slower, and where it is; ``rows``: of a CSV file."""
    own = [row for row in rows if row["method"] == AUTO]
    held = [row for row in own if row["holds"] == "yes"]
    within = sum(float(row["ratio"]) <= 1.02 for row in own)
    lines = [
        f"auto: not slower than the better of dense bf16 and the best fixed sparse method in {len(held)} of {len(own)} "
        f"cells ({within} within 1.02 of it, {len(held) - within} within what two equal runs differ by)"
    ]
    for row in sorted((row for row in own if row["holds"] != "yes"), key=lambda row: -float(row["ratio"])):
        lines.append(
            f"  slower: {row['model']}, {row['workers']} workers, {row['rate_mbit']} Mbit/s: {row['ratio']} × "
            f"{row['rival']} (equal runs: {row['equal_runs']}); {row['decided']}"
        )
    return "\n".join(lines)
