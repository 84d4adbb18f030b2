"""Run the fault matrix and write how many cells came out as expected: ``python -m tests.matrix [--minutes N]``.

With ``--only TEXT`` (``-stop-``, say) those cells alone whose names have it, and nothing is written.

Cells in which the device decides are run where Triton's interpreter runs kernels (``TRITON_INTERPRET=1``), the others
where it does not: two runs fill the file. Cells come in an order that is drawn once, so that a run that ends early has
met some of everything. A cell that is not as expected is printed, and the exit code is 1; so it is where cells were
not run though nobody set a time.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import random
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory

from sparsync_lab.environment import environment
from sparsync_lab.report.table import write_csv
from tests.matrix.cells import Cell, all_cells
from tests.matrix.expected import outcome_of
from tests.matrix.run import run_before, start_pool

FILE = Path("results/fault-matrix.csv")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--minutes", type=float, default=None, help="after which no cell is begun; no limit")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time; each has processes of its own")
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument("--only", default="", help="a part of the names of cells to run, as they are printed")
    parser.add_argument("--seed", type=int, default=0, help="of the order of cells")
    asked = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch tells of every broken connection, at length
    deferred = os.environ.get("TRITON_INTERPRET") == "1"
    cells, began = [cell for cell in all_cells(deferred) if asked.only in str(cell)], time.monotonic()
    random.Random(asked.seed).shuffle(cells)
    took: dict[str, list[float]] = {}
    until = math.inf if asked.minutes is None else began + 60 * asked.minutes
    right, ran = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    with TemporaryDirectory() as shared, start_pool(asked.jobs) as pool:
        signal.signal(signal.SIGINT, partial(_end_at_once, Path(shared)))
        for cell, found in zip(cells, pool.map(partial(run_before, until, Path(shared)), cells), strict=True):
            if found is None:
                continue
            wrong, lasted = found
            took.setdefault(cell.fault, []).append(lasted)
            ran[cell.collective, cell.fault] += 1
            right[cell.collective, cell.fault] += not wrong
            if wrong:
                print(cell, *wrong, sep="\n    ", flush=True)
            if ran.total() % 250 == 0:
                print(f"{ran.total()} of {len(cells)} cells, {time.monotonic() - began:.0f} s", flush=True)
    seconds = time.monotonic() - began
    print(f"{right.total()} of {ran.total()} cells as expected, {ran.total() / seconds:.1f} a second")
    for fault, times in sorted(took.items()):
        print(f"{fault}: {len(times)} cells, {sum(times) / len(times):.2f} s each, {max(times):.1f} s at most")
    if not asked.only:
        write(asked.output, cells, deferred, ran, right, seconds)
    raise SystemExit(right != ran or not ran or (asked.minutes is None and ran.total() < len(cells)))


def _end_at_once(shared: Path, *_: object) -> None:
    """End on Ctrl-C: a pool would run what it has begun to its end. Those who run cells end with this process."""
    rmtree(shared, ignore_errors=True)
    os._exit(128 + signal.SIGINT)


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
