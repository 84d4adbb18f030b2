"""Run the fault matrix and write how many cells came out as expected: ``python -m tests.matrix [--minutes N]``.

Cells in which the device decides are run where Triton's interpreter runs kernels (``TRITON_INTERPRET=1``), the others
where it does not: two runs fill the file. Cells come in an order that is drawn once, so that a run that ends early has
met some of everything. A cell that is not as expected is printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import random
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from sparsync_lab.environment import environment
from sparsync_lab.report.table import write_csv
from tests.matrix.cells import Cell, all_cells
from tests.matrix.expected import outcome_of
from tests.matrix.run import run_before

FILE = Path("results/fault-matrix.csv")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no cell is begun")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time; each has processes of its own")
    parser.add_argument("--output", type=Path, default=FILE)
    asked = parser.parse_args()
    deferred = os.environ.get("TRITON_INTERPRET") == "1"
    cells, began = all_cells(deferred), time.monotonic()
    random.Random(0).shuffle(cells)
    until, right, ran = began + 60 * asked.minutes, Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    with ProcessPoolExecutor(asked.jobs, multiprocessing.get_context("spawn")) as pool:
        for cell, wrong in zip(cells, pool.map(partial(run_before, until), cells), strict=True):
            if wrong is not None:
                ran[cell.collective, cell.fault] += 1
                right[cell.collective, cell.fault] += not wrong
            if wrong:
                print(cell, *wrong, sep="\n    ", flush=True)
    seconds = time.monotonic() - began
    print(f"{sum(right.values())} of {sum(ran.values())} cells as expected, {sum(ran.values()) / seconds:.1f} a second")
    write(asked.output, cells, deferred, ran, right, seconds)
    raise SystemExit(right != ran or not ran)


def write(
    path: Path,
    cells: list[Cell],
    deferred: bool,
    ran: Counter[tuple[str, str]],
    right: Counter[tuple[str, str]],
    s: float,
) -> None:
    """Write a line for every collective and fault; those of the other completion stay as they are."""
    completion, where = "deferred" if deferred else "immediate", environment()
    lines: list[dict[str, object]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            lines += [line for line in csv.DictReader(file) if line["completion"] != completion]
    for collective, fault in dict.fromkeys((cell.collective, cell.fault) for cell in sorted(cells, key=str)):
        own = [cell for cell in cells if (cell.collective, cell.fault) == (collective, fault)]
        unnoticed = sum(outcome_of(cell) == "unnoticed" for cell in own)
        counts = {"cells": len(own), "ran": ran[collective, fault], "as_expected": right[collective, fault]}
        line = {"completion": completion, "collective": collective, "fault": fault, **counts, "unnoticed": unnoticed}
        lines.append({**line, "run_seconds": round(s), **where})
    write_csv(path, lines)


if __name__ == "__main__":
    main()
