"""The communication thread: exchanges run here, one after another, while backward goes on."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger("sparsync")


class CommThread:
    """Runs jobs in the order they came: on a thread of its own, or at once where nothing would be waited for.

    Multi-round exchanges on Gloo must not run inside a future's callback: its few callback threads would wait for each
    other. One ordered thread cannot.

    Args:
        threaded: whether there is a thread.
        name: of the thread.
    """

    def __init__(self, threaded: bool, name: str = "sparsync") -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

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

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # the thread must live: who waits for a later job would wait for ever
                log.exception("a job of the communication thread failed")
