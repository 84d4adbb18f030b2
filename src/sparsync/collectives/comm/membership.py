"""Who trains together after a rank was lost, or has come back: agreed on through a store that outlives all of them.

Every process has a number of its own, for life. Those that train together are a generation. The next one is agreed on
in a round: whoever takes part writes that it is here, and how many steps its weights have made. As soon as every member
of the last generation is here, or its heart has stopped, or the deadline is over, anybody proposes who is in. The first
proposal stands, whoever makes another reads that one: so there is never more than one generation of a number. Whoever
is not in it, because it was frozen meanwhile, can only join as a new process.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from sparsync.collectives.comm.bounded_store import BoundedStore, StoreSilent
from sparsync.collectives.comm.comm_thread import CommThread, stop_at_exit
from sparsync.collectives.comm.store_monitor import GONE, SILENT
from sparsync.errors import Excluded, Mismatch, PeerLost

T = TypeVar("T")
PREFIX = "sparsync survivors"
BEAT = 0.5  # seconds between two heartbeats
LONG = 10.0  # seconds, or a quarter of the deadline, without a heartbeat after which a rank counts as dead
POLL = 0.05  # seconds between two looks at a round


@dataclass(frozen=True)
class Generation:
    """Those who train together, as all of them know it.

    Args:
        number: of the generation.
        members: their numbers, in rank order.
        steps: that the weights have made, from which all go on.
        source: the number of a member that has these weights.
        behind: numbers of those who have not, and of those who have just come.
        undone: the last of these steps was not finite, and is undone.
        fingerprint: of what they train.
    """

    number: int
    members: tuple[int, ...]
    steps: int
    source: int
    behind: tuple[int, ...] = ()
    undone: bool = False
    fingerprint: str = ""

    def text(self) -> str:
        """Return it as it is written into the store."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Generation:
        """Return what was written."""
        said: dict[str, Any] = json.loads(text)
        made: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in said.items()}
        return cls(**made)


class Membership:
    """This process among those that train together.

    Attributes:
        number: of this process.
        now: the generation that it belongs to; a process that waits to join has seen it.

    Args:
        store: reached by all, and on none of them.
        deadline: seconds that a member may take to come to a round.
        fingerprint: of options, model and version, which are the same for all.
    """

    def __init__(self, store: Store, deadline: float, fingerprint: str = "") -> None:
        self.root, self.deadline, self.fingerprint = store, deadline, fingerprint
        self._store = BoundedStore(PrefixStore(PREFIX, store))
        self.number = self._ask(lambda s: s.add("processes", 1))
        another: Store = store.clone()  # type: ignore[attr-defined]
        self._hearts = Heartbeats(PrefixStore(PREFIX, another), self.number, min(LONG, deadline / 4))
        self.now = Generation(0, (), 0, 0)

    def begin(self, members: Iterable[int]) -> str:
        """Begin a training, as its first member; return the generation, for the others to ``enter``."""
        newest, all_ = self._newest(), tuple(members)
        number = newest.number + 1 if newest else 1
        return Generation(number, all_, 0, all_[0], fingerprint=self.fingerprint).text()

    def enter(self, text: str) -> None:
        """Belong to a generation that all its members know of."""
        self.now = Generation.of(text)
        if self._decide(self.now) != text:
            raise Mismatch("another training has begun in this store at the same time: give each a store of its own")
        self._hearts.watch(self.now.members)

    def find_training(self) -> bool:
        """Return whether others train here, whom this process may join; raise if it would train something else."""
        newest = self._newest()
        if newest is not None:
            if newest.fingerprint != self.fingerprint:  # found out later, it would end the training of all
                raise Mismatch("this process cannot join the others: its options, model or version differ from theirs")
            self.now = newest
            self._hearts.watch(newest.members)
        return newest is not None

    def join(self) -> Generation:
        """Wait until the others let this process in; raises ``PeerLost`` if they agree on nothing within twice the
        deadline: it may take them one to notice a loss, and another to agree."""
        while True:
            with suppress(Excluded):
                return self.agree(None)  # they may have agreed just before it came

    def agree(self, steps: int | None, undone: bool = False) -> Generation:
        """Return the next generation; raises ``Excluded`` if this process is not in it.

        Args:
            steps: that the weights here have made; ``None`` where there are none yet.
            undone: the last of these was not finite, and is undone.
        """
        last, number, began = self.now, self.now.number + 1, time.monotonic()
        own = f"{number}/here/{self.number}"
        self._ask(lambda s: s.set(own, json.dumps([steps, undone])))
        while not (text := self._read(f"{number}/decision")):
            here = self._here(number)
            self._hearts.watch([*last.members, *here])
            late = [m for m in last.members if m not in here and not self._hearts.stopped(m)]
            # Who waits to join may have been killed meanwhile, and the new group would wait for it.
            late += [m for m in here if m not in last.members and not self._hearts.known(m)]
            if steps is not None and (not late or time.monotonic() - began > self.deadline):
                text = self._decide(_proposal(last, {m: v for m, v in here.items() if not self._hearts.stopped(m)}))
                break
            if self._read(f"{last.number}/over"):
                raise PeerLost("the training is over")
            # Others who wait have no weights to go on from either.
            if steps is None and all(self._hearts.stopped(m) or here.get(m, (0,))[0] is None for m in last.members):
                raise PeerLost("there is nobody left to join: all ranks of the training are dead, or frozen")
            if steps is None and time.monotonic() - began > 2 * self.deadline:
                self._ask(lambda s: s.delete_key(own))  # nobody makes a group with this process any more
                raise PeerLost(
                    f"this process was not let in within {2 * self.deadline:g} s: the other ranks live, but have not "
                    "come to the end of a step; start it again once they do, or raise deadline= if a step, or what "
                    "they do between two, takes longer"
                )
            time.sleep(POLL)
        self.now = Generation.of(text)
        self._hearts.watch(self.now.members)
        if self.number not in self.now.members:
            raise Excluded(
                f"the other ranks went on without this one at step {self.now.steps}, because it was not heard from in "
                "time; end this process, and start another, which joins them"
            )
        return self.now

    def somebody_waits(self) -> bool:
        """Return whether another process waits to join, or a member for a round that this one has not heard of."""
        here, members = self._here(self.now.number + 1), self.now.members
        self._hearts.watch([*members, *here])
        return any(m in members or (self._hearts.known(m) and not self._hearts.stopped(m)) for m in here)

    def finish(self) -> bool:
        """Wait until all members have finished, and return whether they have; ``False``: some need the others once
        more. Raises ``PeerLost`` if some, though they live, have not finished before the deadline."""
        number, members, began = self.now.number, self.now.members, time.monotonic()
        self._ask(lambda s: s.set(f"{number}/finished/{self.number}", "1"))
        while not self.somebody_waits():
            names = {f"{number}/finished/{m}": rank for rank, m in enumerate(members) if not self._hearts.stopped(m)}
            if self._ask(lambda s, names=names: s.check([*names])):  # type: ignore[misc]
                self._ask(lambda s: s.set(f"{number}/over", "1"))
                return True
            if time.monotonic() - began > self.deadline:
                missing = ", ".join(str(rank) for name, rank in names.items() if not self._read(name))
                raise PeerLost(
                    f"the end of the training: no answer within {self.deadline:g} s; ranks not heard from: {missing}"
                )
            time.sleep(POLL)
        return False

    def close(self) -> None:
        """Stop the heart, and ask the store nothing more."""
        self._hearts.close()
        self._store.close()

    def _newest(self) -> Generation | None:
        """Return the newest generation, if there is any."""
        number, text = 0, ""
        while newer := self._read(f"{number + 1}/decision"):
            number, text = number + 1, newer
        return Generation.of(text) if text else None

    def _decide(self, proposal: Generation) -> str:
        """Return what stands: this proposal, or that of whoever was first."""
        name, text = f"{proposal.number}/decision", proposal.text()
        return self._ask(lambda s: bytes(s.compare_set(name, "", text)).decode())

    def _here(self, number: int) -> dict[int, tuple[int | None, bool]]:
        """Return who takes part in a round, with what each has said."""

        def look(store: Store) -> dict[int, tuple[int | None, bool]]:
            names = {m: f"{number}/here/{m}" for m in range(1, store.add("processes", 0) + 1)}
            return {m: tuple(json.loads(store.get(name))) for m, name in names.items() if store.check([name])}

        return self._ask(look)

    def _read(self, name: str) -> str:
        """Return what is written under a name; nothing where it is not there."""
        return self._ask(lambda s: bytes(s.get(name)).decode() if s.check([name]) else "")

    def _ask(self, question: Callable[[Store], T]) -> T:
        try:
            return self._store.ask(question, self.deadline)
        except StoreSilent:
            raise PeerLost(f"survivors cannot agree: {SILENT}") from None
        except DistError as error:
            raise PeerLost(f"survivors cannot agree: {GONE}") from error


class Heartbeats:
    """A thread that shows the others that this process lives, and looks whether they do.

    It stops with the process: when that is killed, and when it is frozen, but not in a long forward pass.

    Args:
        store: a connection of its own, so that nobody's waiting stops the heart.
        patience: seconds without a beat after which a heart has stopped.
    """

    def __init__(self, store: Store, number: int, patience: float) -> None:
        self._store, self._number, self._patience = store, number, patience
        self._seen: dict[int, tuple[bytes, float]] = {}  # the last beat of each, and when it was seen first
        self._beating: set[int] = set()  # of whom one beat was seen to follow another
        self._watched: tuple[int, ...] = ()
        self._end = threading.Event()
        self._looked = time.monotonic()
        store.set(f"beat/{number}", "0")
        self._thread = CommThread(threaded=True, name="sparsync heart")
        self._thread.submit(self._run)

    def watch(self, numbers: Iterable[int]) -> None:
        """Look for the beats of these processes."""
        self._watched = tuple({*numbers} - {self._number})

    def stopped(self, number: int) -> bool:
        """Return whether there was no beat for long, though this process itself was awake."""
        last = self._seen.get(number)
        return number != self._number and last is not None and self._looked - last[1] > self._patience

    def known(self, number: int) -> bool:
        """Return whether it is known of a process that its heart beats, or has stopped."""
        return number == self._number or number in self._beating or self.stopped(number)

    def close(self) -> None:
        """Stop."""
        self._end.set()
        self._thread.abandon()

    def _run(self) -> None:
        beat = 0
        with suppress(DistError):  # the store is gone: whoever asks it hears of that
            while not self._end.wait(BEAT):
                stop_at_exit()
                beat, now, last = beat + 1, time.monotonic(), self._looked
                self._store.set(f"beat/{self._number}", str(beat))
                if now - last > 4 * BEAT:  # we were frozen ourselves: the others get another chance
                    self._seen = {m: (value, seen + now - last) for m, (value, seen) in self._seen.items()}
                for number, value in self._read_beats(self._watched):
                    if number not in self._seen or self._seen[number][0] != value:
                        if number in self._seen:
                            self._beating.add(number)
                        self._seen[number] = value, now
                self._looked = now

    def _read_beats(self, numbers: tuple[int, ...]) -> list[tuple[int, bytes]]:
        """Return the last beats of processes, by one question where the store takes that."""
        names = [f"beat/{number}" for number in numbers]
        many = bool(names) and self._store.has_extended_api()  # type: ignore[attr-defined]
        values = self._store.multi_get(names) if many else [self._store.get(name) for name in names]
        return list(zip(numbers, map(bytes, values), strict=True))


def _proposal(last: Generation, here: dict[int, tuple[int | None, bool]]) -> Generation:
    """Return the generation of those who are here: former members keep their order, others come after them."""
    members = [*(m for m in last.members if m in here), *sorted(m for m in here if m not in last.members)]
    said = {m: here[m] for m in members}
    steps = max(own for own, _ in said.values() if own is not None)
    source = next(m for m in members if said[m][0] == steps)
    behind = tuple(m for m in members if said[m][0] != steps)
    return Generation(last.number + 1, tuple(members), steps, source, behind, said[source][1], last.fingerprint)
