"""Checkpoints: saved on one world size, loaded on another, and refused where they do not fit."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import ThresholdK
from tests.failures.checked_training import inputs, kept, mean_over_ranks, mlp, train
from tests.failures.reducers import make_reducer, push_all


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


@pytest.mark.parametrize("compressor", ["topk", "threshold"])
@pytest.mark.parametrize(("old", "new"), [(2, 2), (2, 3), (5, 2), (3, 1)])
def test_a_checkpoint_loads_on_any_world_size(worlds, old, new, compressor):
    files = [answer["file"] for answer in worlds[old].run(case_save, compressor=compressor)]
    worlds[new].run(case_load, files=files, compressor=compressor)


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(inner) for key, inner in value.items())
    return value is None or type(value) in (int, float, str, bool, Tensor)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    parameters = {"a": torch.zeros(40, 5), "b": torch.zeros(30, 1)}
    reducer = make_reducer(parameters, ThresholdK(), alone=True)
    push_all(reducer, [("a", torch.randn(200)), ("b", torch.randn(30))])
    torch.save(reducer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert plain(state)
    assert state["schema"] == 1
    residuals = copy.deepcopy(state["residuals"])

    for wrong, says in [
        (state | {"schema": 99}, "schema 1: it says 99"),
        ({"weight": torch.zeros(3)}, "not a sparsync state"),
        (state | {"workers": 4, "rank": 2}, "rank 2 of 4, and here is rank 0 of 1"),
        ([], "list is empty"),
        ([state | {"workers": 2, "rank": 1}, state | {"workers": 2, "rank": 0}], "ranks 0 to 1, in order"),
        ([state | {"workers": 2, "rank": 0}], "ranks 0 to 1, in order"),
        (state | {"residuals": {"c": torch.zeros(3)}}, "'c', which this model does not have"),
        (state | {"residuals": {"a": torch.zeros(5, 40)}}, r"'a' has shape \(5, 40\)"),
    ]:
        with pytest.raises(ValueError, match=says):
            reducer.load_state_dict(wrong)
        assert reducer.state_dict()["step"] == 1
        for name, residual in reducer.state_dict()["residuals"].items():
            assert torch.equal(residual, residuals[name]), "a refused state changed something"
