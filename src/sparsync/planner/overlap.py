"""A step as a timeline: backward hands over bucket after bucket, and exchanges run in order beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Job(NamedTuple):
    """An exchange as the timeline sees it; seconds.

    Args:
        bucket: with which it can begin.
        select: what choosing its entries takes, on the thread that runs backward (or beside it, see ``Timeline``).
        local: coding, decoding and summing.
        network: on the network.
    """

    bucket: int
    select: float
    local: float
    network: float


@dataclass(frozen=True)
class Timeline:
    """When backward has which bucket ready.

    Args:
        forward: seconds before backward begins.
        ready: of every bucket, seconds after backward began, in their order, if nothing stood in its way.
        backward: seconds of all of it.
        blocking: choosing entries keeps backward waiting, as on a CPU; on a GPU it runs beside.
    """

    forward: float
    ready: tuple[float, ...]
    backward: float
    blocking: bool = True

    def step_seconds(self, jobs: Sequence[Job]) -> float:
        """Return how long a step takes whose exchanges, in this order, are one after another."""
        delay = free = 0.0  # of backward; when the last exchange is over
        for job in jobs:
            begin = self.ready[job.bucket] + delay
            if self.blocking:
                delay += job.select
                begin += job.select
                free = max(free, begin) + job.local + job.network
            else:
                free = max(free, begin) + job.select + job.local + job.network
        return self.forward + max(self.backward + delay, free)
