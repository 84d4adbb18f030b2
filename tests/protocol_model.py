"""The protocol of a step as a small state machine: send, vote, commit, fail, restart. It reads as documentation.

Every transition names the code that it stands for. Time is counted in ticks of waiting. A message is its sender's vote
for all steps before: a rank sends in a step only when it has completed the others, and completes a step only with a
message from everybody. So ranks are never more than one step apart, and the step that any survivor has completed is the
committed one. What is kept, sent and applied are vectors of integers, so that nothing can hide in rounding.

``defect`` plants one of ``DEFECTS``: the exploration in ``test_protocol_model.py`` must find each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

DEADLINE, GRACE = 4, 2  # ticks: StoreMonitor.deadline, and that of collect_votes
IDLE, WAITING, VOTING, STOPPED = "idle", "waiting", "voting", "stopped"
FAILED, NONFINITE = "failed", "nonfinite"  # flags of a header: sparse.FAILED, sparse.NONFINITE
DEFECTS = (
    "a step is completed without everybody's message",
    "a step counts before its exchange is over",
    "what a failed step sent stays away",
    "what was applied goes back to the residual, too",
    "a bad step is applied",
    "a flag of failure is overlooked",
    "nobody looks at the deadline",
    "votes are waited for without end",
    "states of different steps are loaded together",
    "where somebody is lost, nobody looks at the others' votes",
    "a vote counts the step that failed",
    "without a store nobody looks at the deadline",
)
Vector = tuple[int, ...]


def plus(one: Vector, two: Vector) -> Vector:
    return tuple(a + b for a, b in zip(one, two, strict=True))


def minus(one: Vector, two: Vector) -> Vector:
    return tuple(a - b for a, b in zip(one, two, strict=True))


def largest(vector: Vector, k: int) -> Vector:
    """Return the k largest entries, the others 0 (compressors.TopK)."""
    order = sorted(range(len(vector)), key=lambda i: (-abs(vector[i]), i))[:k]
    return tuple(value if i in order else 0 for i, value in enumerate(vector))


@dataclass(frozen=True)
class Saved:
    """A checkpoint of one rank, beside the model's weights (engine.checkpoint.state_dict)."""

    step: int
    residual: Vector
    weights: tuple[Vector, ...]
    came_in: Vector


@dataclass
class Rank:
    """What one rank is and keeps. ``weights``: the sum that it has applied of every rank's entries."""

    residual: Vector
    weights: tuple[Vector, ...]
    came_in: Vector
    before: tuple[Vector, Vector]  # residual and what had come in before the step (FlatBuffer.committed)
    in_flight: Vector  # engine.ledger.Ledger
    phase: str = IDLE
    completed: int = 0  # steps
    waited: int = 0  # ticks, in this phase
    alive: bool = True
    frozen: bool = False
    flag: str = ""
    inbox: dict[int, tuple[int, Vector, str]] = field(default_factory=dict)  # by sender: step, entries, flag
    known: dict[int, int] = field(default_factory=dict)  # votes that it has seen when it stopped
    heard: frozenset[int] = frozenset()  # whose votes it could see then
    told: bool = False  # by headers, which are the same for all, that nobody completes the step
    saved: dict[int, Saved] = field(default_factory=dict)  # by step

    @property
    def running(self) -> bool:
        return self.alive and not self.frozen


class Protocol:
    """Ranks that train together. ``k``: entries of a message; ``transactional``: a failed step leaves no trace."""

    def __init__(self, ranks: int, size: int = 4, k: int = 2, transactional: bool = False, defect: str = "") -> None:
        assert defect in ("", *DEFECTS)
        none = (0,) * size
        self.none, self.k, self.transactional, self.defect = none, k, transactional, defect
        self.ranks = [Rank(none, (none,) * ranks, none, (none, none), none) for _ in range(ranks)]
        for rank in self.ranks:
            self.save(rank)
        self.store = True  # whether it answers
        self.alarm = False  # StoreMonitor: the key "alarm"
        self.lost: set[int] = set()
        self.votes: dict[int, int] = {}  # the keys "vote/r"

    # ---- a step -------------------------------------------------------------------------------------------------

    def send(self, number: int, gradient: Vector, flag: str = "") -> None:
        """Begin a step and send (Reducer._begin, UnitExchange.compress, Ledger.record_sent). With ``FAILED`` the rank
        could not compress (failed_unit): its gradient is in nobody's hands, and its message says so."""
        rank = self.ranks[number]
        rank.before = rank.residual, rank.came_in
        rank.flag, rank.phase, rank.waited = flag, WAITING, 0
        rank.came_in, sent = plus(rank.came_in, gradient), self.none
        if flag == FAILED:
            rank.in_flight = gradient
        else:
            rank.residual = plus(rank.residual, gradient)
            rank.in_flight = sent = largest(rank.residual, self.k)
            rank.residual = minus(rank.residual, sent)
        rank.inbox[number] = rank.completed, sent, flag
        if self.defect == "a step counts before its exchange is over":
            rank.completed += 1

    def deliver(self, source: int, to: int) -> None:
        """Let a message arrive (Channel): those of a dead rank may, or may not."""
        step, entries, flag = self.ranks[source].inbox[source]
        self.ranks[to].inbox[source] = step, entries, flag

    def heard(self, number: int) -> dict[int, tuple[int, Vector, str]]:
        """Return the messages that a rank has of the step it waits in."""
        own = self.ranks[number].inbox[number][0]
        return {source: got for source, got in self.ranks[number].inbox.items() if got[0] == own}

    def can_complete(self, number: int) -> bool:
        missing = len(self.ranks) - len(self.heard(number))
        early = self.defect == "a step is completed without everybody's message"
        return self.ranks[number].phase == WAITING and missing <= early

    def complete(self, number: int) -> None:
        """End an exchange: look at the headers (check_headers), then write the mean and commit (Completion.finish,
        WorkerState.commit); or, where a gradient was not finite, put everything back (Cause.NON_FINITE)."""
        rank, heard = self.ranks[number], self.heard(number)
        flags = {flag for _, _, flag in heard.values()}
        if FAILED in flags and self.defect != "a flag of failure is overlooked":
            rank.told = True
            self.stop(number)  # all see the same headers: no alarm
            return
        bad = NONFINITE in flags
        if not bad or self.defect == "a bad step is applied":
            sums = [heard[source][1] if source in heard else self.none for source in range(len(self.ranks))]
            rank.weights = tuple(map(plus, rank.weights, sums))
        if bad or self.defect == "what was applied goes back to the residual, too":
            self._restore(rank)
        rank.in_flight, rank.phase, rank.waited = self.none, IDLE, 0
        rank.completed += self.defect != "a step counts before its exchange is over"

    def _restore(self, rank: Rank) -> None:
        """Put back what is in flight (Ledger.restore), or undo the whole step (WorkerState.undo); of a gradient that
        could not be compressed nothing has come in."""
        if self.transactional or rank.flag == FAILED:
            rank.residual, rank.came_in = rank.before
        else:
            rank.residual = plus(rank.residual, rank.in_flight)
        rank.in_flight = self.none

    # ---- failure ------------------------------------------------------------------------------------------------

    def fail(self, number: int) -> None:
        """Fail alone, once a step is begun: a result cannot be written, a backward breaks off (ErrorHandler.announced,
        Reducer.fail): the others hear of it through the store (StoreMonitor.broadcast_error)."""
        self.alarm = self.alarm or self.store
        self.stop(number)

    def miss(self, number: int) -> None:
        """Run into the deadline (StoreMonitor.wait, StoreMonitor.fail): who does not wait either is lost."""
        if self.store and not self.alarm:
            self.lost = {other for other, rank in enumerate(self.ranks) if not rank.running}
        self.fail(number)

    def can_miss(self, number: int) -> bool:
        rank = self.ranks[number]
        blind = self.defect == "nobody looks at the deadline"
        blind = blind or (self.defect == "without a store nobody looks at the deadline" and not self.store)
        return rank.phase == WAITING and rank.waited >= DEADLINE and not blind

    def can_hear(self, number: int) -> bool:
        """Whether a rank that waits finds the alarm (StoreMonitor._heartbeat)."""
        return self.ranks[number].phase == WAITING and self.alarm and self.store

    def stop(self, number: int) -> None:
        """Undo what is under way and vote (ErrorHandler.stop, StepVote.close, StoreMonitor.leave_vote)."""
        rank = self.ranks[number]
        if self.defect != "what a failed step sent stays away":
            self._restore(rank)
        rank.in_flight, rank.phase, rank.waited = self.none, VOTING, 0
        if self.store:
            self.votes[number] = rank.completed + (self.defect == "a vote counts the step that failed")

    def can_close(self, number: int) -> bool:
        """Whether the votes are in, or were waited for long enough (StoreMonitor.collect_votes); without an alarm all
        have seen the same, and without a store there is nothing to see, and nobody waits."""
        rank, expected = self.ranks[number], {*range(len(self.ranks))} - self.lost
        late = rank.waited >= GRACE and self.defect != "votes are waited for without end"
        return rank.phase == VOTING and (not (self.alarm and self.store) or expected <= {*self.votes} or late)

    def close(self, number: int) -> None:
        """Say which step is the committed one (step_vote.describe); without a store, for oneself alone."""
        rank, votes = self.ranks[number], {**self.votes} if self.store else {}
        rank.heard, rank.phase, rank.waited = frozenset(votes), STOPPED, 0
        alone = self.lost and self.defect == "where somebody is lost, nobody looks at the others' votes"
        rank.known = {**({} if alone else votes), number: rank.completed}
        self.save(rank)  # state_dict() after an error speaks of the steps that were completed

    def crash(self, number: int) -> None:
        """Kill a rank: what it keeps is gone, what it saved is not."""
        self.ranks[number].alive = False

    def lose_store(self) -> None:
        """Let the store's host die or freeze, be it a rank or not (BoundedStore: ``StoreSilent``, or an error): from
        now on no alarm is heard, and no vote."""
        self.store = False

    def tick(self, ticks: int = 1) -> None:
        """Let time pass for all who wait; a frozen rank does not wait."""
        for rank in self.ranks:
            rank.waited += ticks * (rank.running and rank.phase in (WAITING, VOTING))

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def save(self, rank: Rank) -> None:
        """Write a checkpoint, between two steps (engine.checkpoint.state_dict)."""
        rank.saved[rank.completed] = Saved(rank.completed, rank.residual, rank.weights, rank.came_in)

    def restart(self, steps: list[int]) -> bool:
        """Start all ranks again, each from its state of that step; returns whether they may train together
        (checkpoint.check_state in one list; Origin, before the first exchange, where every rank has loaded its own)."""
        if len(set(steps)) > 1 and self.defect != "states of different steps are loaded together":
            return False
        self.store, self.alarm, self.lost, self.votes = True, False, set(), {}
        for number, (rank, step) in enumerate(zip(self.ranks, steps, strict=True)):
            state = rank.saved[step]
            fresh = replace(rank, residual=state.residual, weights=state.weights, came_in=state.came_in, flag="")
            kept = {at: old for at, old in rank.saved.items() if at <= step}  # a new life writes the others anew
            again = Rank(fresh.residual, fresh.weights, fresh.came_in, (self.none, self.none), self.none, saved=kept)
            again.completed = step
            self.ranks[number] = again
        return True
