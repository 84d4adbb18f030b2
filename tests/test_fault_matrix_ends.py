"""``python -m tests.matrix`` leaves no processes behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import wait
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from tests.matrix.run import start_pool
from tests.world import fork_server, processes_of

ROOT = Path(__file__).parents[1]
LIMIT = 60.0  # seconds; a machine may be busy


def run_cells(pipe: Connection) -> None:
    """Tell who runs cells for this process, and wait."""
    with start_pool(1) as pool:
        pipe.send(pool.submit(os.getpid).result())
        wait([pool.submit(time.sleep, 2 * LIMIT)])


def test_who_runs_cells_ends_with_whoever_asked_for_them() -> None:
    ours, theirs = fork_server().Pipe()
    asks = fork_server().Process(target=run_cells, args=(theirs,))
    asks.start()
    assert ours.poll(LIMIT)
    runs = psutil.Process(ours.recv())
    try:
        assert runs.is_running()
        asks.kill()
        runs.wait(LIMIT / 2)
    finally:
        asks.kill()
        if runs.is_running():
            runs.kill()
    asks.join()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_of_the_command(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tests.matrix", "--only=-delay-", "--jobs=2"]
    started = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    until = time.monotonic() + LIMIT
    while len(processes_of(started.pid)) < 8:  # those that run cells have worlds
        assert time.monotonic() < until
        time.sleep(0.1)
    (os.killpg if number == signal.SIGINT else os.kill)(started.pid, number)  # Ctrl-C is for all in the foreground
    until = time.monotonic() + LIMIT
    while left := processes_of(started.pid):
        assert time.monotonic() < until, left
        time.sleep(0.1)
    started.wait()
