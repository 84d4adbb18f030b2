"""What happens in a chaotic training, and when: all of it follows from the seed.

A training is a row of lives. In each some workers go on from the last checkpoint in one setting, until something ends
it: a fault, or a restart that was meant. What happens to steps is drawn by the number of the step, so that a step which
is made again after a restart meets the same again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sparsync_lab.chaos.methods import METHODS, Method

LAYERS = ("fc0", "norm", "fc1", "fc2")
SAVES = ("own files", "rank files", "distributed checkpoint")


# What happens to a step, and how often; what does not go with a setting leaves the step as it is.
STEPS: Mapping[str, int] = {
    "plain": 60,
    "accumulate": 6,
    "two backwards": 2,
    "not finite": 5,
    "overflow": 2,
    "scale jump": 4,
    "rolled back": 5,
    "clipped": 3,
    "slow rank": 2,
    "unused layer": 4,
    "unused somewhere": 3,
    "frozen layer": 3,
    "join": 3,
    "new group": 1,
    "detached": 1,
    "rebuilt": 1,
    "state loaded": 2,
}
# What ends a life, and how often.
FAULTS: Mapping[str, int] = {
    "restart": 8,
    "kill": 8,
    "stop": 1,
    "stop and wake": 1,
    "raise in compress": 3,
    "raise in exchange": 3,
    "raise in backward": 2,
    "raise before step": 3,
    "raise before step, leave": 2,
}
POINTS = ("forward", "backward", "step", "saving")


@dataclass(frozen=True)
class Setting:
    """What a user may change when a training is started again; ``turn``: how many methods there were before."""

    size: int
    method: str
    scaled: bool = False
    transactional: bool = False
    unused: bool = False  # find_unused_parameters
    frozen_joins: bool = False
    all_sparse: bool = True
    bucket_mb: float = 25.0
    turn: int = 0

    @property
    def undoes(self) -> bool:
        """Whether steps can be undone."""
        return self.scaled or self.transactional

    def describe(self) -> str:
        words = {"scaler": self.scaled, "transactional": self.transactional, "unused": self.unused}
        words |= {"freeze": self.frozen_joins, "all sparse": self.all_sparse, "small buckets": self.bucket_mb < 1}
        return ", ".join([f"{self.size} x {self.method}", *(word for word, so in words.items() if so)])


@dataclass(frozen=True)
class Fault:
    """What ends a life.

    Args:
        step: from which on it happens, as soon as ``point`` is reached.
        point: of a step; at ``"saving"``, of the next checkpoint.
        layer: in whose backward it happens, at ``"backward"``.
    """

    kind: str
    step: int
    rank: int = 0
    point: str = "step"
    layer: str = "fc1"

    def describe(self) -> str:
        where = f" at {self.point}" + (f" of {self.layer}" if self.point == "backward" else "")
        return self.kind if self.kind == "restart" else f"{self.kind} rank {self.rank}{where}, step {self.step}"


@dataclass(frozen=True)
class Life:
    """One start of all workers.

    Args:
        first: step of the checkpoint that they go on from.
        last: step at which the training is done.
        check_every: steps between two looks at the ledger: in between, ranks run freely.
        store_on_rank_0: and lost with it; else somebody else hosts it.
    """

    number: int
    seed: int
    first: int
    last: int
    setting: Setting
    fault: Fault
    deadline: float
    check_every: int
    save_every: int
    saves: str
    store_on_rank_0: bool

    @property
    def method(self) -> Method:
        return METHODS[self.setting.method]


def draw_life(seed: int, number: int, first: int, last: int, workers: int, before: Setting | None) -> Life:
    """Return the next life: about half of them go on as before, the others with something changed."""
    draw = random.Random(f"{seed} life {number}")
    setting = before if before is not None and draw.random() < 0.5 else _draw_setting(seed, draw, workers, before)
    kind = draw.choices([*FAULTS], [*FAULTS.values()])[0]
    if kind.startswith("raise in"):
        point = kind.removeprefix("raise in ")
    elif kind.startswith("raise"):
        point = "step"
    else:
        point = draw.choice(POINTS)
    rank = draw.randrange(setting.size)
    if kind == "raise in compress" and METHODS[setting.method].nodes:
        rank -= rank % 2  # a rank that is led compresses nothing
    fault = Fault(kind, first + draw.randint(10, 220), rank, point, draw.choice(LAYERS))
    return Life(
        number, seed, first, last, setting, fault,
        deadline=6.0 if kind.startswith("stop") else 20.0,
        check_every=draw.choice((1, 1, 4, 11)),
        save_every=draw.choice((10, 20, 30)),
        saves=draw.choice(SAVES),
        store_on_rank_0=draw.random() < 0.5,
    )  # fmt: skip


def method_at(seed: int, turn: int) -> str:
    """Return the method whose turn it is: all have theirs, in a drawn order, before one comes again."""
    again, place = divmod(turn, len(METHODS))
    return random.Random(f"{seed} methods {again}").sample([*METHODS], len(METHODS))[place]


def _draw_setting(seed: int, draw: random.Random, workers: int, before: Setting | None) -> Setting:
    sizes = sorted({max(2, workers - 2), max(2, workers - 1), workers, workers + 1})
    size = draw.choice([*sizes, workers, workers])
    if before is not None and draw.random() < 0.25:  # another number of workers, and nothing else
        return replace(before, size=draw.choice([one for one in sizes if one != before.size]))
    turn = 0 if before is None else before.turn + 1
    return Setting(
        size, method_at(seed, turn), turn=turn,
        scaled=draw.random() < 0.35,
        transactional=draw.random() < 0.3,
        unused=draw.random() < 0.35,
        frozen_joins=draw.random() < 0.5,
        all_sparse=draw.random() < 0.6,
        bucket_mb=draw.choice((25.0, 0.004)),
    )  # fmt: skip


@dataclass(frozen=True)
class Event:
    """What happens to a step, or to a few of them.

    Args:
        rank: whom it happens to, if it does to one.
        number: micro-batches, steps or a power of 2, as fits.
    """

    kind: str
    rank: int = 0
    number: int = 1
    layer: str = "fc1"


def event_at(seed: int, step: int, setting: Setting) -> Event:
    """Return what happens at a step in a setting."""
    draw = random.Random(f"{seed} step {step}")
    kind = draw.choices([*STEPS], [*STEPS.values()])[0]
    event = Event(kind, draw.randrange(60) % setting.size, draw.randint(2, 4), draw.choice(LAYERS))
    return event if _goes_with(kind, setting) else replace(event, kind="plain")


def _goes_with(kind: str, setting: Setting) -> bool:
    method = METHODS[setting.method]
    freezes = setting.frozen_joins or setting.unused
    fits = {
        "not finite": setting.undoes or not method.nodes,  # what a node's sum keeps of it is not seen from outside
        "overflow": setting.scaled,
        "scale jump": setting.scaled,
        "rolled back": setting.undoes,
        "unused layer": setting.unused,
        "unused somewhere": setting.unused,
        "frozen layer": setting.unused,
        # A joined rank that drains goes on with its velocity; and none follows a loss scale.
        "join": (freezes or method.keeps != "velocities") and not setting.scaled,
        "new group": not method.nodes,
    }
    return fits.get(kind, True)
