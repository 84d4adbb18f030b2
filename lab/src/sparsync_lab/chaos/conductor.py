"""The launcher of a chaotic training: starts all workers again from the last checkpoint, and sees that nobody hangs."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from sparsync_lab.chaos.checkpoint import newest, step_of
from sparsync_lab.chaos.life import live
from sparsync_lab.chaos.schedule import Life, Setting, draw_life
from sparsync_lab.chaos.training import Outcome
from sparsync_lab.training import local_workers
from sparsync_lab.training.local_workers import LocalWorkers, Worker

PRELOAD = (*local_workers.PRELOAD, "sparsync_lab.chaos.life", "sklearn.datasets", "torch.distributed.checkpoint")
MARGIN = 15.0  # seconds, for a busy machine that starts processes
BUSY = "no answer within"  # what an error says where a deadline is over


@dataclass
class LifeResult:
    """What came of a life.

    Args:
        reached: the last step of any worker.
        broken: which law does not hold; empty if all do.
        happened: whether the fault has.
        unplanned: an error that no fault has caused: a deadline was over on a busy machine.
        errors: what survivors were told, and how many of them.
        looks: at the ledger; ``worst`` is its largest error, as a share of the bound.
        compared: steps that were made again, and came to the same bits.
    """

    life: Life
    reached: int
    seconds: float
    broken: str = ""
    happened: bool = False
    unplanned: bool = False
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
        return (
            f"life {life.number}: {life.setting.describe()}; steps {life.first}-{self.reached}, {self.seconds:.1f} s, "
            f"ledger {self.worst:.3f} of its bound at {self.looks} looks, {self.compared} steps again; "
            f"{'a deadline was over, unplanned; ' * self.unplanned}{end}{told and f' ({told})'}"
        )


def run_lives(
    steps: int,
    workers: int,
    seed: int,
    folder: Path,
    progress: Callable[[int], None] = lambda step: None,
    prepare: Callable[[], None] | None = None,
) -> Iterator[LifeResult]:
    """Train until there are so many steps, and yield what came of each life; the last may have broken a law.

    Args:
        folder: for checkpoints; empty.
        progress: is told the step that the training is at.
        prepare: is called in every worker before it trains.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch tells of every broken connection, at length
    before: LifeResult | None = None
    setting: Setting | None = None
    number = 0
    while (first := step_of(newest(folder))) < steps:
        life = draw_life(seed, number, first, steps, workers, setting)
        known: dict[int, bytes] = {}
        if before is not None and before.life.setting == life.setting and life.method.same_bits:
            known = {step: digest for step, digest in before.digests.items() if step >= first}
        result = _run_life(life, folder, known, progress, prepare)
        result.digests = known | result.digests
        yield result
        if result.broken:
            return
        before, setting, number = result, life.setting, number + 1


def run_in_temporary_folder(
    steps: int,
    workers: int,
    seed: int,
    progress: Callable[[int], None] = lambda step: None,
    prepare: Callable[[], None] | None = None,
) -> Iterator[LifeResult]:
    """Do as ``run_lives``, and keep no checkpoints."""
    with TemporaryDirectory() as folder:
        yield from run_lives(steps, workers, seed, Path(folder), progress, prepare)


def _run_life(
    life: Life,
    folder: Path,
    known: dict[int, bytes],
    progress: Callable[[int], None],
    prepare: Callable[[], None] | None,
) -> LifeResult:
    began = time.monotonic()
    with LocalWorkers(life.setting.size, PRELOAD, life.store_on_rank_0) as workers:
        workers.call(_live_watched, life, folder, known, prepare)
        answers, hangs = _collect(workers, life, folder, progress)
    outcomes = {rank: value for rank, value in answers.items() if isinstance(value, Outcome)}
    result = LifeResult(life, max((one.step for one in outcomes.values()), default=life.first), 0.0)
    result.seconds = time.monotonic() - began
    best = max(outcomes.values(), key=lambda one: one.step, default=Outcome())
    result.events, result.history = best.events, best.history
    for one in outcomes.values():
        result.digests |= one.digests
        result.errors[one.error] += bool(one.error)
    result.errors = +result.errors
    result.looks, result.compared = best.looks, best.compared
    result.worst, result.drift = (
        max((getattr(o, n) for o in outcomes.values()), default=0.0) for n in ("worst", "drift")
    )
    victim = answers.get(life.fault.rank)
    result.happened = life.fault.kind != "restart" and (not isinstance(victim, Outcome) or victim.faulted)
    result.unplanned = not result.happened and any(BUSY in error for error in result.errors)
    result.broken = hangs or _broken(life, answers, result) or _bad_exits(workers, life)
    return result


def _broken(life: Life, answers: dict[int, Outcome | str | int | None], result: LifeResult) -> str:
    """Return which law the answers break, if any."""
    fault = life.fault
    dies = {"kill": -signal.SIGKILL}.get(fault.kind, 1 if fault.kind.startswith("raise") else None)
    for rank, answer in answers.items():
        if isinstance(answer, str):
            return f"worker {rank} failed outside of its training: {answer}"
        if isinstance(answer, Outcome) and answer.end == "broken":
            return f"rank {rank}: {answer.error}"
        if isinstance(answer, Outcome) and answer.end == "failed" and not (result.happened or result.unplanned):
            return f"rank {rank} failed, though nothing had happened: {answer.error}"
        if not isinstance(answer, Outcome) and (rank != fault.rank or answer != dies):
            return f"worker {rank} ended with exit code {answer}"
    ends = {answer.end for answer in answers.values() if isinstance(answer, Outcome)}
    if len(ends) > 1:
        return f"some workers are done and others failed: {result.errors}"
    return ""


def _bad_exits(workers: LocalWorkers, life: Life) -> str:
    """Return which worker did not come to a clean end, if any."""
    for rank, process in enumerate(workers.processes):
        if process.exitcode != 0 and rank != life.fault.rank:
            return f"worker {rank} left with exit code {process.exitcode}, after all had been said"
    return ""


def _collect(
    workers: LocalWorkers, life: Life, folder: Path, progress: Callable[[int], None]
) -> tuple[dict[int, Outcome | str | int | None], str]:
    """Return what every worker answers, and which law is broken if one does not."""
    answers: dict[int, Outcome | str | int | None] = {}
    stops = life.fault.kind.startswith("stop")
    patience = 2 * life.deadline + MARGIN
    while len(answers) < workers.count:
        waiting = [rank for rank in range(workers.count) if rank not in answers]
        victim = workers.processes[life.fault.rank]
        if stops and waiting == [life.fault.rank]:
            if life.fault.kind == "stop":
                victim.kill()
                return answers, ""
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGCONT)
        messages = workers.receive(waiting, patience)
        if not messages:
            return answers, f"ranks {waiting} do not answer within {patience:g} s{_stacks(workers, waiting, folder)}"
        for message in messages:
            if message.kind == "report":
                progress(message.value)
            else:
                answers[message.rank] = message.value.traceback if message.kind == "failed" else message.value
    return answers, ""


def _stacks(workers: LocalWorkers, ranks: list[int], folder: Path) -> str:
    """Return where workers that hang are."""
    for rank in ranks:
        pid = workers.processes[rank].pid
        if pid is not None and workers.processes[rank].is_alive():
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGUSR1)
    time.sleep(1)
    return "".join(f"\nrank {rank}:\n{_stack_file(folder, rank).read_text()}" for rank in ranks)


def _short(error: str) -> str:
    """Return an error without what Gloo says of its own source."""
    text = re.sub(r"\[/\S+\] ", "", error.partition(" This is typically")[0])
    return text if len(text) < 160 else f"{text[:157]}..."


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}.txt"


def _live_watched(
    worker: Worker, life: Life, folder: Path, known: dict[int, bytes], prepare: Callable[[], None] | None
) -> Outcome:
    """Live, and write down where this worker is when it is asked."""
    with _stack_file(folder, worker.rank).open("w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        try:
            return live(worker, life, folder, known, prepare)
        finally:
            faulthandler.unregister(signal.SIGUSR1)
