"""Checkpoints of ``torch.distributed.checkpoint``, which takes a plain tensor for the same on every rank."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import sparsync
from tests.failures.ddp_training import SIZES, SMALL_BUCKETS, Chain, assert_replicas_equal, assert_same_tensors, loss_of

STEPS = 3


class Run:
    """A training whose state can be saved; Adam's is preconditioned."""

    def __init__(self, method: str) -> None:
        self.model: nn.Module = Chain(SIZES)
        self.ddp = DistributedDataParallel(self.model, **SMALL_BUCKETS)
        adam = method == "adam"
        self.optimizer = (
            torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            if adam
            else torch.optim.SGD(self.model.parameters(), lr=0.1)
        )
        options = {"precondition": True} if adam else {"momentum": "correct"}
        compressor = "threshold" if adam else method
        self.handle = sparsync.attach(self.ddp, compressor, density=0.05, optimizer=self.optimizer, **options)

    def train(self, rank: int, first: int) -> None:
        for step in range(first, first + STEPS):
            self.optimizer.zero_grad()
            loss_of(self.ddp, rank, step).backward()
            self.optimizer.step()

    def close(self) -> None:
        self.handle.detach()
        del self.ddp
        gc.collect()


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a state by their path."""
    if not isinstance(state, dict):
        return {prefix: state}
    return {path: leaf for key, inner in state.items() for path, leaf in flat(inner, f"{prefix}/{key}").items()}


def case_save(rank: int, size: int, folder: str, method: str) -> dict[str, Any]:
    run = Run(method)
    run.train(rank, 0)
    sharded = run.handle.sharded_state_dict()
    assert all(isinstance(row, DTensor) and row.shape[0] == size for row in sharded["residuals"].values())
    dcp.save({"model": run.model.state_dict(), "sparsync": sharded}, checkpoint_id=folder)
    state = run.handle.state_dict()
    run.train(rank, STEPS)
    answer = {"state": state, "weights": run.model.state_dict(), "later": run.handle.state_dict()}
    run.close()
    return answer


def case_load(rank: int, size: int, folder: str, method: str, saved: list[dict[str, Any]]) -> None:
    run = Run(method)
    weights = run.model.state_dict()
    dcp.load({"model": weights}, checkpoint_id=folder)
    run.model.load_state_dict(weights)
    run.handle.load_sharded(folder)
    old = [one["state"] for one in saved]
    compare_loaded(run.handle.state_dict(), old, rank, size)
    run.train(rank, STEPS)
    assert_replicas_equal(run.model)
    if len(old) == size and method != "adam":  # whose sketches are summed by bucket, and DDP's are others at first
        assert_same_tensors(run.model.state_dict(), saved[rank]["weights"])
        assert_same_tensors(run.handle.state_dict()["residuals"], saved[rank]["later"]["residuals"])
    run.close()


def compare_loaded(mine: dict[str, Any], old: list[dict[str, Any]], rank: int, size: int) -> None:
    """Compare what a rank has loaded with what was saved: the same on as many ranks, the mean on others."""
    assert type(mine["step"]) is int
    assert mine["step"] == STEPS
    if len(old) == size:
        loaded, was = flat(mine), flat(old[rank])
        assert loaded.keys() == was.keys()
        assert loaded.pop("/training") != was.pop("/training")  # what goes on from a checkpoint is another training
        for path, leaf in was.items():
            assert torch.equal(loaded[path], leaf) if isinstance(leaf, Tensor) else loaded[path] == leaf, path
    else:
        for kind in ("residuals", "velocities"):
            for name, first in old[0][kind].items():
                kept = mine[kind].get(name, torch.zeros_like(first))  # one rank more than before begins with nothing
                mean = torch.stack([state[kind][name] for state in old]).mean(0)
                dist.all_reduce(kept)
                torch.testing.assert_close(kept / size, mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", ["topk", "threshold", "adam"])
def test_every_rank_gets_its_own_residual_back(worlds: Any, tmp_path: Path, method: str) -> None:
    """Rank by rank all that ``state_dict()`` holds; and training goes on with the same bits."""
    saved = worlds[3].run(case_save, folder=str(tmp_path / "saved"), method=method)
    residuals = [one["state"]["residuals"]["layer1.weight"] for one in saved]
    assert not torch.equal(residuals[0], residuals[1])
    worlds[3].run(case_load, folder=str(tmp_path / "saved"), method=method, saved=saved)


@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 3), (5, 2), (2, 1)])
def test_a_distributed_checkpoint_loads_on_any_world_size(worlds: Any, tmp_path: Path, old: int, new: int) -> None:
    saved = worlds[old].run(case_save, folder=str(tmp_path / "saved"), method="threshold")
    worlds[new].run(case_load, folder=str(tmp_path / "saved"), method="threshold", saved=saved)


def case_save_stateful(rank: int, size: int, folder: str) -> dict[str, Any]:
    run = Run("threshold")
    run.train(rank, 0)
    content = {"model": run.model.state_dict(), "sync": run.handle.stateful()}
    with pytest.raises((ValueError, dcp.api.CheckpointException), match="save rank 0's residuals for all ranks"):
        dcp.save({"sync": run.handle}, checkpoint_id=folder)
    dcp.save(content, checkpoint_id=folder)
    state = run.handle.state_dict()
    torch.save(state, Path(folder) / f"own-{rank}.pt")  # as before
    run.train(rank, STEPS)
    answer = {"state": state, "weights": run.model.state_dict(), "later": run.handle.state_dict()}
    run.close()
    return answer


def case_load_stateful(rank: int, size: int, folder: str, saved: list[dict[str, Any]]) -> None:
    run = Run("threshold")
    weights = run.model.state_dict()
    for wrong, sentence in (
        (run.handle, "save rank 0's residuals for all ranks"),
        (run.handle.stateful(folder, "residuals"), "holds nothing under 'residuals'"),
    ):
        with pytest.raises((ValueError, dcp.api.CheckpointException), match=sentence):
            dcp.load({"sync": wrong}, checkpoint_id=folder)
    dcp.load({"model": weights, "sync": run.handle.stateful(folder)}, checkpoint_id=folder)
    run.model.load_state_dict(weights)
    old = [one["state"] for one in saved]
    compare_loaded(run.handle.state_dict(), old, rank, size)
    run.train(rank, STEPS)
    assert_replicas_equal(run.model)
    if len(old) == size:
        assert_same_tensors(run.model.state_dict(), saved[rank]["weights"])
        assert_same_tensors(run.handle.state_dict()["residuals"], saved[rank]["later"]["residuals"])
        run.handle.load_state_dict(torch.load(Path(folder) / f"own-{rank}.pt", weights_only=True))
        assert_same_tensors(run.handle.state_dict()["residuals"], old[rank]["residuals"])
    run.close()


@pytest.mark.parametrize(("old", "new"), [(2, 2), (4, 2), (2, 3)])
def test_a_handle_is_stateful(worlds: Any, tmp_path: Path, old: int, new: int) -> None:
    """Beside a model in one call of ``dcp.save`` and ``dcp.load``."""
    saved = worlds[old].run(case_save_stateful, folder=str(tmp_path / "saved"))
    worlds[new].run(case_load_stateful, folder=str(tmp_path / "saved"), saved=saved)


def case_refused(rank: int, size: int, folder: str) -> None:
    run = Run("topk")
    run.train(rank, 0)
    dcp.save({"model": run.model.state_dict()}, checkpoint_id=folder)
    with pytest.raises(ValueError, match="holds nothing under 'sparsync'"):
        run.handle.load_sharded(folder)
    with pytest.raises(ValueError, match="must hold one state of"):
        run.handle.stateful(folder).state_dict()
    with pytest.raises(ValueError, match="has to be known before it is read"):
        run.handle.stateful().load_state_dict({})
    state = run.handle.sharded_state_dict()
    state["step"] += rank  # rank 1 saves another step
    dcp.save({"sparsync": state}, checkpoint_id=folder)
    before = run.handle.state_dict()["residuals"]
    with pytest.raises(ValueError, match="different steps: 3, 4"):
        run.handle.load_sharded(folder)
    assert_same_tensors(run.handle.state_dict()["residuals"], before)
    run.close()


def test_a_distributed_checkpoint_that_does_not_fit_is_refused(worlds: Any, tmp_path: Path) -> None:
    worlds[2].run(case_refused, folder=str(tmp_path / "saved"))
