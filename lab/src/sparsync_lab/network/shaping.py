"""Rates of links: how they are written, and the token bucket that holds a link to one."""

from __future__ import annotations

import re
from dataclasses import dataclass

UNITS = {"mbit": 1e6, "gbit": 1e9}
LOWEST, HIGHEST = 20e6, 100e9  # the lowest at which a bucket of a millisecond holds a packet
BURST_S = 0.001  # what a link that was idle sends at once, in seconds of its rate
QUEUE = 4 * 2**20  # bytes that wait at an end of a link before packets are dropped, as in a switch


@dataclass(frozen=True, order=True)
class Rate:
    """Bits a second, headers of packets included."""

    bits: float

    def __post_init__(self) -> None:
        if not LOWEST <= self.bits <= HIGHEST:
            raise ValueError(f"a rate must be from 20Mbit to 100Gbit, got {self.bits:g} bits a second")

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Return a rate from words such as ``100Mbit`` and ``2.5Gbit``."""
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([MGmg]bit)(?:/s)?", text.strip())
        if found is None:
            raise ValueError(f"a rate is a number and Mbit or Gbit, as in 100Mbit, got {text!r}")
        return cls(float(found[1]) * UNITS[found[2].lower()])

    def __str__(self) -> str:
        return f"{self.bits / 1e9:g}Gbit" if self.bits >= 1e9 else f"{self.bits / 1e6:g}Mbit"

    @property
    def mbit(self) -> float:
        return self.bits / 1e6

    @property
    def token_bucket(self) -> str:
        """Return tc's description of a queue that lets through so much.

        What its bucket holds passes as if there were no link, so that must be little; but timers that ring every
        millisecond never reach the rate with less than that. So a step comes out at most a millisecond too short.
        """
        return f"tbf rate {self.bits:.0f}bit burst {BURST_S * self.bits / 8:.0f} limit {QUEUE}"
