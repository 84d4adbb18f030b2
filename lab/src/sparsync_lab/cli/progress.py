"""A progress bar over steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(console: Console, title: str | Callable[[float], str], total: int) -> Iterator[Callable[[int], None]]:
    """Show how many of ``total`` are done; yield a function to be called with the number of new ones.

    ``title`` may change with the number done.
    """
    named = title if callable(title) else lambda _: title
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(named(0), total=total)

        def advance(new: int) -> None:
            progress.advance(task, new)
            progress.update(task, description=named(progress.tasks[0].completed))

        yield advance
