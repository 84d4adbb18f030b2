"""What ranks tell each other outside of exchanges, through the group's store: never needed while all goes well.

Ranks that wait longer than a second write down what they wait for and look for an alarm. Whoever runs into an error or
the deadline raises the alarm, with the ranks that wrote nothing: so all survivors stop with the same sentence.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import zip_longest
from typing import NoReturn

from torch.distributed import DistError, DistStoreError, Store  # type: ignore[attr-defined]

from sparsync import errors
from sparsync.errors import Mismatch, PeerLost, SparsyncError

PATIENCE = 1.0  # seconds, or an eighth of the deadline, of waiting after which a rank writes down what it waits for
GRACE = 3.0  # seconds, or a quarter of the deadline, that whoever raises the alarm leaves the others to do so


class StoreMonitor:
    """The store of a process group.

    Args:
        store: shared by all ranks.
        deadline: seconds anything may be waited for.
    """

    def __init__(self, store: Store, rank: int, size: int, deadline: float) -> None:
        self.store, self.rank, self.size, self.deadline = store, rank, size, deadline
        self.patience, self.grace = min(PATIENCE, deadline / 8), min(GRACE, deadline / 4)
        self._agreements = 0

    def wait(self, done: Callable[[float], bool], place: str) -> None:
        """Wait until ``done(seconds)``, which itself waits that long at most, says so; raise before the deadline.

        ``place`` names what is waited for, and is the same on every rank that is at the same point.
        """
        until = time.monotonic() + self.deadline - self.grace
        try:
            while not done(self.patience):
                if time.monotonic() > until:
                    self.fail(f"no answer within {self.deadline:g} s", place)
                self._look_around(place)
        except DistError as error:
            raise PeerLost(f"{place}: the store is gone, and with it rank 0 or the launcher") from error

    def assert_consistent(self, what: str, text: str, place: str) -> None:
        """Raise on every rank, with the same sentence, if ``text`` is not the same on all."""
        self._agreements += 1
        names = [f"agree/{self._agreements}/{rank}" for rank in range(self.size)]
        self.store.set(names[self.rank], hashlib.sha256(text.encode()).hexdigest())
        self.wait(lambda seconds: self._appear(names, seconds), f"{place}, to compare the {what}")
        said = [bytes(self.store.get(name)) for name in names]
        odd = [rank for rank in range(self.size) if said[rank] != said[0]]
        if odd:
            self.store.set(f"{names[self.rank]}/text", text)
            self.wait(lambda seconds: self._appear([f"{name}/text" for name in names], seconds), place)
            ours, theirs = (bytes(self.store.get(f"{names[rank]}/text")).decode() for rank in (0, odd[0]))
            ranks = ", ".join(map(str, odd))
            raise Mismatch(f"the {what} differs on rank {ranks}: {_difference(ours, theirs, odd[0])}")
        if self._agreements > 1:  # all have read what came before
            self.store.delete_key(f"agree/{self._agreements - 1}/{self.rank}")

    def tell(self, cause: str) -> None:
        """Leave word why this rank fails; its next message only carries a flag. The first word stays."""
        self.store.compare_set(f"cause/{self.rank}", "", cause)

    def cause(self, rank: int) -> str:
        """Why that rank failed."""
        return bytes(self.store.get(f"cause/{rank}")).decode()

    def broadcast_error(self, error: SparsyncError) -> SparsyncError:
        """Tell every rank that waits to stop with this error; returns it, or that of whoever was first."""
        try:
            first = bytes(self.store.compare_set("alarm", "", f"{type(error).__name__}\n{error}")).decode()
        except DistError:  # nobody is there to tell
            return error
        kind, _, text = first.partition("\n")
        return getattr(errors, kind, SparsyncError)(text)  # type: ignore[no-any-return]

    def fail(self, cause: str, place: str) -> NoReturn:
        """Find out who is missing, tell everybody, raise."""
        self._look_around(place)
        until = time.monotonic() + self.grace
        while (elsewhere := self._elsewhere(place)) and time.monotonic() < until:
            time.sleep(0.05)
        point = place.partition(",")[0]
        astray = {rank: where for rank, where in elsewhere.items() if where.partition(",")[0] == point}
        if astray and len(astray) == len(elsewhere):  # all are at this exchange, but not for the same thing
            listing = "; ".join(
                f"rank {rank} waits at {where}" for rank, where in (astray | {self.rank: place}).items()
            )
            raise self.broadcast_error(Mismatch(f"where the ranks wait differs: {listing}"))
        ranks = ", ".join(map(str, elsewhere)) or "none"
        raise self.broadcast_error(PeerLost(f"{place}: {cause}; ranks not heard from: {ranks}"))

    def _look_around(self, place: str) -> None:
        """Write down what we wait for, and stop if an alarm was raised."""
        self.store.set(f"here/{self.rank}", place)
        if self.store.check(["alarm"]):
            raise self.broadcast_error(SparsyncError(""))  # which is not the first

    def _elsewhere(self, place: str) -> dict[int, str]:
        """Return the ranks that do not wait at ``place``, and where they last waited."""
        names = {rank: f"here/{rank}" for rank in range(self.size)}
        there = {r: bytes(self.store.get(n)).decode() if self.store.check([n]) else "" for r, n in names.items()}
        return {rank: where for rank, where in there.items() if where != place}

    def _appear(self, names: list[str], seconds: float) -> bool:
        """Return whether all ``names`` are in the store within ``seconds``."""
        try:
            self.store.wait(names, timedelta(seconds=seconds))
            return True
        except DistStoreError:  # too late
            return False


def _difference(ours: str, theirs: str, rank: int) -> str:
    """Return the first line in which two texts differ."""
    for mine, other in zip_longest(ours.splitlines(), theirs.splitlines(), fillvalue="nothing"):
        if mine != other:
            return f"rank 0 has {mine}, rank {rank} has {other}"
    return "same lines"
