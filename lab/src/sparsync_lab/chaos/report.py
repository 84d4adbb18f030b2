"""What came of a chaotic training: counts, a row for every life, and what happened last where a law was broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from sparsync_lab.chaos.conductor import TOLERATED
from sparsync_lab.chaos.methods import METHODS
from sparsync_lab.chaos.result import LifeResult
from sparsync_lab.environment import environment

TAIL = 12  # lives, and steps of the last of them


@dataclass
class ChaosReport:
    """The lives of a training, so far."""

    steps: int
    workers: int
    seed: int
    results: list[LifeResult] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"chaos: {self.steps:,} steps, {self.workers} workers, seed {self.seed}"

    @property
    def broken(self) -> str:
        """Which law was broken; empty if none was."""
        return self.results[-1].broken if self.results else ""

    def counts(self) -> Counter[str]:
        """Return how often everything happened: what ended lives, what became of steps."""
        ends = Counter(_end(result) for result in self.results)
        changes = Counter[str]()
        for before, now in zip(self.results, self.results[1:], strict=False):
            old, new = before.life.setting, now.life.setting
            changes["restart with another number of workers"] += old.size != new.size
            changes["restart with another method"] += old.method != new.method
            changes["restart with a loss scaler, or without"] += old.scaled != new.scaled
        events = sum((result.events for result in self.results), Counter[str]())
        return ends + changes + Counter({f"step: {kind}": often for kind, often in events.items()})

    def describe_counts(self) -> str:
        """Return them as a line for the log, with how many of the methods were met."""
        met = len({result.life.setting.method for result in self.results})
        often = ", ".join(f"{what} {count:,}" for what, count in self.counts().items())
        return f"{met} of {len(METHODS)} methods were met; how often what happened: {often}"

    def summary(self) -> str:
        """Return a sentence or two."""
        made = sum(result.reached - result.life.first for result in self.results)
        looks = sum(result.looks for result in self.results)
        again = sum(result.compared for result in self.results)
        worst = max((result.worst for result in self.results), default=0.0)
        drift = max((result.drift for result in self.results), default=0.0)
        reached = max((result.reached for result in self.results), default=0)
        return (
            f"{'a law was BROKEN' if self.broken else 'all laws hold'} (seed {self.seed}): step {reached:,} reached in "
            f"{len(self.results)} lives, {made:,} steps made, {looks:,} looks at the ledger, whose largest error was "
            f"{worst:.3f} of its bound (errors of a life add up to {drift:.1e} at most), {again:,} steps made again to "
            f"the same bits, {sum(result.missed is not None for result in self.results)} deadlines missed without a "
            f"fault ({TOLERATED} are tolerated, on a busy machine)"
        )

    def tail(self) -> str:
        """Return what happened last, for whoever looks for the cause; the seed makes all of it again."""
        lives = "\n".join(result.describe() for result in self.results[-TAIL:])
        return f"{lives}\n{'; '.join(self.results[-1].history[-TAIL:])}\n{self.broken}\nseed {self.seed}"

    def write(self, path: Path) -> None:
        """Write a row for every life."""
        where, lines = environment(), []
        for result in self.results:
            life, setting = result.life, result.life.setting
            lines.append(
                {
                    "life": life.number,
                    "seed": self.seed,
                    "workers": setting.size,
                    "method": setting.method,
                    "loss_scaler": setting.scaled,
                    "can_undo": setting.undoes,
                    "unused_parameters": setting.unused,
                    "checkpoints": life.saves,
                    "first_step": life.first,
                    "reached": result.reached,
                    "end": _end(result),
                    "seconds": f"{result.seconds:.1f}",
                    "looks": result.looks,
                    "worst_of_bound": f"{result.worst:.4f}",
                    "steps_again": result.compared,
                    "deadline_missed": result.missed is not None,
                    "machine_then": result.missed.describe() if result.missed is not None else "",
                    "broken": bool(result.broken),
                    **where,
                }
            )
        from sparsync_lab.report import write_csv  # which brings matplotlib

        write_csv(path, lines)


def _end(result: LifeResult) -> str:
    if result.broken:
        return "broken"
    if result.missed is not None:
        return "deadline missed"
    if result.reached >= result.life.last:
        return "done"
    return result.life.fault.kind if result.happened else "restart"
