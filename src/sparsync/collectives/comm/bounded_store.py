"""A store whose calls end in time, whatever became of the process that hosts it.

Most calls of a ``TCPStore`` take no time limit: they wait for ever where its host is frozen, and so is not gone. So all
of them are made on a thread of their own, and whoever asks waits for that thread as long as he can afford to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from sparsync.collectives.comm.comm_thread import CommThread

T = TypeVar("T")
SLACK = 1.0  # seconds that an answer may take beside what was waited for
OFTEN = 0.05  # seconds between two looks for keys
MANY = 64  # keys from which on they are looked for less often


class StoreSilent(Exception):
    """The store has not answered in time; its host may be frozen, or the way there."""


class BoundedStore:
    """A store, asked with a time limit.

    While an answer is overdue nothing more is asked, so that whoever has learned that the store is silent waits for it
    no second time; once it has come, all is as before.

    Args:
        store: shared by all ranks.
        threaded: whether it may be silent; that of a single rank never is.
    """

    def __init__(self, store: Store, threaded: bool = True) -> None:
        self._store, self._threaded = store, threaded
        self._thread: CommThread | None = None
        self._overdue: Future[object] | None = None
        self._given_up: Future[object] | None = None  # an overdue answer that was waited for in vain

    @property
    def silent(self) -> bool:
        """Whether an answer is overdue."""
        return self._overdue is not None and not self._overdue.done()

    def recovers(self, seconds: float) -> bool:
        """Return whether no answer is overdue, or the one that is comes within ``seconds``: a busy host is late, and
        not frozen. Nobody waits for the same answer twice."""
        if self._overdue is not None and self._overdue is not self._given_up:
            wait([self._overdue], seconds)
            self._given_up = self._overdue
        return not self.silent

    def ask(self, question: Callable[[Store], T], seconds: float, insist: bool = False) -> T:
        """Return the answer to ``question``; raises ``StoreSilent`` if there is none within ``seconds``.

        Args:
            insist: it is asked however late, if only to tell the store something.
        """
        if self.silent:
            if insist:
                last, self._overdue = self._overdue, self.submit(question)  # type: ignore[assignment]
                self._given_up = self._overdue if self._given_up is last else self._given_up
            raise StoreSilent
        answer = self.submit(question)
        try:
            return answer.result(seconds)
        except TimeoutError:
            if insist or not answer.cancel():
                self._overdue = answer  # type: ignore[assignment]
            raise StoreSilent from None

    def submit(self, question: Callable[[Store], T]) -> Future[T]:
        """Ask without waiting for the answer."""
        if self._thread is None:
            self._thread = CommThread(self._threaded, name="sparsync store")
        answer: Future[T] = Future()

        def run() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question(self._store))
                except Exception as error:
                    answer.set_exception(error)

        self._thread.submit(run)
        return answer

    def appear(self, keys: Sequence[str], seconds: float) -> bool:
        """Return whether all ``keys`` are in the store within ``seconds``, which a silent store is given, too."""

        def look(store: Store) -> bool:
            # Not by the store's own wait: torch warns whenever one runs out, and looks up names of hosts for that,
            # which takes seconds where nobody knows them.
            end, pause, longest = time.monotonic() + seconds, 0.001, OFTEN * max(1.0, len(keys) / MANY)
            while not store.check(list(keys)):
                if time.monotonic() + pause > end:
                    return False
                time.sleep(pause)
                pause = min(2 * pause, longest)
            return True

        until = time.monotonic() + seconds + SLACK
        try:
            return self.ask(look, seconds + SLACK)
        except StoreSilent:
            if self._overdue is not None:
                wait([self._overdue], max(0.0, until - time.monotonic()))
            return False

    def enter(self, prefix: str) -> None:
        """Let every key begin with ``prefix`` from now on."""
        self._store = PrefixStore(prefix, self._store)

    def close(self) -> None:
        """End the thread, once the store has answered."""
        if self._thread is not None:
            self._thread.abandon()
            self._thread = None
