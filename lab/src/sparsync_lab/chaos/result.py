"""What came of a life, and how the log tells it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from sparsync_lab.chaos.machine import Evidence
from sparsync_lab.chaos.schedule import Life


@dataclass
class LifeResult:
    """What came of a life.

    Args:
        reached: the last step of any worker.
        broken: which law does not hold; empty if all do.
        happened: whether the fault has.
        missed: what the machine did while a deadline passed that no fault had made the workers miss.
        errors: what survivors were told, and how many of them.
        looks: at the ledger; ``worst`` is its largest error, as a share of the bound.
        compared: steps that were made again, and came to the same bits.
    """

    life: Life
    reached: int
    seconds: float
    broken: str = ""
    happened: bool = False
    missed: Evidence | None = None
    errors: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    history: list[str] = field(default_factory=list)
    digests: dict[int, bytes] = field(default_factory=dict)
    looks: int = 0
    worst: float = 0.0
    drift: float = 0.0
    compared: int = 0

    def describe(self) -> str:
        """Return a line for the log."""
        life = self.life
        end = life.fault.describe() if self.happened else "restart"
        end = "done" if self.reached >= life.last else end
        end = f"BROKEN: {self.broken}" if self.broken else end
        told = "; ".join(f"{count} told {_short(error)}" for error, count in self.errors.items())
        missed = f"a deadline was missed ({self.missed.describe()}); " if self.missed is not None else ""
        return (
            f"life {life.number}: {life.setting.describe()}; steps {life.first}-{self.reached}, {self.seconds:.1f} s, "
            f"ledger {self.worst:.3f} of its bound at {self.looks} looks, {self.compared} steps again; "
            f"{missed}{end}{told and f' ({told})'}"
        )


def _short(error: str) -> str:
    """Return an error without what Gloo says of its own source."""
    text = re.sub(r"\[/\S+\] ", "", error.partition(" This is typically")[0])
    return text if len(text) < 160 else f"{text[:157]}..."
