"""What ranks tell each other outside of exchanges, through the group's store: never needed while all goes well.

Ranks that wait longer than a second write down what they wait for and look for an alarm. Whoever runs into an error or
the deadline raises the alarm, with the ranks that wrote nothing: so all survivors stop with the same sentence. No wait
needs the store to end: where it is silent, because its host is frozen, everybody stops alone, at the same deadline.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import zip_longest
from typing import NoReturn, TypeVar

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from sparsync import errors
from sparsync.collectives.comm.bounded_store import BoundedStore, StoreSilent
from sparsync.collectives.comm.comm_thread import stop_at_exit
from sparsync.errors import Mismatch, PeerLost, SparsyncError, name_ranks

T = TypeVar("T")
PATIENCE = 1.0  # seconds, or an eighth of the deadline, of waiting after which a rank writes down what it waits for
GRACE = 3.0  # seconds, or a quarter of the deadline, that whoever raises the alarm leaves the others to do so
GONE = "the store is gone, and with it rank 0 or the launcher"
SILENT = "the store does not answer: rank 0, or the launcher, may be frozen"
UNREAD = f"an error was broadcast, and cannot be read any more: {GONE}, or does not answer"


class StoreMonitor:
    """The store of a process group.

    Attributes:
        alarmed: an error was broadcast, or could not be: the ranks may have stopped at different places.
        lost: ranks that were not heard from, as whoever was first to raise the alarm says.

    Args:
        store: shared by all ranks.
        deadline: seconds anything may be waited for.
    """

    def __init__(self, store: Store, rank: int, size: int, deadline: float) -> None:
        self.rank, self.size, self.deadline = rank, size, deadline
        self.store = BoundedStore(store, threaded=size > 1)
        self.patience, self.grace = min(PATIENCE, deadline / 8), min(GRACE, deadline / 4)
        self._agreements = self._beats = 0
        self._cause: str | None = None  # why this rank failed
        self.alarmed = False
        self.lost: frozenset[int] = frozenset()

    def wait(self, done: Callable[[float], bool], place: str, began: float | None = None) -> None:
        """Wait until ``done(seconds)``, which itself waits that long at most, says so; raise before the deadline.

        Args:
            place: names what is waited for, and is the same on every rank that is at the same point.
            began: the time from which the deadline counts; now.
        """
        until = (time.monotonic() if began is None else began) + self.deadline - self.grace
        try:
            while not done(self.patience):
                stop_at_exit()
                if time.monotonic() > until:
                    self.fail(f"no answer within {self.deadline:g} s", place)
                with suppress(StoreSilent):  # the ranks may answer all the same
                    self._heartbeat(place)
        except DistError as error:
            self.alarmed = True
            raise PeerLost(f"{place}: {GONE}") from error

    def ask(self, question: Callable[[Store], T], place: str, began: float | None = None) -> T:
        """Return the store's answer; raise if there is none before the deadline, which counts from ``began`` or now."""
        left = self.deadline if began is None else max(self.grace, began + self.deadline - time.monotonic())
        try:
            return self.store.ask(question, left)
        except StoreSilent:
            raise self.broadcast_error(PeerLost(f"{place}: {SILENT}")) from None
        except DistError as error:
            self.alarmed = True
            raise PeerLost(f"{place}: {GONE}") from error

    def assert_consistent(self, what: str, text: str, place: str) -> None:
        """Raise on every rank, with the same sentence, if ``text`` is not the same on all."""
        self._agreements += 1
        turn, began = f"agree/{self._agreements}", time.monotonic()
        said = self._share(turn, hashlib.sha256(text.encode()).hexdigest(), f"{place}, to compare the {what}", began)
        odd = [rank for rank in range(self.size) if said[rank] != said[0]]
        if odd:
            texts = self._share(f"{turn}/text", text, place, began)
            difference = _difference(texts[0], texts[odd[0]], odd[0])
            raise Mismatch(f"the {what} differs on {name_ranks(odd)}: {difference}")
        if self._agreements > 1:  # all have read what came before
            key = f"agree/{self._agreements - 1}/{self.rank}"
            self.store.submit(lambda store: store.delete_key(key))

    def share(self, text: str, place: str) -> list[str]:
        """Return every rank's ``text``."""
        self._agreements += 1
        return self._share(f"share/{self._agreements}", text, place, time.monotonic())

    def tell(self, cause: str) -> None:
        """Leave word why this rank fails; its next message only carries a flag. The first word stays."""
        self._cause = self._cause or cause
        with suppress(StoreSilent, DistError):
            self.store.ask(lambda store: store.compare_set(f"cause/{self.rank}", "", cause), self.grace, insist=True)

    def cause(self, rank: int) -> str:
        """Return why that rank failed, as far as the store says so within half of the deadline; raise if it, or anybody
        else, has raised an alarm instead."""
        if rank == self.rank and self._cause is not None:
            return self._cause
        key, until, why = f"cause/{rank}", time.monotonic() + self.deadline / 2, "has not said why"
        try:
            while time.monotonic() < until:
                if self.store.appear([key], self.patience):
                    return bytes(self.store.ask(lambda store: store.get(key), self.patience)).decode()
                with suppress(StoreSilent):
                    self._heartbeat(f"the cause of rank {rank}")
            why = SILENT if self.store.silent else why
        except StoreSilent:
            why = SILENT
        except DistError:
            why = GONE
        return f"rank {rank} failed, and {why}"

    def broadcast_error(self, error: SparsyncError, lost: Iterable[int] = ()) -> SparsyncError:
        """Tell every rank that waits to stop with this error; returns it, or that of whoever was first.

        Args:
            lost: ranks that were not heard from.
        """
        self.alarmed = True
        alarm = f"{type(error).__name__}\n{' '.join(map(str, lost))}\n{error}"
        try:
            first = self.store.ask(lambda store: store.compare_set("alarm", "", alarm), self.grace, insist=True)
        except (StoreSilent, DistError):  # nobody is there to tell
            return error
        kind, ranks, text = bytes(first).decode().split("\n", 2)
        self.lost = frozenset(map(int, ranks.split()))
        return getattr(errors, kind, SparsyncError)(text)  # type: ignore[no-any-return]

    def leave_vote(self, vote: int) -> None:
        """Let whoever stops after an alarm know this rank's ``vote``."""
        self.store.submit(lambda store: store.set(f"vote/{self.rank}", str(vote)))

    def collect_votes(self) -> dict[int, int]:
        """Return the votes of all ranks that stop within a while.

        Raises ``StoreSilent``, or what the store raises, where nothing can be learned.
        """
        names = [f"vote/{rank}" for rank in range(self.size)]
        expected = [name for rank, name in enumerate(names) if rank not in self.lost]
        if not self.store.recovers(self.grace):
            raise StoreSilent
        until = time.monotonic() + 2 * self.grace
        while time.monotonic() < until and not self.store.appear(expected, self.patience):
            pass
        return {rank: int(said) for rank, said in enumerate(self._read(names)) if said}

    def first_to_say(self, name: str, text: str, place: str) -> str:
        """Return the ``text`` of the rank that was first to say one under this ``name``."""
        if self.size == 1:
            return text
        return bytes(self.ask(lambda store: store.compare_set(name, "", text), place)).decode()

    def fail(self, cause: str, place: str) -> NoReturn:
        """Find out who is missing, tell everybody, raise."""
        try:
            elsewhere, lost = self._find_lost(place)
        except StoreSilent:
            raise self.broadcast_error(PeerLost(f"{place}: {cause}; {SILENT}")) from None
        except DistError as error:
            self.alarmed = True
            raise PeerLost(f"{place}: {cause}; {GONE}") from error
        if elsewhere and not lost:  # all wait, but not for the same thing
            listing = "; ".join(
                f"rank {rank} waits at {where}" for rank, where in (elsewhere | {self.rank: place}).items()
            )
            raise self.broadcast_error(Mismatch(f"where the ranks wait differs: {listing}"))
        ranks = ", ".join(map(str, lost)) or "none"
        raise self.broadcast_error(PeerLost(f"{place}: {cause}; ranks not heard from: {ranks}"), lost)

    def close(self) -> None:
        """Ask the store nothing more."""
        self.store.close()

    def _share(self, turn: str, text: str, place: str, began: float) -> list[str]:
        """Return every rank's ``text``."""
        names = [f"{turn}/{rank}" for rank in range(self.size)]
        self.store.submit(lambda store: store.set(names[self.rank], text))
        self.wait(lambda seconds: self.store.appear(names, seconds), place, began)
        return self.ask(lambda store: [bytes(store.get(name)).decode() for name in names], place, began)

    def _heartbeat(self, place: str, seconds: float | None = None) -> None:
        """Write down what we wait for, and stop if an alarm was raised; ``seconds``: that the store may take."""
        self._beats += 1
        here = f"{self._beats}\n{place}"

        def look(store: Store) -> bool:
            store.set(f"here/{self.rank}", here)
            return bool(store.check(["alarm"]))

        if self.store.ask(look, seconds or self.patience):
            raise self.broadcast_error(PeerLost(f"{place}: {UNREAD}"))  # which is not the first

    def _find_lost(self, place: str) -> tuple[dict[int, str], list[int]]:
        """Return the ranks that do not wait at ``place``, with where they last waited, and those of them that do not
        wait at all: within a while they have not written anything new."""
        self.store.recovers(self.grace)  # or the next question raises StoreSilent at once
        self._heartbeat(place, self.grace)
        first, until, alive = self._whereabouts(), time.monotonic() + self.grace, set[int]()
        while True:
            now = self._whereabouts()
            elsewhere = {rank: where.partition("\n")[2] for rank, where in now.items()}
            elsewhere = {rank: where for rank, where in elsewhere.items() if where != place}
            alive |= {rank for rank in now if now[rank] != first[rank]}
            if not elsewhere or time.monotonic() > until:
                return elsewhere, [rank for rank in elsewhere if rank not in alive]
            time.sleep(0.05)
            self._heartbeat(place, self.grace)

    def _whereabouts(self) -> dict[int, str]:
        """Return what every rank last wrote."""
        return dict(enumerate(self._read([f"here/{rank}" for rank in range(self.size)])))

    def _read(self, names: list[str]) -> list[str]:
        """Return what is written under these names; nothing where it is not there."""
        return self.store.ask(lambda s: [bytes(s.get(n)).decode() if s.check([n]) else "" for n in names], self.grace)


def _difference(ours: str, theirs: str, rank: int) -> str:
    """Return the first line in which two texts differ."""
    for mine, other in zip_longest(ours.splitlines(), theirs.splitlines(), fillvalue="nothing"):
        if mine != other:
            return f"rank 0 has {mine}, rank {rank} has {other}"
    return "same lines"
