"""Checkpoints: saved on one world size, loaded on another, and refused where they do not fit."""

from __future__ import annotations

import copy
import gc
import io
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import ThresholdK
from sparsync.engine.bucketing import Bucket
from tests.failures.checked_training import inputs, kept, mean_over_ranks, mlp, square, train
from tests.failures.reducers import error_of, make_reducer, push_all


def case_save(rank: int, size: int, compressor: str) -> dict[str, Any]:
    ddp = DistributedDataParallel(mlp())
    handle = sparsync.attach(ddp, compressor, density=0.02)
    train(ddp, handle, inputs(rank, 8, 40))
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    handle.detach()
    del ddp
    gc.collect()
    return {"file": file.getvalue()}


def case_load(rank: int, size: int, files: list[bytes], compressor: str) -> None:
    states = [torch.load(io.BytesIO(file), weights_only=True) for file in files]
    ddp = DistributedDataParallel(mlp())
    handle = sparsync.attach(ddp, compressor, density=0.02)
    handle.load_state_dict(states if size != len(states) else states[rank])
    own = handle.state_dict()
    assert own["step"] == states[0]["step"] == 4
    for name, p in ddp.module.named_parameters():
        if name in states[0]["residuals"]:
            old = torch.stack([state["residuals"][name].double() for state in states]).mean(0)
            assert old.any()
            torch.testing.assert_close(mean_over_ranks(kept(handle, name, p)), old, rtol=1e-5, atol=1e-9)
    if size == len(states):
        assert own["residuals"].keys() == states[rank]["residuals"].keys()
        for name, residual in own["residuals"].items():
            assert torch.equal(residual, states[rank]["residuals"][name])
    train(ddp, handle, inputs(rank, 8, 40, steps=2))
    handle.detach()
    del ddp
    gc.collect()


@pytest.mark.each_value
@pytest.mark.parametrize("compressor", ["topk", "threshold"])
@pytest.mark.parametrize(("old", "new"), [(2, 2), (2, 3), (5, 2), (3, 1)])
def test_a_checkpoint_loads_on_any_world_size(worlds, old, new, compressor):
    files = [answer["file"] for answer in worlds[old].run(case_save, compressor=compressor)]
    worlds[new].run(case_load, files=files, compressor=compressor)


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(inner) for key, inner in value.items())
    return value is None or type(value) in (int, float, str, bool, Tensor)


def without(state: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in keys}


def together(state: dict[str, Any], **other: Any) -> list[dict[str, Any]]:
    """Return the states of two ranks, the second of which says something else."""
    return [state | {"workers": 2, "rank": 0}, state | {"workers": 2, "rank": 1} | other]


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    parameters = {"a": torch.zeros(40, 5), "b": torch.zeros(30, 1)}
    reducer = make_reducer(parameters, ThresholdK(), alone=True)
    push_all(reducer, [("a", torch.randn(200)), ("b", torch.randn(30))])
    torch.save(reducer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert plain(state)
    assert state["schema"] == 2
    residuals = copy.deepcopy(state["residuals"])

    for wrong, says in [
        (state | {"schema": 99}, "schema 2: it says 99"),
        ({"weight": torch.zeros(3)}, "not a sparsync state"),
        (state | {"workers": 4, "rank": 2}, "rank 2 of 4, and here is rank 0 of 1"),
        ([], "list is empty"),
        ([state | {"workers": 2, "rank": 1}, state | {"workers": 2, "rank": 0}], "ranks 0 to 1, in order"),
        ([state | {"workers": 2, "rank": 0}], "ranks 0 to 1, in order"),
        (state | {"residuals": {"c": torch.zeros(3)}}, "'c', which this model does not have"),
        (state | {"residuals": {"a": torch.zeros(5, 40)}}, r"'a' has shape \(5, 40\)"),
        (without(state, "velocities"), "not whole: it lacks 'velocities'"),
        (without(state, "step", "training"), "not whole: it lacks 'step', 'training'"),
        (state | {"residuals": without(state["residuals"], "b")}, "not whole: residuals: b is missing"),
        (state | {"compressor": {}}, "not whole: compressor: .* is missing"),
        (state | {"residuals": residuals | {"a": residuals["a"] / 0}}, "damaged: residuals: a is not finite"),
        (together(state, step=4), r"of different steps, .* \(rank 0: 1, rank 1: 4\)"),
        (together(state, training="another"), "of different trainings, .*rank 1: another"),
        (together(state, options="others"), "of different options, .*rank 1: others"),
        (together(state, workers=3), "of different numbers of workers"),
        (state | {"rank": 1}, "the state is damaged: rank 1 of 1"),
        (state | {"moments": {}}, "made with preconditioned feedback; load it with precondition=True"),
    ]:
        with pytest.raises(ValueError, match=says):
            reducer.load_state_dict(wrong)
        assert reducer.state_dict()["step"] == 1
        for name, residual in reducer.state_dict()["residuals"].items():
            assert torch.equal(residual, residuals[name]), "a refused state changed something"
    reducer.push(Bucket(0, torch.randn(200), ("a",), False))
    with pytest.raises(sparsync.SparsyncError, match="a step is under way: load before or after it"):
        reducer.load_state_dict(state)


def case_load_what_does_not_belong_together(rank: int, size: int, wrong: str) -> tuple[tuple[str, str], bool]:
    """All but rank 1 load their own state of one moment; rank 1 loads another one, or none."""
    ddp = DistributedDataParallel(mlp())
    adam = torch.optim.AdamW(ddp.parameters(), 1e-3) if wrong == "moments" else None
    options: dict[str, Any] = {"density": 0.02, "deadline": 60, "optimizer": adam, "precondition": bool(adam)}
    batches, saved = inputs(rank, 8, 40, steps=4), []
    for training in range(2):
        handle = sparsync.attach(ddp, "topk", **options)
        for batch in batches[:2]:
            square(ddp(batch)).backward()
            saved.append(handle.state_dict())
        handle.detach()
        if wrong == "options" and training == 0:
            options["density"] = 0.03
    others = {"step": saved[0], "training": saved[3], "options": saved[3], "nothing": None, "moments": saved[1]}
    state = others[wrong] if rank == 1 else saved[1]
    if wrong == "moments" and rank == 1:
        state["moments"]["0.weight"]["squares"] *= 2
    handle = sparsync.attach(ddp, "topk", **options)
    if state is not None:
        handle.load_state_dict(state)
    before = [p.detach().clone() for p in ddp.parameters()]
    raised, _ = error_of(square(ddp(batches[2])).backward)
    assert raised == "RuntimeError"
    answer, same = error_of(handle.check), all(map(torch.equal, before, ddp.parameters()))
    handle.detach()
    del ddp
    gc.collect()
    return answer, same


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("step", "rank 0 has step 2, rank 1 has step 1"),
        ("training", "rank 0 has training [0-9a-f]{32}, rank 1 has training [0-9a-f]{32}"),
        ("options", "rank 0 has training [0-9a-f]{32}, rank 1 has training [0-9a-f]{32}"),
        ("nothing", "rank 0 has step 2, rank 1 has step 0"),
        ("moments", "rank 0 has moments [0-9a-f]{16}, rank 1 has moments [0-9a-f]{16}"),
    ],
)
def test_states_that_do_not_belong_together_are_refused_at_the_first_step(worlds, wrong, says):
    answers = worlds[3].run(case_load_what_does_not_belong_together, wrong=wrong)
    assert answers == [answers[0]] * 3
    (kind, text), same = answers[0]
    assert kind == "Mismatch"
    assert re.search(f"the loaded state, or the layout of .*, differs on rank 1: {says}", text), text
    assert same
