"""Chaos on real processes: the laws hold, and a defect of the library is found."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sparsync_lab.chaos.conductor import run_in_temporary_folder
from sparsync_lab.chaos.methods import METHODS
from sparsync_lab.chaos.schedule import FAULTS, STEPS, Setting, draw_life, event_at
from sparsync_lab.cli.commands import app


def test_chaos_keeps_the_laws(tmp_path: Path) -> None:
    out = tmp_path / "chaos.csv"
    said = CliRunner().invoke(app, ["lab", "chaos", "--steps=150", "--workers=3", "--seed=1388", f"--out={out}"])
    assert said.exit_code == 0, said.output
    assert "all laws hold (seed 1388): step 150 reached" in said.output
    lives = out.read_text().splitlines()[1:]
    assert len(lives) > 2
    assert out.with_suffix(".log").read_text().count("\nlife ") == len(lives)


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
    from sparsync.engine import reducer

    scatter = reducer.scatter_result

    def moved(unit: Any, pending: Any) -> None:
        if os.environ["RANK"] == "1":
            unit.grad.mul_(1 + 2.0**-23)
        scatter(unit, pending)

    reducer.scatter_result = moved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "seed", "says"),
    [
        (lose_what_is_loaded, 0, "mass was lost in fc0.weight"),
        (undo_nothing, 2, "a step that was undone has changed the residual"),
        (add_in_another_order, 0, "the weights of rank [1] differ"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_chaos_finds_a_defect(defect: Callable[[], None], seed: int, says: str) -> None:
    *good, last = run_in_temporary_folder(150, 2, seed, prepare=defect)
    assert says in last.broken
    assert not any(result.broken for result in good)


def test_all_that_happens_follows_from_the_seed() -> None:
    setting = Setting(4, "topk", scaled=True, unused=True, frozen_joins=True)
    events = [event_at(3, step, setting) for step in range(2000)]
    assert events == [event_at(3, step, setting) for step in range(2000)]
    assert {event.kind for event in events} == STEPS.keys() - {"join"}
    lives = [draw_life(3, number, 0, 10_000, 4, None) for number in range(400)]
    assert lives == [draw_life(3, number, 0, 10_000, 4, None) for number in range(400)]
    assert {life.fault.kind for life in lives} == FAULTS.keys()
    assert {life.setting.method for life in lives} == METHODS.keys()
    assert {life.setting.size for life in lives} == {2, 3, 4, 5}
