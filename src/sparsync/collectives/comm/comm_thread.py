"""The communication thread: exchanges run here, one after another, while backward goes on."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable

log = logging.getLogger("sparsync")

AT_EXIT = 1.5  # seconds that a process which ends gives to what is under way, and again to give that up

Jobs = queue.SimpleQueue[Callable[[], None] | None]
_running: weakref.WeakKeyDictionary[threading.Thread, Jobs] = weakref.WeakKeyDictionary()
_exiting = threading.Event()


class CommThread:
    """Runs jobs in the order they came: on a thread of its own, or at once where nothing would be waited for.

    Multi-round exchanges on Gloo must not run inside a future's callback: its few callback threads would wait for each
    other. One ordered thread cannot. It ends with this object, which it does not hold.

    Args:
        threaded: whether there is a thread.
        name: of the thread.
    """

    def __init__(self, threaded: bool, name: str = "sparsync") -> None:
        self._jobs: Jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=_run, args=(self._jobs,), name=name, daemon=True)
            self._thread.start()
            _running[self._thread] = self._jobs
            weakref.finalize(self, self._jobs.put, None).atexit = False  # that is _end_all's, who waits, too

    @property
    def threaded(self) -> bool:
        return self._thread is not None

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job``, which must not raise, after all earlier ones."""
        if self._thread is None:
            job()
        else:
            self._jobs.put(job)

    def drain(self) -> None:
        """Wait until all that was submitted is done."""
        if self._thread is not None:
            done = threading.Event()
            self._jobs.put(done.set)
            done.wait()

    def close(self) -> None:
        """Finish what was submitted, then end the thread."""
        if self._thread is not None:
            self.abandon()
            self._thread.join()
            self._thread = None

    def abandon(self) -> None:
        """End the thread when what was submitted is done, without waiting for that."""
        self._jobs.put(None)


def stop_at_exit() -> None:
    """End the thread that calls this, if the process is about to end: for waits that may be long."""
    if _exiting.is_set() and threading.current_thread() in _running:
        raise SystemExit


def _run(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:  # the thread must live: who waits for a later job would wait for ever
            log.exception("a job of the communication thread failed")
        del job  # which may hold all there is, this thread's owner included


@atexit.register
def _end_all() -> None:
    """End all threads before the interpreter does: one that returns from a call of torch while Python is finalized is
    unwound through C++, which aborts the process. The last step's may, as backward waits for its results alone."""
    threads = [thread for thread in list(_running) if thread.is_alive()]
    for given_up in (False, True):
        if given_up:
            _exiting.set()
        until = time.monotonic() + AT_EXIT
        for thread in reversed(threads):  # the later ones ask the store, whose thread came first
            _running[thread].put(None)
            thread.join(max(0.0, until - time.monotonic()))
