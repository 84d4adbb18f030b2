"""Which way of exchanging is on, and when that is decided anew: by steps that were timed, not by a model of them.

A trial makes a block of steps in every way and compares medians; ways that are close to each other take turns a few
times. Then the fastest runs, and is watched in windows. A model only says when another trial is worth its time: dense
steps are timed again once a probe of the network, or the time of a step, says that they may have come within reach.

All figures are the slowest rank's, and arrive at step numbers that follow from them: so every rank decides the same.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

FIRST = 2  # steps of a training that are not timed: DDP regroups its buckets after the first
SETTLE, TIMED = 2, 4  # steps of a block: what changes with the way, and what counts
LONG, FEW = 0.5, 2  # seconds of a step, from which on so many count: they are as sure, and cost more
ROUNDS = 3  # blocks of each way at most, in one trial
FAR = 2.0  # sparse ways that took so many times what the best takes are not tried again
CLOSE = 1.3  # ways whose times are within this factor take turns
STAY = 0.99  # a way must take less than so much of the time of the one that is on to take its place
WINDOW = 20  # steps after which figures are looked at
CHANGED, STRIKES = 0.2, 2  # a step's time has changed if it is that much off in so many windows, one after another
NEARER, REACH = (
    0.9,
    1.2,
)  # dense steps are tried again if they may take so much less, and so near to what sparse ones take
PATIENCE = 100  # steps after a trial before the next; doubled if that found nothing new
AGAIN = 1000  # steps after which a close decision is looked at again; doubled likewise
MOST = 16  # times these, at most
WAS_CLOSE = "it was close"
PROBING = 0.004  # of the time that probes of the network may take


class Figures(NamedTuple):
    """What a block, or a window, of steps took; seconds of the slowest rank.

    Args:
        step: from one step's first bucket to that of the next.
        waited: after the last bucket, for exchanges: what of them is not hidden behind backward.
        probe: of a small dense exchange; 0 if none was made.
        density: share of the entries that a sparse step sends now.
    """

    step: float
    waited: float = 0.0
    probe: float = 0.0
    density: float = 1.0


@dataclass(frozen=True)
class Decision:
    """What was decided, from which step on, and why; times in seconds by name."""

    step: int
    chosen: str
    times: Mapping[str, float]
    why: str

    def __str__(self) -> str:
        times = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in self.times.items())
        return f"step {self.step}: {self.chosen}, {self.why}" + (f" ({times})" if times else "")


@dataclass
class AutoPolicy:
    """Decides between a dense way and sparse ones.

    Args:
        names: of the ways; the first is dense.

    Attributes:
        current: the way that is on.
        drains: dense steps were decided on, so that residuals are to be sent; a trial alone leaves them.
        settled: no trial is under way.
    """

    names: Sequence[str]
    current: str = ""
    settled: bool = False
    drains: bool = False
    decisions: list[Decision] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)  # of the last trial, and since then of what is on
    _found: dict[str, list[Figures]] = field(default_factory=dict)
    _queue: list[str] = field(default_factory=list)
    _before: str = ""
    _why: str = "measured at the start"
    _first: bool = True  # nothing is known yet
    _left: int = 0
    _skip: int = 0
    _strikes: int = 0
    _confirmed: int = 0  # trials in a row that found nothing new
    _looked: int = 0  # trials in a row that had no reason but that it was close
    _not_before: int = 0
    _look_again: int | None = None
    _waited: float = 0.0  # of dense steps
    _density: float = 1.0
    _probe: float = 0.0  # when dense steps were last timed
    _next_probe: int = 0

    def __post_init__(self) -> None:
        self.current, self._queue = self.names[0], list(self.names)
        self._skip, self._left = FIRST, FIRST + 1  # one step says whether steps are long

    @property
    def dense(self) -> str:
        return self.names[0]

    @property
    def counts(self) -> bool:
        """Whether the step that is over is one to be timed."""
        return self._skip == 0

    def advance(self) -> bool:
        """Count a step that is over; returns whether figures are due."""
        self._skip = max(0, self._skip - 1)
        self._left -= 1
        return self._left <= 0

    def wants_probe(self, step: int) -> bool:
        """Return whether the network is to be probed with the figures that are due."""
        if not self.settled:
            return self.current == self.dense
        return self.current != self.dense and step >= self._next_probe

    def decide(self, step: int, figures: Figures) -> None:
        """Take figures that were due before this step; ``current`` is what is on from it on."""
        if figures.probe:
            self._next_probe = step + math.ceil(figures.probe / (PROBING * figures.step))
        if self.settled:
            self._watch(step, figures)
        else:
            self._found.setdefault(self.current, []).append(figures)
            if self._first:
                self._first = False
                if figures.step > LONG:
                    self._queue.pop(0)
                else:
                    self._found = {}
            if self._queue:
                self._take_next()
            else:
                self._compare(step)

    # ---- trials -----------------------------------------------------------------------------------------------------

    def try_again(self, why: str, factor: float = FAR) -> None:
        """Begin a trial with the next step: of dense steps, unless sparse ones alone were close to each other, and of
        sparse ways those that were within ``factor`` of the best."""
        sparse = {name: self.times.get(name, 0.0) for name in self.names[1:]}
        best = min(sparse.values())
        near = [name for name in sparse if sparse[name] <= factor * best]
        far = factor < FAR and self.times[self.dense] > factor * best
        self.settled, self.drains, self._found, self._why = False, False, {}, why
        self._queue, self._before = near if far else [self.dense, *near], self.current
        self._take_next()

    def _take_next(self) -> None:
        before, self.current = self.current, self._queue.pop(0)
        self._skip = 0 if before == self.current and not self._found else SETTLE
        known = self._median(self.current) if self.current in self._found else self.times.get(self.current, 0.0)
        self._left = self._skip + (FEW if known > LONG else TIMED)

    def _median(self, name: str) -> float:
        return statistics.median(figures.step for figures in self._found[name])

    def _compare(self, step: int) -> None:
        times = {name: self._median(name) for name in self._found}
        best = min(times, key=lambda name: times[name])
        close = [name for name in self.names if name in times and times[name] < CLOSE * times[best]]
        done = min(len(self._found[name]) for name in close)
        if len(close) > 1 and done < ROUNDS:
            self._queue = close
            self._take_next()
            return
        old = self._before
        chosen = old if old in times and times[best] > STAY * times[old] else best
        dense = self._found.get(self.dense)
        if dense is not None:
            self._waited = statistics.median(figures.waited for figures in dense)
            self._probe = min((figures.probe for figures in dense if figures.probe), default=0.0)
        self._density = self._found[chosen][-1].density
        self.times = {**self.times, **times}
        self._confirmed = self._confirmed + 1 if chosen == old else 0
        self._looked = self._looked + 1 if self._why == WAS_CLOSE else 0
        self._not_before = step + PATIENCE * min(MOST, 2**self._confirmed)
        self._look_again = step + AGAIN * min(MOST, 2**self._looked) if len(close) > 1 else None
        self._settle(step, chosen, times, self._why)

    def _settle(self, step: int, chosen: str, times: Mapping[str, float], why: str) -> None:
        self.drains = chosen == self.dense and bool(self._before or len(self._found) > 1)
        self.current, self._before, self.settled, self._strikes = chosen, chosen, True, 0
        self._skip = SETTLE + (WINDOW if self.drains else 0)
        self._left = self._skip + WINDOW
        self.decisions = [*self.decisions[-9:], Decision(step, chosen, times, why)]

    # ---- watching ---------------------------------------------------------------------------------------------------

    def _watch(self, step: int, figures: Figures) -> None:
        """Look at a window of steps, and begin a trial if one is worth its time."""
        self._skip, self._left = 0, WINDOW
        known = self.times.setdefault(self.current, figures.step)
        changed = abs(figures.step / known - 1) > CHANGED
        self._strikes = self._strikes + 1 if changed else 0
        if self.dense not in self.times:  # a checkpoint that knows none
            self.try_again("nothing was known")
            return
        if step < self._not_before:
            return
        why = ""
        if self.current != self.dense:
            ratio = figures.probe / self._probe if figures.probe and self._probe else 1.0
            # Where nobody measured what dense steps waited, it is at least what sparse ones save.
            waited = self._waited or max(0.0, self.times[self.dense] - figures.step)
            expected = self.times[self.dense] - waited + waited * ratio
            near = expected < NEARER * self.times[self.dense] and expected < REACH * figures.step
            if near or (self._strikes >= STRIKES and expected < figures.step):
                why = f"dense steps may take {1e3 * expected:.1f} ms now, {self.current} takes {1e3 * figures.step:.1f}"
        elif self._strikes >= STRIKES:
            why = f"steps took {1e3 * figures.step:.1f} ms, not {1e3 * known:.1f}"
        elif figures.density < self._density / 2:
            why = f"sparse steps send {figures.density:.2g} of the entries now, not {self._density:.2g}"
        if not why and self._look_again is not None and step >= self._look_again:
            self.try_again(WAS_CLOSE, CLOSE)
        elif why:
            self.try_again(why)
        elif self._strikes >= STRIKES:  # it is so now, and dense steps are far away
            longer = max(0.0, figures.step - known)
            self.times = {name: seconds + longer for name, seconds in self.times.items()} | {self.current: figures.step}
            self._strikes = 0

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed training goes on with: plain types alone. A trial under way begins anew."""
        on = self.current if self.settled else self._before
        return {
            "on": on, "times": dict(self.times), "waited": self._waited, "probe": self._probe, "density": self._density,
        }  # fmt: skip

    @staticmethod
    def fits(state: Mapping[str, Any]) -> bool:
        """Return whether a state has all that ``load_state_dict`` asks for."""
        times = state.get("times", {})
        figures = [state.get(key) for key in ("workers", "waited", "probe", "density")]
        if not (isinstance(times, Mapping) and isinstance(state.get("on"), str)):
            return False
        numbers = [*figures, *times.values()]
        largest = sys.float_info.max
        return {*map(type, times)} <= {str} and all(
            type(one) in (int, float) and 0 <= one <= largest for one in numbers
        )

    def load_state_dict(self, state: Mapping[str, Any], step: int, same: bool) -> None:
        """Go on from a checkpoint.

        Args:
            same: with as many workers; else times mean nothing, and a trial follows.
        """
        on = state["on"]
        if on not in self.names or not same:
            self._before = on if on in self.names else ""
            self.times, self._first = {}, False
            self.try_again("resumed elsewhere")
            self._skip, self._left = self._skip + FIRST, self._left + FIRST  # DDP regroups its buckets here, too
            return
        self.times, self._waited = dict(state.get("times", {})), state["waited"]  # a distributed one has no empty ones
        self._probe, self._density = state["probe"], state["density"]
        self._not_before, self._look_again, self._first = step + PATIENCE, step + AGAIN, False
        self._before = self.current = on
        self._settle(step, on, self.times, "as before the checkpoint")
