"""The launcher of a chaotic training: starts all workers again from the last checkpoint, and sees that nobody hangs."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from sparsync_lab.chaos.checkpoint import newest, step_of
from sparsync_lab.chaos.life import live
from sparsync_lab.chaos.machine import EVERY, Machine
from sparsync_lab.chaos.result import LifeResult
from sparsync_lab.chaos.schedule import Life, Setting, draw_life
from sparsync_lab.chaos.told import names_the_cause
from sparsync_lab.chaos.training import Outcome
from sparsync_lab.training import local_workers
from sparsync_lab.training.local_workers import LocalWorkers, Worker

PRELOAD = (*local_workers.PRELOAD, "sparsync_lab.chaos.life", "sklearn.datasets", "torch.distributed.checkpoint")
MARGIN = 15.0  # seconds, for a busy machine that starts processes
STEP = 2.5  # seconds that a step of a life may take, on average
BUSY = "no answer within"  # what an error says where a deadline is over
PATIENT = 3.0  # times its deadline, for a life that is made again
TOLERATED = 3  # deadlines of a run that a busy machine may miss
STUCK = 10  # lives in a row that may come no further


def run_lives(
    steps: int,
    workers: int,
    seed: int,
    progress: Callable[[int], None] = lambda step: None,
    prepare: Callable[[], None] | None = None,
) -> Iterator[LifeResult]:
    """Train until there are so many steps, and yield what came of each life; the last may have broken a law.

    A deadline that workers miss though nothing has happened is tolerated where the machine was busy, a few times in a
    run: the life is made again with more time. If it is missed again, or the machine was not busy, somebody hangs.

    Args:
        progress: is told the step that the training is at.
        prepare: is called in every worker before it trains.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch tells of every broken connection, at length
    before: LifeResult | None = None
    setting: Setting | None = None
    number = missed = still = 0
    with TemporaryDirectory() as name:
        folder = Path(name)  # of checkpoints
        while (first := step_of(newest(folder))) < steps:
            life = draw_life(seed, number, first, steps, workers, setting)
            again = before is not None and before.missed is not None
            if before is not None and again:
                life = replace(before.life, first=first, deadline=PATIENT * before.life.deadline)
            known: dict[int, bytes] = {}
            if before is not None and before.life.setting == life.setting and life.method.same_bits:
                known = {step: digest for step, digest in before.digests.items() if step >= first}
            result = _run_life(life, folder, known, progress, prepare)
            result.digests = known | result.digests
            missed += result.missed is not None
            still = still + 1 if step_of(newest(folder)) == first else 0
            result.broken = result.broken or _judge(result, again, missed, still)
            yield result
            if result.broken:
                return
            before, setting, number = result, life.setting, life.number + 1


def _run_life(
    life: Life,
    folder: Path,
    known: dict[int, bytes],
    progress: Callable[[int], None],
    prepare: Callable[[], None] | None,
) -> LifeResult:
    began = time.monotonic()
    with LocalWorkers(life.setting.size, PRELOAD, life.store_on_rank_0) as workers:
        machine = Machine([process.pid or 0 for process in workers.processes])
        workers.call(_live_watched, life, folder, known, prepare)
        answers, hangs = _collect(workers, life, folder, progress, machine)
        if hangs:
            workers.kill()  # who hangs does not end by himself
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
    if not result.happened and any(BUSY in error for error in result.errors):
        result.missed = machine.evidence(life.deadline)
    result.broken = hangs or _broken(life, answers, result) or _bad_exits(workers, life)
    return result


def _judge(result: LifeResult, again: bool, missed: int, still: int) -> str:
    """Return why a life, no law of which is broken, is not to be followed by another; nothing if it is.

    Args:
        again: it was made again, with more time.
        missed: deadlines of the run, this one included.
        still: lives in a row, this one included, that have left no newer checkpoint.
    """
    life, evidence = result.life, result.missed
    what = f"life {life.number}: a deadline of {life.deadline:g} s was missed, though nothing had happened"
    if evidence is not None and not evidence.busy:
        return f"{what} and the machine was not busy ({evidence.describe()})"
    if evidence is not None and again:
        return f"{what}, once more, with more time ({evidence.describe()})"
    if evidence is not None and missed > TOLERATED:
        return f"{what}; that is the {missed}th of this run, and {TOLERATED} are tolerated ({evidence.describe()})"
    if still >= STUCK:
        return f"life {life.number}: {still} lives have ended before their first checkpoint, all from step {life.first}"
    return ""


def _longest(life: Life) -> float:
    """Return the seconds that a life may take."""
    return 4 * MARGIN + 3 * life.deadline + STEP * (min(life.last, life.fault.step + 2 * life.save_every) - life.first)


def _broken(life: Life, answers: dict[int, Outcome | str | int | None], result: LifeResult) -> str:
    """Return which law the answers break, if any."""
    fault = life.fault
    left = {rank for rank, answer in answers.items() if isinstance(answer, Outcome) and answer.by_torch}
    dies = {"kill": -signal.SIGKILL}.get(fault.kind, 1 if fault.kind.startswith("raise") else None)
    for rank, answer in answers.items():
        if isinstance(answer, str):
            return f"worker {rank} failed outside of its training: {answer}"
        if isinstance(answer, Outcome) and answer.end == "broken":
            return f"rank {rank}: {answer.error}"
        if isinstance(answer, Outcome) and answer.end == "failed" and not result.happened and result.missed is None:
            return f"rank {rank} failed, though nothing had happened: {answer.error}"
        if isinstance(answer, Outcome) and answer.end == "failed" and not answer.expected:
            return f"rank {rank} was not told by the library of a loss: {answer.error}"
        told = answer.error if isinstance(answer, Outcome) and answer.end == "failed" and result.happened else ""
        if told and rank not in {fault.rank, *left} and not names_the_cause(life, told, left):
            return f"rank {rank} was not told whom it happened to, and what: {told}"
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
    workers: LocalWorkers, life: Life, folder: Path, progress: Callable[[int], None], machine: Machine
) -> tuple[dict[int, Outcome | str | int | None], str]:
    """Return what every worker answers, and which law is broken if one does not."""
    answers: dict[int, Outcome | str | int | None] = {}
    stops = life.fault.kind.startswith("stop")
    patience, longest = 2 * life.deadline + MARGIN, _longest(life)
    began = heard = time.monotonic()
    while len(answers) < workers.count:
        waiting = [rank for rank in range(workers.count) if rank not in answers]
        victim = workers.processes[life.fault.rank]
        if stops and waiting == [life.fault.rank]:
            if life.fault.kind == "stop":
                victim.kill()
                return answers, ""
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGCONT)
        messages, now = workers.receive(waiting, EVERY), time.monotonic()
        machine.look()
        heard = now if messages else heard
        if now - heard > patience or now - began > longest:
            limit = f"ended within {longest:g} s" if now - began > longest else f"said anything for {patience:g} s"
            ranks = ", ".join(map(str, waiting))
            return answers, f"life {life.number} has not {limit}; ranks: {ranks}{_stacks(workers, waiting, folder)}"
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
