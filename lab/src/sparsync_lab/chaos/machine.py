"""How busy this machine is: a deadline that nobody meets is the machine's fault only where it had no time to spare."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
EVERY = 0.5  # seconds between two looks
IDLE, WAITING = 3, 4  # columns of the processors' times


@dataclass(frozen=True)
class Evidence:
    """What the machine did while a deadline passed.

    Args:
        idle: share of the processors' time in which they had nothing to do; ``None`` where that cannot be known.
        load: processes that wanted to run, in the last minute.
        cpu: seconds of processor time that the workers had meanwhile.
    """

    idle: float | None
    load: float
    cpu: float

    @property
    def busy(self) -> bool:
        """Whether the processors had less than half of their time to spare."""
        return self.load > (os.cpu_count() or 1) if self.idle is None else self.idle < 0.5

    def describe(self) -> str:
        idle = "" if self.idle is None else f"{self.idle:.0%} of the processors' time idle, "
        return f"{idle}load {self.load:.1f}, {self.cpu:.1f} s of it the workers'"


class Machine:
    """Remembers what the processors did lately.

    Args:
        pids: of the workers.
    """

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids
        self._looks: deque[tuple[float, list[int], float]] = deque(maxlen=1000)

    def look(self) -> None:
        """Note what the processors have done so far; to be called often."""
        now = time.monotonic()
        if not self._looks or now - self._looks[-1][0] >= EVERY:
            self._looks.append((now, _processors(), sum(map(_cpu, self.pids))))

    def evidence(self, seconds: float) -> Evidence:
        """Return what there is to say of the last so many seconds."""
        self.look()
        now, last, used = self._looks[-1]
        _, first, before = next(one for one in self._looks if now - one[0] <= seconds or one is self._looks[-1])
        times = [after - at for at, after in zip(first, last, strict=True)]
        idle = (times[IDLE] + times[WAITING]) / sum(times) if sum(times) else None
        return Evidence(idle, os.getloadavg()[0], max(0.0, used - before))


def _processors() -> list[int]:
    """Return the times of all processors together, by what they did; nothing where the system does not say."""
    return [int(word) for word in STAT.read_text().splitlines()[0].split()[1:9]] if STAT.exists() else []


def _cpu(pid: int) -> float:
    """Return the seconds of processor time that a process has had; none of one that is gone."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
