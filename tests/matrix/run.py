"""Runs cells on real processes, which stay for the next cell unless one of them was killed or hangs."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from sparsync_lab.training.worker_process import exit_with_parent
from tests.matrix.cells import Cell
from tests.matrix.expected import complaints
from tests.matrix.training import case_end, case_struck, case_undisturbed
from tests.world import World

LIMIT = 60.0  # seconds, for a rank that hangs


class Matrix:
    """Worlds by their size, and what undisturbed trainings come to.

    Args:
        shared: a folder in which several of these leave that for each other.
    """

    def __init__(self, shared: Path | None = None) -> None:
        self._worlds: dict[int, World] = {}
        self._shared = shared
        self._undisturbed: dict[str, list[Any]] = {}

    def run(self, cell: Cell) -> list[str]:
        """Run a cell and return what was wrong."""
        undisturbed = self._train_undisturbed(cell)
        world, thaw = self._world(cell.size), cell.rank if cell.fault == "stop" else None
        outcomes = world.outcome(case_struck, timeout=LIMIT, thaw=thaw, cell=cell)
        if not all(ok for ok, _ in outcomes) or not all(ok for ok, _ in world.outcome(case_end, timeout=LIMIT)):
            self._worlds.pop(cell.size).workers.kill()
        return complaints(cell, outcomes, undisturbed)

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()

    def _train_undisturbed(self, cell: Cell) -> list[Any]:
        known = f"{cell.collective}-{cell.size}-{cell.scaled}-{cell.deferred}"
        file = self._shared / known if self._shared else None
        if known not in self._undisturbed and file and file.exists():
            self._undisturbed[known] = pickle.loads(file.read_bytes())
        if known not in self._undisturbed:
            self._undisturbed[known] = self._world(cell.size).run(case_undisturbed, cell=cell)
            if file:
                own = file.with_suffix(f".{os.getpid()}")
                own.write_bytes(pickle.dumps(self._undisturbed[known]))
                own.rename(file)  # whole, whoever reads it
        return self._undisturbed[known]

    def _world(self, size: int) -> World:
        if size not in self._worlds:
            self._worlds[size] = World(size)
        return self._worlds[size]


def start_pool(jobs: int) -> ProcessPoolExecutor:
    """Start processes that run cells; however this one ends, they end with it, and their worlds with them."""
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=exit_with_parent)


@cache
def own_matrix(shared: Path) -> Matrix:
    """Return this process's worlds, which end with it."""
    matrix = Matrix(shared)
    Finalize(None, matrix.close, exitpriority=100)
    return matrix


def run_before(until: float, shared: Path, cell: Cell) -> tuple[list[str], float] | None:
    """Run a cell and return what was wrong, and its seconds; nothing is done after ``until``."""
    began = time.monotonic()
    return (own_matrix(shared).run(cell), time.monotonic() - began) if began < until else None
