"""Show the progress of a training on stderr: a bar on a terminal, elsewhere a line for every point."""

from __future__ import annotations

import os
import signal
import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sparsync_lab.training.settings import Outcome, Point, Training


class TrainingProgress:
    """Show the points of a training as they come to rank 0; the other ranks show nothing.

    Args:
        dense_bytes: what a worker would send in a step without compression.
    """

    def __init__(self, rank: int, training: Training, dense_bytes: float) -> None:
        self.training, self.dense_bytes = training, dense_bytes
        console = Console(stderr=True)
        self.bar: Progress | None = None
        if console.is_terminal and rank == 0:
            text = TextColumn("{task.description}")
            columns = (BarColumn(bar_width=20), MofNCompleteColumn(), text, TimeRemainingColumn())
            self.bar = Progress(*columns, console=console, transient=True)

    def __enter__(self) -> TrainingProgress:
        if self.bar is not None:
            self.task = self.bar.add_task("starting", total=self.training.steps)
            signal.signal(signal.SIGINT, self._interrupted)
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def on_step(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def on_point(self, point: Point) -> None:
        sent = f"{bytes_text(point.bytes)} sent, {ratio_text(self.dense_bytes * point.step, point.bytes)}"
        text = f"loss {point.loss:.4f}, accuracy {point.accuracy:.1%}, {sent}"
        if self.bar is not None:
            self.bar.update(self.task, completed=point.step, description=text)
        else:
            print(f"step {point.step}/{self.training.steps}: {text}", file=sys.stderr, flush=True)

    def _interrupted(self, *_: Any) -> None:
        """Show the cursor again, which the bar hides, then end as if nobody had caught the signal."""
        assert self.bar is not None
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.bar.stop()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def show_cursor() -> None:
    """Show the cursor again, whichever way the process that hid it has ended."""
    Console(stderr=True).show_cursor()


def summary(outcome: Outcome) -> str:
    """Return the outcome of a training in two lines."""
    per_step = f"{bytes_text(outcome.bytes)} a step ({ratio_text(outcome.dense_bytes, outcome.bytes)})"
    return (
        f"{outcome.training.method} on {outcome.workers} worker(s): test accuracy {outcome.accuracy:.1%} after "
        f"{outcome.training.steps} steps\n"
        f"each sent {per_step}, {outcome.density:.2%} of all entries, {1e3 * outcome.step_s:.1f} ms a step"
    )


def bytes_text(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def ratio_text(dense: float, sent: float) -> str:
    return f"{dense / sent:.1f} x less than dense" if sent else "nothing to send to"
