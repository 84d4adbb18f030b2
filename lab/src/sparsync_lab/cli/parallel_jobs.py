"""Run a command several times side by side: start its other processes, repeat what they print, end them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from types import TracebackType

import typer

from sparsync_lab.training.local_workers import WorkerFailed

COMMAND = (sys.executable, "-m", "sparsync_lab")
LAST = 12  # lines of a failed process that are shown again


def command_arguments(ctx: typer.Context, without: Collection[str]) -> list[str]:
    """Return the arguments that the command was given, defaults included, as another process of it takes them."""
    named: list[str] = []
    placed: list[str] = []
    for parameter in ctx.command.params:
        value = ctx.params[str(parameter.name)]
        if parameter.name in without or value is None:
            continue
        if parameter.param_type_name == "argument":
            placed.append(str(value))
        elif isinstance(value, bool):
            named += (parameter.opts if value else parameter.secondary_opts)[:1]
        else:
            several = value if isinstance(value, list | tuple) else [value]
            named += [f"{parameter.opts[0]}={one}" for one in several]
    return [*named, *placed]


class ParallelJobs:
    """Processes of the same command beside this one; at the end of a ``with`` block none of them is left.

    What they print appears here, each line with the process's number: this one is the first.

    Args:
        arguments: of the command line, for each of them. Their standard input ends when this process does, however
            that happens: see ``exit_when_stdin_closes``.
        count: how many.
        threads: of each, for PyTorch.
    """

    def __init__(self, arguments: Sequence[str], count: int, threads: int) -> None:
        self._arguments, self._count, self._threads = arguments, count, threads
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._last: list[deque[str]] = []

    def __enter__(self) -> ParallelJobs:
        try:
            for number in range(2, self._count + 2):
                self._start(number)
        except BaseException:  # an interrupt, too: those that have been started must not be left behind
            self._stop()
            raise
        return self

    def _start(self, number: int) -> None:
        # A process group of its own: Ctrl-C is for us alone, who then end it.
        process = subprocess.Popen(
            [*COMMAND, *self._arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", process_group=0, env={**os.environ, "OMP_NUM_THREADS": str(self._threads)},
        )  # fmt: skip
        self._processes.append(process)
        self._last.append(deque(maxlen=LAST))
        reader = threading.Thread(target=_repeat, args=(process, number, self._last[-1]), daemon=True)
        reader.start()
        self._readers.append(reader)

    def wait(self) -> None:
        """Wait until all have ended by themselves."""
        for process, reader in zip(self._processes, self._readers, strict=True):
            process.wait()
            reader.join()

    def check(self) -> None:
        """Raise ``WorkerFailed`` with the last lines of one that failed."""
        for number, (process, last) in enumerate(zip(self._processes, self._last, strict=True), 2):
            if process.returncode != 0:
                lines = "".join(f"\n  {line}" for line in last)
                raise WorkerFailed(f"process {number} ended with code {process.returncode}; its last lines:{lines}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        """End all of them, and wait until they have ended."""
        for process in self._processes:
            process.terminate()  # does nothing to one that has ended
        for process in self._processes:
            process.wait()
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
        for reader in self._readers:
            reader.join()


def _repeat(process: subprocess.Popen[str], number: int, last: deque[str]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            last.append(line.strip())
            # In one piece, so that lines of several processes do not mix.
            print(f"  [{number}] {line.strip()}\n", end="", flush=True)


def exit_when_stdin_closes() -> None:
    """End this process when its standard input ends: then the one that started it is gone."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="end with starter", daemon=True).start()
