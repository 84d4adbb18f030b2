"""Chaos on real processes: the laws hold, and a defect of the library is found."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sparsync_lab.chaos.conductor import _broken, _judge, run_lives
from sparsync_lab.chaos.machine import Evidence, Machine
from sparsync_lab.chaos.methods import METHODS
from sparsync_lab.chaos.report import ChaosReport
from sparsync_lab.chaos.result import LifeResult
from sparsync_lab.chaos.schedule import FAULTS, STEPS, Event, Fault, Life, Setting, draw_life, event_at, method_at
from sparsync_lab.chaos.told import DDP, EXCHANGES, JOIN, OURS, TORCH, told_by_torch
from sparsync_lab.chaos.training import Outcome
from sparsync_lab.cli.commands import app

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_chaos_keeps_the_laws(tmp_path: Path) -> None:
    out = tmp_path / "chaos.csv"
    said = CliRunner().invoke(app, ["lab", "chaos", "--steps=150", "--workers=3", "--seed=1388", f"--out={out}"])
    assert said.exit_code == 0, said.output
    assert "all laws hold (seed 1388): step 150 reached" in said.output
    lives = out.read_text().splitlines()[1:]
    assert len(lives) > 2
    log = out.with_suffix(".log").read_text()
    assert log.count("\nlife ") == len(lives)
    last = log.splitlines()[-1]
    assert f"of {len(METHODS)} methods were met; how often what happened: " in last
    assert int(last.partition("step: plain ")[2].partition(",")[0]) > 50


def lose_what_is_loaded() -> None:
    from sparsync.feedback.residual import ParameterBuffers

    load = ParameterBuffers.load_state_dict

    def lossy(self: ParameterBuffers, state: dict[str, Any]) -> None:
        load(self, {name: tensor * (name != "fc0.weight") for name, tensor in state.items()})

    ParameterBuffers.load_state_dict = lossy  # type: ignore[assignment]


def undo_nothing() -> None:
    from sparsync.engine.worker import WorkerState

    WorkerState.undo = WorkerState.commit  # type: ignore[method-assign]


def add_in_another_order() -> None:
    """Let the second rank's result differ in a bit."""
    from sparsync.engine import unit_exchange

    scatter = unit_exchange.scatter_result

    def moved(unit: Any, buckets: Any) -> None:
        if os.environ["RANK"] == "1":
            for result in [place for _, place in unit.places] or [unit.grad]:
                result.mul_(1 + 2.0**-23)
        scatter(unit, buckets)

    unit_exchange.scatter_result = moved


@pytest.mark.parametrize(
    ("defect", "seed", "says"),
    [
        pytest.param(lose_what_is_loaded, 0, "mass was lost in fc0.weight", marks=pytest.mark.slow),
        (undo_nothing, 2, "a step that was undone has changed the residual"),
        (add_in_another_order, 0, "the weights of rank [1] differ"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_chaos_finds_a_defect(defect: Callable[[], None], seed: int, says: str) -> None:
    *good, last = run_lives(150, 2, seed, prepare=defect)
    assert says in last.broken
    assert not any(result.broken for result in good)


def say_nothing() -> None:
    """Let backward fail without a word of the library's own."""
    from sparsync.engine.reducer import Reducer

    Reducer.check = lambda *_, **__: None  # type: ignore[method-assign]


def lose_rank_1(point: str, *arguments: Any) -> Life:
    life = draw_life(*arguments)
    return replace(life, fault=Fault("kill", life.first + 5, 1, point), check_every=1, save_every=100)


@pytest.mark.parametrize(
    ("point", "defect", "told"),
    [("backward", None, "PeerLost: "), ("step", None, "RuntimeError: "), ("backward", say_nothing, "RuntimeError: ")],
    ids=["by the library", "by the ledger's exchange", "by nobody"],
)
def test_a_survivor_has_to_be_told_by_the_library(
    point: str, defect: Callable[[], None] | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsync_lab.chaos.conductor.draw_life", partial(lose_rank_1, point))
    result = next(run_lives(150, 2, 0, prepare=defect))
    ((error, count),) = result.errors.items()
    assert error.startswith(told)
    assert (count, result.happened) == (1, True)
    assert result.broken == ("" if defect is None else f"rank 0 was not told by the library of a loss: {error}")


def join_in_another_group() -> None:
    """Let the second step be in another process group, and all after it be those of ranks without data."""
    from sparsync_lab.chaos import events

    events.event_at = lambda seed, step, setting: Event("new group" if step == 1 else "join" if step > 1 else "plain")


@pytest.mark.slow
def test_a_rank_that_waits_for_a_stopped_one_under_join_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch, if it has no data: DDP asks who has some by an exchange of its own."""

    def stopped(*arguments: Any) -> Life:
        life = draw_life(*arguments)
        fault = Fault("stop", 2, 0, "backward")  # the rank that makes all steps of a join
        return replace(life, setting=Setting(3, "topk"), fault=fault, deadline=5.0, check_every=100, save_every=100)

    monkeypatch.setattr("sparsync_lab.chaos.conductor.draw_life", stopped)
    result = next(run_lives(150, 3, 0, prepare=join_in_another_group))
    assert (result.broken, result.happened) == ("", True)
    assert sum(result.errors.values()) == 2


def raised_in(*places: tuple[Path, str], error: str = "RuntimeError") -> Exception:
    """Return an error that was raised in the last file and function, which those before had called."""
    text = f"raise {error}()"
    for file, name in reversed(places):
        text = f"exec(compile({f'def {name}():{chr(10)}    {text}{chr(10)}{name}()'!r}, {str(file)!r}, 'exec'))"
    try:
        exec(text)
    except Exception as raised:
        return raised
    raise AssertionError(text)


def test_no_other_error_than_that_of_torchs_own_exchange_is_excused() -> None:
    attached: Any = object()
    users, ours = (Path(__file__), "look"), (OURS / "handle.py", "check")
    exchange, ddp = (EXCHANGES / "distributed_c10d.py", "all_reduce"), DDP / "distributed.py"
    backward = (TORCH / "autograd/graph.py", "_engine_run_backward")
    question, counting = (ddp, "_check_global_requires_backward_grad_sync"), (JOIN, "_get_num_nonjoined_procs")
    gradients = (ddp, "_match_all_reduce_for_bwd_pass")  # which the library exchanges
    excused = partial(told_by_torch, sync=attached, joining=False)
    assert excused(raised_in(users, exchange))
    assert not excused(raised_in(ours, exchange))
    assert not excused(raised_in(users, ours, exchange))
    assert not excused(raised_in(users))
    assert not excused(raised_in(users, backward))
    assert not excused(raised_in(users, exchange, error="KeyError"))
    for asked in (question, counting):
        for places in ((users, asked), (users, asked, exchange)):
            assert not excused(raised_in(*places))
            assert excused(raised_in(*places), joining=True)
    for places in ((users, (JOIN, "__exit__"), gradients), (users, backward), (users, (ddp, "forward"))):
        assert not excused(raised_in(*places), joining=True)
    assert excused(raised_in(users, backward), sync=None)
    assert not excused(raised_in(users), sync=None)


LOST = "PeerLost: exchange 3: the connection to a rank broke; ranks not heard from: "


@pytest.mark.parametrize(
    ("kind", "rank", "error", "left", "fine"),
    [
        ("kill", 1, f"{LOST}1", False, True),
        ("kill", 1, f"{LOST}1; steps committed: 7, rank 0 is behind", False, True),
        ("kill", 1, f"{LOST}2", False, False),  # whom torch has told nothing
        ("kill", 1, f"{LOST}2", True, True),
        ("kill", 1, f"{LOST}none; steps committed: 1", False, False),
        ("kill", 1, "PeerLost: exchange 3: the store is gone, and with it rank 0", False, False),
        ("kill", 0, "PeerLost: exchange 3: the store is gone, and with it rank 0", False, True),
        ("raise in compress", 1, "PeerFailed: rank 1: failed to compress: MemoryError: injected", False, True),
        ("raise in compress", 1, "PeerFailed: rank 0: failed to compress: MemoryError: injected", False, False),
        ("raise in exchange", 1, f"{LOST}1", False, False),
    ],
)
def test_the_library_has_to_name_whom_it_happened_to_and_what(
    kind: str, rank: int, error: str, left: bool, fine: bool
) -> None:
    """``left``: rank 2 has torch's word alone, and has left."""
    life = replace(draw_life(0, 0, 0, 100, 4, None), fault=Fault(kind, 5, rank), store_on_rank_0=True)
    answers: dict[int, Outcome | str | int | None] = {
        one: Outcome("failed", error=error, expected=True, by_torch=left and one == 2) for one in range(4)
    }
    if kind == "kill":
        answers[rank] = -signal.SIGKILL
    broken = _broken(life, answers, LifeResult(life, 5, 1.0, happened=True))
    assert ("was not told whom it happened to, and what" in broken, broken == "") == (not fine, fine)


def test_ci_runs_two_minutes_of_chaos_which_leave_the_results_as_they_are() -> None:
    done = subprocess.run(["make", "-n", "chaos-quick"], cwd=ROOT, capture_output=True, text=True, check=True)
    (command,) = [line for line in done.stdout.splitlines() if " lab chaos " in line]
    assert "--minutes 2 " in command
    assert command.endswith(" --out runs/lab-chaos.csv")
    assert "make lint test verify\nmake chaos-quick\n" in (ROOT / ".ci/run").read_text()
    assert "chaos-quick" in (ROOT / ".github/workflows/ci.yml").read_text()


def stall(seconds: float, at: int) -> None:
    """Let rank 1 be late for a deadline though nothing has happened: all raise."""
    from sparsync.engine.reducer import Reducer

    push, calls = Reducer.push, Counter[str]()

    def late(self: Reducer, bucket: Any) -> Any:
        calls["all"] += 1
        if os.environ["RANK"] == "1" and calls["all"] == at:
            time.sleep(seconds)
        return push(self, bucket)

    Reducer.push = late  # type: ignore[method-assign]


def quick(*arguments: Any) -> Life:
    """Return a life with a short deadline, which no fault ends."""
    life = draw_life(*arguments)
    return replace(life, deadline=4.0, fault=replace(life.fault, kind="restart"))


@pytest.mark.parametrize("busy", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["idle", "busy"])
def test_a_deadline_that_is_missed_again_is_a_hang(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has time to spare it is one at once; on a busy one the life is made again with more time."""
    monkeypatch.setattr("sparsync_lab.chaos.conductor.draw_life", quick)
    monkeypatch.setattr(Evidence, "busy", busy)
    results = list(run_lives(150, 2, 3, prepare=partial(stall, 14.0 if busy else 6.0, at=20)))
    assert [result.missed is not None for result in results] == [True] * (1 + busy)
    assert [result.life.deadline for result in results] == [4, 12][: 1 + busy]
    assert ("once more, with more time" if busy else "the machine was not busy") in results[-1].broken


@pytest.mark.slow
def test_a_deadline_that_a_busy_machine_misses_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made again with more time, the life comes to its end."""
    monkeypatch.setattr("sparsync_lab.chaos.conductor.draw_life", quick)
    monkeypatch.setattr(Evidence, "busy", True)
    results = list(run_lives(30, 2, 3, prepare=partial(stall, 6.0, at=20)))
    assert not any(result.broken for result in results)
    assert [result.missed is not None for result in results[:2]] == [True, False]
    report = ChaosReport(30, 2, 3, results)
    assert "1 deadlines missed without a fault (3 are tolerated" in report.summary()
    assert report.counts()["deadline missed"] == 1
    assert "a deadline was missed (" in results[0].describe()
    assert _judge(results[0], again=False, missed=3, still=9) == ""
    assert "that is the 4th of this run" in _judge(results[0], again=False, missed=4, still=1)
    assert "10 lives have ended before their first checkpoint" in _judge(results[1], again=False, missed=0, still=10)


def test_a_life_without_end_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsync_lab.chaos.conductor._longest", lambda life: 3.0)
    (result,) = run_lives(10_000, 2, 3)
    assert result.broken.startswith("life 0 has not ended within 3 s; ranks: 0, 1\nrank 0:\n")
    assert "in train\n" in result.broken  # where they are


def test_the_evidence_says_whether_the_machine_was_busy() -> None:
    machine = Machine([os.getpid()])
    machine.look()
    until = time.process_time() + 0.5
    while time.process_time() < until:
        pass
    seen = machine.evidence(10.0)
    assert 0.3 < seen.cpu < 2.0
    assert seen.idle is not None
    assert 0 <= seen.idle < 1
    assert replace(seen, idle=0.4).busy
    assert not replace(seen, idle=0.6).busy
    assert not replace(seen, idle=None, load=0.1).busy


def test_all_that_happens_follows_from_the_seed() -> None:
    setting = Setting(4, "topk", scaled=True, unused=True, frozen_joins=True)
    events = [event_at(3, step, setting) for step in range(2000)]
    assert events == [event_at(3, step, setting) for step in range(2000)]
    assert {event.kind for event in events} == STEPS.keys() - {"join"}
    lives = lives_of(3)
    assert lives == lives_of(3)
    assert {life.fault.kind for life in lives} == FAULTS.keys()
    assert {life.setting.size for life in lives} == {2, 3, 4, 5}


def lives_of(seed: int, count: int = 400) -> list[Life]:
    lives: list[Life] = []
    for number in range(count):
        lives.append(draw_life(seed, number, 0, 10_000, 4, lives[-1].setting if lives else None))
    return lives


def test_every_method_has_its_turn_before_one_comes_again() -> None:
    for seed in range(3):
        turns = [method for method, _ in groupby((life.setting.turn, life.setting.method) for life in lives_of(seed))]
        assert [turn for turn, _ in turns] == [*range(len(turns))]
        for first in range(0, len(turns) - len(METHODS), len(METHODS)):
            assert {method for _, method in turns[first : first + len(METHODS)]} == METHODS.keys()
    orders = {tuple(method_at(seed, turn) for turn in range(len(METHODS))) for seed in range(3)}
    assert len(orders) == 3
