"""When 'auto' decides, and what: on a clock that is made up."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from sparsync.engine.auto_policy import FIRST, ROUNDS, SETTLE, TIMED, AutoPolicy, Figures

NAMES = ("dense", "default", "balanced")


@dataclass
class Training:
    """A training on a network whose dense exchange takes ``network`` seconds, a quarter of it hidden.

    Attributes:
        log: the way of every step.
        probed: seconds of probes, in all.
    """

    network: Callable[[int], float]
    selection: float = 0.02
    noise: float = 0.0
    compute: Callable[[int], float] = lambda step: 0.1
    policy: AutoPolicy = field(default_factory=lambda: AutoPolicy(NAMES))
    step: int = 0
    log: list[str] = field(default_factory=list)
    seconds: float = 0.0
    probed: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def takes(self, name: str, step: int) -> tuple[float, float]:
        """Return the seconds of a step, and those that it waits for its exchange."""
        hidden, network = 0.025, self.network(step)
        waited = {
            "dense": max(0.0, network - hidden),
            "default": self.selection + network / 30,
            "balanced": 3 * self.selection + network / 40,
        }[name]
        return (self.compute(step) + waited) * (1 + self.noise * self.rng.uniform(-1, 1)), waited

    def run(self, steps: int) -> Training:
        policy, times = self.policy, list[tuple[float, float]]()
        for step in range(self.step, self.step + steps):
            self.log.append(policy.current)
            counted = policy.counts
            took = self.takes(policy.current, step)
            self.seconds += took[0]
            times = [*times, took] if counted else []
            if policy.advance():
                probe = self.network(step) / 20 + 0.001 if policy.wants_probe(step + 1) else 0.0
                self.probed += probe if policy.settled else 0.0
                middle = sorted(times)[len(times) // 2]
                policy.decide(step + 1, Figures(middle[0], middle[1], probe, 0.01))
                policy.drains, times = False, []
        self.step += steps
        return self


@pytest.mark.parametrize(
    ("network", "wins"), [(0.02, "dense"), (0.04, "dense"), (0.06, "default"), (0.5, "default"), (8.0, "balanced")]
)
def test_the_fastest_is_chosen_and_stays(network: float, wins: str) -> None:
    training = Training(lambda step: network, noise=0.05).run(2000)
    assert training.log[-1] == wins
    assert training.log[100:900] == 800 * [wins]
    assert training.policy.decisions[0].chosen == wins
    assert set(training.policy.decisions[0].times) == set(NAMES)
    assert f"{wins} " in str(training.policy.decisions[0])


def test_close_ways_take_turns_and_others_do_not() -> None:
    close = Training(lambda step: 0.048).run(100)
    trial = close.log[: close.policy.decisions[0].step]
    turns = ROUNDS * (SETTLE + TIMED)
    assert [trial.count(name) for name in NAMES] == [FIRST + 1 - SETTLE + turns, turns, SETTLE + TIMED]
    clear = Training(lambda step: 0.55).run(100)
    assert clear.log.count("dense") == FIRST + 1  # half a second each: one says enough


def test_slow_steps_of_a_way_that_lost_are_few() -> None:
    """Where dense takes fifty times as long it is timed once, and all of auto costs those steps alone."""
    training = Training(lambda step: 8.0, noise=0.1).run(5000)
    assert training.log.count("dense") == FIRST + 1


@pytest.mark.parametrize(
    ("before", "after", "first", "then"), [(0.5, 0.01, "default", "dense"), (0.01, 0.5, "dense", "default")]
)
def test_a_network_that_changes_is_noticed(before: float, after: float, first: str, then: str) -> None:
    training = Training(lambda step: before if step < 500 else after, noise=0.05).run(500)
    assert training.log[-1] == first
    training.run(400)
    assert training.log[-1] == then
    assert training.policy.decisions[-1].step < 800
    assert training.policy.decisions[-1].why != training.policy.decisions[0].why
    training.run(2000)
    assert training.log[1000:1400] == 400 * [then]


def test_a_network_that_wavers_is_not_followed_all_the_time() -> None:
    training = Training(lambda step: 0.5 if step // 50 % 2 else 0.01, noise=0.05).run(5000)
    changes = sum(a != b for a, b in pairwise(training.log))
    assert changes < 150


@pytest.mark.parametrize("network", [0.06, 0.5, 8.0])
def test_probes_take_less_than_half_a_percent_of_the_time(network: float) -> None:
    training = Training(lambda step: network).run(6000)
    assert 0 < training.probed < 0.005 * training.seconds


def test_a_slower_computer_is_no_slower_network() -> None:
    """Sparse steps that take longer, with the same probe: dense ones would, too, and are not tried."""
    training = Training(lambda step: 8.0, compute=lambda step: 0.1 if step < 500 else 0.3).run(3000)
    assert training.log.count("dense") == FIRST + 1
    assert training.policy.times["balanced"] == pytest.approx(0.3 + 0.06 + 0.2)


def test_trials_that_find_nothing_new_become_rare() -> None:
    training = Training(lambda step: 0.048, noise=0.02).run(40_000)
    steps = [decision.step for decision in training.policy.decisions]
    gaps = [b - a for a, b in pairwise(steps)]
    assert gaps[-1] >= 16_000 or len(steps) < 6
    lost = sum(training.takes(name, 0)[0] - training.takes("dense", 0)[0] for name in training.log if name != "dense")
    assert lost < 0.02 * training.seconds


def test_entries_that_become_fewer_are_a_reason_to_look_again() -> None:
    policy = Training(lambda step: 0.02).run(200).policy
    policy.decide(220, Figures(0.1, 0.0, 0.0, 0.006))
    assert policy.settled
    policy.decide(240, Figures(0.1, 0.0, 0.0, 0.004))
    assert not policy.settled


def test_a_checkpoint_goes_on_with_what_was_on() -> None:
    training = Training(lambda step: 0.5).run(300)
    state = training.policy.state_dict()
    resumed = AutoPolicy(NAMES)
    resumed.load_state_dict(state, 300, same=True)
    assert (resumed.current, resumed.settled) == ("default", True)
    assert resumed.state_dict() == state
    again = Training(lambda step: 0.01, policy=resumed, step=300).run(400)
    assert again.log[-1] == "dense"  # as it knows what a probe took
    elsewhere = AutoPolicy(NAMES)
    elsewhere.load_state_dict(state, 300, same=False)
    assert not elsewhere.settled
    early = AutoPolicy(NAMES)
    early.load_state_dict(AutoPolicy(NAMES).state_dict(), 5, same=True)
    assert not early.settled
