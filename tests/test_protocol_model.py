"""The model of the protocol, explored by hypothesis in any interleaving: what must hold does, and every seeded defect
is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.protocol_model import (
    DEADLINE,
    DEFECTS,
    FAILED,
    GRACE,
    IDLE,
    NONFINITE,
    STOPPED,
    VOTING,
    WAITING,
    Protocol,
    plus,
)

gradients = st.tuples(*[st.integers(-9, 9)] * 4)
numbers = st.integers(0, 3)


class Explored(RuleBasedStateMachine):
    """Ranks that take turns in any order, crash, freeze, fail and start again."""

    defect = ""

    @initialize(ranks=st.integers(2, 4), transactional=st.booleans())
    def start(self, ranks: int, transactional: bool) -> None:
        self.protocol = Protocol(ranks, transactional=transactional, defect=self.defect)

    def _some(self, number: int, *phases: str) -> int | None:
        """Return a rank that runs and is in one of these phases, if there is any."""
        found = [i for i, rank in enumerate(self.protocol.ranks) if rank.running and rank.phase in phases]
        return found[number % len(found)] if found else None

    def _act(self, number: int, phase: str, can: Callable[[int], bool], act: Callable[[int], None]) -> None:
        """Let a rank of that phase act, if there is one and it can."""
        found = self._some(number, phase)
        if found is not None and can(found):
            act(found)

    @rule(number=numbers, gradient=gradients, flag=st.sampled_from(["", "", "", "", NONFINITE, FAILED]))
    def send(self, number: int, gradient: tuple[int, ...], flag: str) -> None:
        if (found := self._some(number, IDLE)) is not None:
            self.protocol.send(found, gradient, flag)

    @rule(source=numbers, to=numbers)
    def deliver(self, source: int, to: int) -> None:
        ranks = self.protocol.ranks
        source, to = source % len(ranks), to % len(ranks)
        if source in ranks[source].inbox and source != to and ranks[to].running:
            self.protocol.deliver(source, to)

    @rule(gradient=gradients)
    def whole_step(self, gradient: tuple[int, ...]) -> None:
        """All that can be done is done: so that long trainings are explored, too."""
        for number in range(len(self.protocol.ranks)):
            self.send(number, tuple(number + value for value in gradient), "")
        for source in range(len(self.protocol.ranks)):
            for to in range(len(self.protocol.ranks)):
                self.deliver(source, to)
        for number in range(len(self.protocol.ranks)):
            self.complete(number)

    @rule(ahead=numbers, victim=numbers, gradient=gradients)
    def death_in_a_step(self, ahead: int, victim: int, gradient: tuple[int, ...]) -> None:
        """A rank dies when all have sent, and one of them has heard from everybody; the others wait for the rest."""
        count = len(self.protocol.ranks)
        for number in range(count):
            self.send(number, gradient, "")
        for source in range(count):
            self.deliver(source, ahead % count)
        first = self.protocol.ranks[ahead % count]
        if first.running and self.protocol.can_complete(ahead % count):
            self.protocol.complete(ahead % count)
            if first.phase == IDLE:
                self.protocol.send(ahead % count, gradient)
        self.protocol.crash(victim % count)
        self.tick(DEADLINE + GRACE + 2)

    @rule(number=numbers)
    def complete(self, number: int) -> None:
        self._act(number, WAITING, self.protocol.can_complete, self.protocol.complete)

    @rule(number=numbers)
    def fail(self, number: int) -> None:
        if (found := self._some(number, WAITING)) is not None:
            self.protocol.fail(found)

    @rule(number=numbers)
    def hear(self, number: int) -> None:
        self._act(number, WAITING, self.protocol.can_hear, self.protocol.stop)

    @rule(number=numbers)
    def miss(self, number: int) -> None:
        self._act(number, WAITING, self.protocol.can_miss, self.protocol.miss)

    @rule(number=numbers)
    def close(self, number: int) -> None:
        self._act(number, VOTING, self.protocol.can_close, self.protocol.close)

    @rule(number=numbers)
    def crash(self, number: int) -> None:
        if (found := self._some(number, IDLE, WAITING, VOTING)) is not None:
            self.protocol.crash(found)

    @rule()
    def lose_store(self) -> None:
        self.protocol.lose_store()

    @rule(number=numbers, frozen=st.booleans())
    def freeze(self, number: int, frozen: bool) -> None:
        self.protocol.ranks[number % len(self.protocol.ranks)].frozen = frozen

    @rule(number=numbers)
    def save(self, number: int) -> None:
        if (found := self._some(number, IDLE)) is not None:
            self.protocol.save(self.protocol.ranks[found])

    @rule(ticks=st.integers(1, DEADLINE + 1))
    def tick(self, ticks: int) -> None:
        """Let time pass; whoever has waited long enough acts, if it can."""
        for _ in range(ticks):
            for number, rank in enumerate(self.protocol.ranks):
                if rank.running and rank.phase == WAITING and rank.waited >= DEADLINE:
                    self.miss_or_hear(number)
                elif rank.running and rank.phase == VOTING and rank.waited >= GRACE and self.protocol.can_close(number):
                    self.protocol.close(number)
            self.protocol.tick()

    def miss_or_hear(self, number: int) -> None:
        if self.protocol.can_complete(number):
            self.protocol.complete(number)
        elif self.protocol.can_hear(number):
            self.protocol.stop(number)
        elif self.protocol.can_miss(number):
            self.protocol.miss(number)

    @precondition(lambda self: all(not rank.alive or rank.phase == STOPPED for rank in self.protocol.ranks))
    @rule(picks=st.lists(numbers, min_size=4, max_size=4), same=st.booleans())
    def restart(self, picks: list[int], same: bool) -> None:
        ranks = self.protocol.ranks
        common = sorted(set.intersection(*({*rank.saved} for rank in ranks)))
        steps = [sorted(rank.saved)[pick % len(rank.saved)] for rank, pick in zip(ranks, picks, strict=False)]
        self.protocol.restart([common[-1]] * len(ranks) if same else steps)

    # ---- what must hold -----------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        for number, rank in enumerate(getattr(self, "protocol", Protocol(0)).ranks):
            if not rank.alive:
                continue
            kept = plus(rank.residual, rank.in_flight)
            assert plus(rank.weights[number], kept) == rank.came_in, f"rank {number} lost or doubled something"
            for other, peer in enumerate(self.protocol.ranks):
                if peer.alive and peer.completed == rank.completed:
                    assert peer.weights == rank.weights, f"ranks {number} and {other} are no replicas"

    @invariant()
    def ranks_are_one_step_apart_at_most(self) -> None:
        steps = [rank.completed for rank in getattr(self, "protocol", Protocol(0)).ranks if rank.alive]
        assert max(steps, default=0) - min(steps, default=0) <= 1

    @invariant()
    def no_two_ranks_start_at_different_steps(self) -> None:
        """All are where a restart has put them, and nobody has sent yet."""
        ranks = getattr(self, "protocol", Protocol(0)).ranks
        if ranks and all(rank.alive and rank.phase == IDLE and not rank.inbox for rank in ranks):
            assert len({rank.completed for rank in ranks}) == 1

    @invariant()
    def no_wait_is_without_end(self) -> None:
        for rank in getattr(self, "protocol", Protocol(0)).ranks:
            assert rank.waited <= DEADLINE, "a rank waits beyond the deadline"

    @invariant()
    def survivors_know_the_committed_step(self) -> None:
        """Who could hear from all that live, or was told by headers, knows the last step that any of them has
        completed, or anybody who voted and then died. What a rank says of others is true in any case."""
        ranks = getattr(self, "protocol", Protocol(0)).ranks
        living = {number for number, rank in enumerate(ranks) if rank.alive}
        for rank in ranks:
            if rank.alive and rank.phase == STOPPED:
                assert all(ranks[other].completed == step for other, step in rank.known.items())
                if rank.told or living <= rank.heard:
                    steps = [ranks[other].completed for other in living | rank.heard]
                    assert max(rank.known.values()) == max(steps), "the committed step is another one"


def explore(defect: str, examples: int) -> None:
    kind = type("Explored", (Explored,), {"defect": defect})
    phases = (Phase.explicit, Phase.generate)
    run_state_machine_as_test(
        kind, settings=settings(max_examples=examples, stateful_step_count=40, phases=phases, deadline=None)
    )


def test_nothing_goes_wrong_in_any_interleaving() -> None:
    explore("", 5 * settings().max_examples)


LATE = DEFECTS[4:]  # are found after some hundred trainings


@pytest.mark.parametrize("defect", [pytest.param(d, marks=pytest.mark.slow) if d in LATE else d for d in DEFECTS])
def test_a_seeded_defect_is_found(defect: str) -> None:
    with pytest.raises(AssertionError):
        explore(defect, 1000)
