"""The trainings of an item, shared by all processes that work on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from sparsync_lab.papers import store
from sparsync_lab.papers.item import Item, Result, RunContext
from sparsync_lab.papers.locks import try_lock, wait_for_lock
from sparsync_lab.papers.run import History, Run, file_of, read
from sparsync_lab.papers.trainings import MARGIN, train_run

POLL_SECONDS = 1.0  # seconds between looks at what others have done
LEAST_SECONDS = 20.0  # seconds that a training must have before it is put aside again, unless it takes less


class NoMatchingRun(ValueError):
    """No training has a word of ``--only`` in its name."""


class SomeRunsFailed(ValueError):
    """Trainings failed, and all others that could be made are made."""


def train_missing(context: RunContext, runs: Sequence[Run]) -> tuple[dict[str, History], list[str]]:
    """Train what is not trained yet; return the histories by label, and the names of the runs that are not done in
    time.

    What was done before is read from its file, what was begun is resumed.
    """
    asked = [run.made(context) for run in runs]
    check_only(context, asked)
    done: dict[str, History] = {}
    process_queue(context, lambda: asked, done)
    found = {run.label: done[run.name] for run in asked if run.name in done}
    return found, [run.name for run in asked if run.name not in done]


def process_queue(context: RunContext, asked: Callable[[], Iterable[Run]], done: dict[str, History]) -> None:
    """Train and read until everything is in ``done``, nothing more can be, or the time is over.

    A training that another process has locked is left to it; so is one that is large, while another such is made. While
    there are such and nothing else is to be done, this process waits, since their results may be what other trainings
    need. All that is stored has been looked at right before the end.

    A training that fails stops no other: the error is raised at the end, as ``SomeRunsFailed`` if anything is done.

    Args:
        asked: what is to be trained as far as that is known by now, the most important first.
        done: histories by the names of their runs; grows.
    """
    announced: set[str] = set()
    failed: dict[str, Exception] = {}
    pace = 1.0  # seconds of the last training here, all its parts, over those that were foretold
    while True:
        known, elsewhere, trained = len(done), set(), False
        for run in asked():
            if run.name in done:
                continue
            try:
                history = stored_history(context, run)
            except ValueError as error:  # damaged: it may be all there is of it, and is not made anew
                _note_failure(context, failed, run, error)
                continue
            if history is None and run.name not in failed and matches_only(context, run) and context.in_time():
                alone = try_lock(context.scratch / "large.lock") if run.large else nullcontext(True)
                with alone as free, try_lock(context.scratch / f"{run.name}.lock") as locked:
                    if not (free and locked):
                        elsewhere.add(run.name)
                        continue
                    history = stored_history(context, run)  # by whoever held the lock when we looked first
                    if history is None and context.in_time(MARGIN + _seconds_wanted(context, run, pace)):
                        trained, begun = True, time.monotonic()
                        try:
                            history = train_run(run, context)
                        except (ValueError, OSError, RuntimeError) as error:
                            _note_failure(context, failed, run, error)
                        if history is not None and run.seconds:
                            pace = max(time.monotonic() - begun, history.seconds) / run.seconds
            if history is not None:
                done[run.name] = history
                failed.pop(run.name, None)  # another process could do it
            if trained:
                break  # others have not been idle: what is most important may be another by now
        if trained or len(done) > known:
            continue
        if not elsewhere or not context.in_time():
            break
        if not elsewhere <= announced:
            context.log(f"waiting for other processes: {', '.join(sorted(elsewhere))}")
            announced |= elsewhere
        time.sleep(POLL_SECONDS)
    if context.is_read_only:
        return
    if failed and done:
        raise SomeRunsFailed(f"{len(failed)} trainings failed, see above: {', '.join(failed)}")
    if failed:
        raise next(iter(failed.values()))


def _seconds_wanted(context: RunContext, run: Run, pace: float) -> float:
    """Return how much time there must be for a training to be begun: all that it takes, where it must be done then."""
    if context.whole and run.seconds:
        return run.seconds * pace
    return min(LEAST_SECONDS, run.seconds or LEAST_SECONDS)


def write_result(context: RunContext, item: Item) -> tuple[Path, Result]:
    """Write an item's files: from the trainings that are stored, or, where there are none, now.

    One process at a time does it, and reads what is stored when its turn has come: whoever is the last has seen all.
    """
    started = time.monotonic()
    if not item.trains:
        result = item.run(context)
        return store.save(context, item, result, time.monotonic() - started), result
    with wait_for_lock(context.scratch / f"{store.place(context, item).stem}.lock"):
        result = item.run(context.read_only())
        return store.save(context, item, result, result.seconds), result


def redraw_result(context: RunContext, item: Item) -> tuple[Path, Result]:
    """Write an item's files anew from what is stored: trainings, or what was measured."""
    if item.redraw is None:
        return write_result(context, item)
    stored = store.load(store.place(context, item))
    result = replace(item.redraw(stored.result.rows), where=stored.where)
    return store.save(context, item, result, stored.seconds), result


def matches_only(context: RunContext, run: Run) -> bool:
    """Return whether ``--only`` lets a run be trained."""
    return not context.only or any(word in f"{run.name} {run.label}" for word in context.only)


def check_only(context: RunContext, possible: Iterable[Run]) -> None:
    """Raise if no training matches ``--only``; its words may be misspelt.

    Args:
        possible: all trainings that there may be, of which one must fit.
    """
    if not context.only or not context.in_time():
        return
    names = [f"{run.name} {run.label}" for run in possible]
    lost = [word for word in context.only if not any(word in name for name in names)]
    if not lost or not names:
        return
    said = f"no training has {' or '.join(map(repr, lost))} in its name; one of them is {names[0].partition(' ')[0]}"
    if len(lost) == len(context.only):
        raise NoMatchingRun(said)
    context.log(said)


def _note_failure(context: RunContext, failed: dict[str, Exception], run: Run, error: Exception) -> None:
    if str(error) not in map(str, failed.values()):
        context.log(f"{run.name}: {error}")
    failed[run.name] = error


def stored_history(context: RunContext, run: Run) -> History | None:
    """Return the history of a run, if it is stored and is to be used."""
    path = file_of(context, run)
    there = context.uses(path) if matches_only(context, run) else path.is_file()
    return read(path, run) if there else None
