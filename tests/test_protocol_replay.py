"""The engine does what the model of the protocol says: trainings with faults, replayed by real processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import settings

from sparsync import StepFailed, TopK
from sparsync.engine.step_vote import describe
from sparsync.schedule import Constant
from tests.failures.reducers import error_of, make_reducer, push_all
from tests.protocol_model import DEADLINE, FAILED, IDLE, NONFINITE, VOTING, WAITING, Protocol
from tests.world import World

SIZE, K, STEPS = 16, 4, 3
BREAKS = "breaks off"  # a rank begins no exchange
WRITES = "cannot write"  # a rank has all messages, and cannot write the result
KILLED = "is killed"  # before it sends; in worlds of their own
FAULTS = ("none", NONFINITE, FAILED, BREAKS, WRITES)


@dataclass(frozen=True)
class Trace:
    """A training in which something happens to one rank, and from which states it is started again."""

    seed: int
    transactional: bool
    fault: str
    step: int
    victim: int
    picks: tuple[int, ...]

    def gradient(self, rank: int, step: int) -> tuple[int, ...]:
        rng = Random(f"{self.seed} {rank} {step}")
        return tuple(rng.randrange(-20_000, 20_000) for _ in range(SIZE))


def traces_of(ranks: int, count: int) -> list[Trace]:
    """Draw traces; every fault is there."""
    rng, found = Random(ranks), []
    for number in range(count):
        fault, step = FAULTS[number % len(FAULTS)], rng.randrange(STEPS - 1)
        last = step if fault in (FAILED, BREAKS, WRITES) else STEPS
        pick = rng.randrange(last + 1)
        picks = (
            (pick,) * ranks if rng.random() < 0.6 or not last else tuple(rng.randrange(last + 1) for _ in range(ranks))
        )
        found.append(Trace(number, bool(rng.randrange(2)), fault, step, rng.randrange(ranks), picks))
    return found


def modelled(trace: Trace, ranks: int) -> list[Any]:
    """Return what the model says of every rank: its steps, what it keeps and has applied, and what it knows of others;
    then the same after one more step from the states that were picked, or nothing if these do not go together."""
    model = Protocol(ranks, SIZE, K, trace.transactional)
    everybody = range(ranks)

    def exchange(step: int, flags: dict[int, str], silent: int = -1, breaks: int = -1) -> None:
        for number in everybody:
            gradient = trace.gradient(number, step)
            whole = flags.get(number) != NONFINITE
            model.send(number, gradient if whole else (0, *gradient[1:]), flags.get(number, ""))
        for source in everybody:
            for to in everybody:
                if source not in (to, silent):
                    model.deliver(source, to)
        if breaks >= 0:
            model.fail(breaks)
        for number in everybody:
            if model.ranks[number].phase == WAITING and model.can_complete(number):
                model.complete(number)
            elif model.ranks[number].phase == WAITING:
                model.stop(number)
        for number in everybody:
            if model.ranks[number].phase == IDLE:
                model.save(model.ranks[number])

    for step in range(STEPS):
        here = trace.fault if step == trace.step else "none"
        if here == KILLED:
            model.crash(trace.victim)
            for number in everybody:
                if number != trace.victim:
                    model.send(number, trace.gradient(number, step))
            model.tick(DEADLINE)
            for number in everybody:
                if model.can_miss(number) and number != trace.victim:
                    model.miss(number)
        elif here == BREAKS:
            exchange(step, {trace.victim: FAILED}, trace.victim, trace.victim)
        elif here == WRITES:
            exchange(step, {}, breaks=trace.victim)
            for number in everybody:  # who goes on finds the alarm, and nobody's message
                if number != trace.victim:
                    model.send(number, trace.gradient(number, step + 1))
                    model.stop(number)
        else:
            exchange(step, {trace.victim: here} if here in (FAILED, NONFINITE) else {})
        if any(rank.phase != IDLE for rank in model.ranks):
            break
    for number in everybody:
        if model.ranks[number].phase == VOTING:
            model.close(number)
    found: list[Any] = [
        (
            rank.completed,
            rank.residual,
            total(rank.weights),
            describe(rank.known, ranks, frozenset(model.lost)) if model.alarm and rank.known else "",
        )
        for rank in model.ranks
    ]
    if not trace.picks:
        return found
    if not model.restart(list(trace.picks)):
        return [*found, *[None] * ranks]
    exchange(STEPS, {})
    return [*found, *[(rank.completed, rank.residual, total(rank.weights)) for rank in model.ranks]]


def total(weights: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*weights, strict=True)))


def case_replay(rank: int, size: int, traces: list[Trace]) -> list[list[Any]]:
    return [replayed(trace, rank, size) for trace in traces]


def replayed(trace: Trace, rank: int, size: int) -> list[Any]:
    """Do in this process what the model did."""
    saved, weights = {}, torch.zeros(SIZE, dtype=torch.float64)

    def started() -> Any:
        options = {"transactional": trace.transactional, "density": Constant(K / SIZE), "deadline": 40.0}
        reducer = make_reducer({"a": torch.zeros(SIZE, 1)}, TopK(K / SIZE), **options)
        if trace.fault != KILLED:  # which the backend notices by itself
            reducer.channel.monitor.patience = 0.5  # seconds, to hear of an alarm soon
        return reducer

    def step_of(reducer: Any, step: int, fault: str = "none") -> None:
        gradient = torch.tensor(trace.gradient(rank, step), dtype=torch.float32)
        if fault == NONFINITE:
            gradient[0] = torch.nan
        with pytest.MonkeyPatch.context() as broken:
            if fault == FAILED:
                broken.setattr("sparsync.engine.unit_exchange.compress_unit", None)
            elif fault == WRITES:
                broken.setattr(reducer.completion, "finish", None)
            elif fault == KILLED:
                os._exit(9)
            elif fault == BREAKS:
                reducer.errors.fail(StepFailed("the backward broke off"))
                reducer.check()
            (result,) = push_all(reducer, [("a", gradient)])
        if result.isfinite().all():
            weights.add_(result.double() * size)

    def state_of(reducer: Any) -> tuple[Any, ...]:
        state = reducer.state_dict()
        kept = state["residuals"].get("a", torch.zeros(SIZE))
        return state["step"], tuple(map(int, kept.flatten().tolist())), tuple(map(round, weights.tolist()))

    def save(reducer: Any) -> None:
        saved[reducer.state_dict()["step"]] = reducer.state_dict(), weights.clone()

    reducer, said = started(), ""
    save(reducer)
    for step in range(STEPS):
        mine = trace.fault if (step, rank) == (trace.step, trace.victim) else "none"
        raised, _ = error_of(step_of, reducer, step, mine)
        save(reducer)  # after an error, too: of the steps that were completed
        if raised != "none":
            _, said = error_of(reducer.check)
            break
    found = [(*state_of(reducer), said)]
    reducer.close()
    if not trace.picks:
        return found
    reducer = started()
    state, before = saved[trace.picks[rank]]
    weights.copy_(before)
    reducer.load_state_dict(state)
    kind, _ = error_of(step_of, reducer, STEPS)
    if kind != "none":
        found.append(error_of(reducer.check)[0])
    else:
        found.append(state_of(reducer))
    reducer.close()
    return found


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_the_engine_does_what_the_model_says(worlds: dict[int, World], ranks: int) -> None:
    traces = traces_of(ranks, max(10, settings().max_examples // 4))
    answers = worlds[ranks].run(case_replay, traces=traces)
    for number, trace in enumerate(traces):
        expected = modelled(trace, ranks)
        for rank in range(ranks):
            (*kept, said), after = answers[rank][number]
            *wanted, votes = expected[rank]
            assert kept == wanted, (trace, rank)
            assert said.endswith(votes), (trace, rank, said)
            assert bool(said) == (trace.fault in (FAILED, BREAKS, WRITES)), (trace, rank, said)
            again = expected[ranks + rank]
            assert after == ("Mismatch" if again is None else again), (trace, rank)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "victim", "transactional"), [(2, 1, True), (3, 2, False), (4, 1, True)])
def test_survivors_of_a_kill_are_where_the_model_says(ranks: int, victim: int, transactional: bool) -> None:
    trace = Trace(7, transactional, KILLED, 1, victim, ())
    answers = World.once(ranks, case_replay, traces=[trace])
    assert answers[victim] == (False, "died with exit code 9")
    for rank, (finished, found) in enumerate(answers):
        if rank != victim:
            assert finished, found
            (((*kept, said),),) = found
            *wanted, votes = modelled(trace, ranks)[rank]
            assert kept == wanted
            assert f"ranks not heard from: {victim}" in said
            assert said.endswith(votes)
