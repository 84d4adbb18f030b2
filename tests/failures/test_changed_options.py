"""A training is started again with other options than those its checkpoint was made with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from sparsync import GaussianK, Layout, Selecting, ThresholdK, TopK
from tests.failures.ddp_training import ALL_SPARSE, SIZES, Chain, digest, logged, loss_of, training

SCALE = 2.0**12


def case_scaler(rank: int, size: int, scaled: list[bool], compressor: Any, **options: Any) -> list[str]:
    """Make three steps for each of ``scaled``, with a loss scaler or without, from the last one's checkpoint."""
    model, state = Chain(SIZES), None
    for start, with_scaler in enumerate(scaled):
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if with_scaler else None
        with training(model, compressor, scaler=scaler, transactional=True, **options) as run:
            if state is not None:
                run.handle.load_state_dict(state)
            for step in range(3 * start, 3 * start + 3):
                run.step(lambda m, step=step: loss_of(m, rank, step), scaler)
            state = run.handle.state_dict()
    assert state is not None
    kept = [
        tensor / (state["loss_scale"] or 1.0)
        for tensor in (*state["residuals"].values(), *state["velocities"].values())
    ]
    return [digest(model.parameters()), digest(kept)]


@pytest.mark.parametrize("momentum", ["keep", "correct"])
def test_a_loss_scaler_may_come_and_go(worlds: Any, momentum: str) -> None:
    """What is kept follows: the scale is a power of 2, so that it changes no bit of the training."""
    options: dict[str, Any] = {"compressor": ThresholdK(0.05), "momentum": momentum}
    never = worlds[2].run(case_scaler, scaled=[False, False, False], **options)
    assert worlds[2].run(case_scaler, scaled=[False, True, False], **options) == never


@dataclass(frozen=True)
class Remembering(Selecting):
    """A compressor whose state is of another form with other options."""

    wide: bool = False

    def init(self, layout: Layout) -> dict[str, dict[str, torch.Tensor]]:
        dtype = torch.int64 if self.wide else torch.int32
        return {s.name: {"ages": torch.zeros(s.numel, dtype=dtype)} for s in layout.segments}

    def select(self, u: torch.Tensor, k: int) -> torch.Tensor:
        return u.abs().topk(k).indices


OTHERS: list[tuple[Any, str]] = [  # each goes on from the one before, whose thresholds are not known to it
    (GaussianK(0.05, refine=True), ""),
    (ThresholdK(0.05), "GaussianK"),
    (TopK(0.05), "ThresholdK"),
    (ThresholdK(0.03), "TopK"),
    (GaussianK(0.05), "ThresholdK"),
    (GaussianK(0.05, refine=True), ""),  # there are none
    (Remembering(0.05), "GaussianK"),
    (Remembering(0.04), ""),  # they go on
    (Remembering(0.05, wide=True), "Remembering with other options"),
]


def case_other_compressor(rank: int, size: int) -> None:
    """Thresholds mean nothing to another compressor, and what is in them has other names."""
    model, state = Chain(SIZES), None
    for start, (compressor, unknown) in enumerate(OTHERS):
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1)
        with logged() as told, training(model, compressor, scaler=scaler, **ALL_SPARSE) as run:
            if state is not None:
                run.handle.load_state_dict(state)
                before = run.residuals()
                assert all(torch.equal(before[name], residual) for name, residual in state["residuals"].items())
                assert bool(run.handle.state_dict()["compressor"]) == bool(state["compressor"] and not unknown)
            sentence = f"the checkpoint's thresholds are of {unknown}, and begin anew; residuals go on"
            assert [text for text in told if "thresholds" in text] == [sentence] * bool(unknown and rank == 0)
            for step in range(3 * start, 3 * start + 3):
                run.step(lambda m, step=step: loss_of(m, rank, step), scaler)
            state = run.handle.state_dict()


def test_another_compressor_goes_on_with_the_residual(worlds: Any) -> None:
    worlds[2].run(case_other_compressor)


def case_save(rank: int, size: int, per_node: int) -> dict[str, Any]:
    with training(Chain(SIZES), ThresholdK(0.05), per_node=per_node, **ALL_SPARSE) as run:
        for step in range(3):
            run.step(lambda m, step=step: loss_of(m, rank, step))
        return run.handle.state_dict()


def case_load_and_save(rank: int, size: int, states: list[dict[str, Any]], folder: str, **options: Any) -> list[str]:
    """Load, save at once and after a step, and load what was saved; return the names of thresholds."""
    with training(Chain(SIZES), ThresholdK(0.05), **options) as run:
        run.handle.load_state_dict(states)
        names = sorted(run.handle.state_dict()["compressor"])
        for number in range(2):
            place = Path(folder) / str(number)
            dcp.save({"sync": run.handle.stateful()}, checkpoint_id=place)
            before = run.handle.state_dict()
            dcp.load({"sync": run.handle.stateful(place)}, checkpoint_id=place)
            for name, residual in before["residuals"].items():
                assert torch.equal(run.residuals()[name], residual), name
            run.step(lambda m, number=number: loss_of(m, rank, 3 + number))
    return names


@pytest.mark.parametrize(("old", "per_node"), [(2, 1), (4, 2)], ids=["fewer ranks", "nodes"])
def test_what_was_loaded_can_be_saved_by_all_ranks_together(
    worlds: Any, tmp_path: Path, old: int, per_node: int
) -> None:
    """Of more ranks than there were some have inherited nothing, or thresholds of a rank that had none."""
    states = worlds[old].run(case_save, per_node=per_node)
    names = worlds[5].run(case_load_and_save, states=states, folder=str(tmp_path), dense_below=100)
    assert all(one == names[0] and one for one in names)


def case_save_velocities(rank: int, size: int, folder: str) -> None:
    with training(Chain(SIZES), TopK(0.05), momentum="correct") as run:
        run.step(lambda m: loss_of(m, rank, 0))
        dcp.save({"sync": run.handle.stateful()}, checkpoint_id=folder)


def case_refused(rank: int, size: int, folder: str, per_node: Any) -> str:
    with training(Chain(SIZES), TopK(0.05), per_node=per_node) as run:
        with pytest.raises(ValueError, match="the checkpoint holds velocities"):
            dcp.load({"sync": run.handle.stateful(folder)}, checkpoint_id=folder)
        run.step(lambda m: loss_of(m, rank, 0))  # which compares what the ranks go on from
        return digest(run.model.parameters())


@pytest.mark.parametrize("per_node", [1, [[0, 1, 2], [3, 4]]], ids=["ranks", "nodes"])
def test_what_is_refused_is_refused_by_all_ranks(worlds: Any, tmp_path: Path, per_node: Any) -> None:
    """Those who inherit nothing of it, and those who are led and keep nothing, too; and all may go on without."""
    worlds[2].run(case_save_velocities, folder=str(tmp_path))
    assert len({*worlds[5].run(case_refused, folder=str(tmp_path), per_node=per_node)}) == 1


def case_save_after_join(rank: int, size: int, folder: str) -> Any:
    """Rank 0 runs out of data before the loss scale grows; return the mean of what is kept, in the loss's own units."""
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    with training(Chain(SIZES), TopK(0.05), scaler=scaler, joined="freeze") as run:
        with run.ddp.join():
            for step in range(1 if rank == 0 else 4):
                run.step(lambda m, step=step: loss_of(m, rank, step), scaler)
        state = run.handle.state_dict()
        dcp.save({"sync": run.handle.stateful()}, checkpoint_id=folder)
        return state


def means(states: list[Any]) -> dict[str, torch.Tensor]:
    """Return the mean residuals, in the loss's own units."""
    return {
        name: sum(state["residuals"][name].double() / state["loss_scale"] for state in states) / len(states)
        for name in states[1]["residuals"]
    }


def case_load_after_join(rank: int, size: int, folder: str, states: Any) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    with training(Chain(SIZES), TopK(0.05), scaler=scaler) as run:
        if states:
            run.handle.load_state_dict(states)
        else:
            dcp.load({"sync": run.handle.stateful(folder)}, checkpoint_id=folder)
        return run.handle.state_dict()


@pytest.mark.parametrize("size", [3, 2])
@pytest.mark.parametrize("sharded", [False, True], ids=["list", "distributed"])
def test_ranks_may_be_saved_in_different_loss_scales(worlds: Any, tmp_path: Path, size: int, sharded: bool) -> None:
    """A rank that has joined does not follow the loss scale of the others."""
    states = worlds[3].run(case_save_after_join, folder=str(tmp_path))
    assert len({state["loss_scale"] for state in states}) == 2
    loaded = worlds[size].run(case_load_after_join, folder=str(tmp_path), states=None if sharded else states)
    saved = means(states)
    for name, mean in means(loaded).items():
        torch.testing.assert_close(mean, saved[name], rtol=1e-5, atol=1e-7)
