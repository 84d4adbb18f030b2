"""Checkpoints of a chaotic training, written and read as users do: each is whole once it has its name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from sparsync.hosts.states.rank_files import load_ranks, save_ranks
from sparsync_lab.chaos.ledger import LawBroken, gather
from sparsync_lab.chaos.methods import METHODS

if TYPE_CHECKING:
    from sparsync_lab.chaos.training import Training


def newest(folder: Path) -> Path | None:
    """Return the newest whole checkpoint, if there is any."""
    return max(folder.glob("step-*"), default=None)


def step_of(folder: Path | None) -> int:
    return 0 if folder is None else int(folder.name.removeprefix("step-"))


def save(training: Training) -> None:
    """Write a checkpoint. All ranks call this after the same step, when the ledger has been looked at."""
    sync, life = training.sync, training.life
    assert sync is not None
    unfinished = training.folder / "unfinished"
    kept = training.ledger.saved(training.last_rate)
    if training.rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        common = {
            "model": training.model.state_dict(),
            "optimizer": training.optimizer.state_dict(),
            "scaler": training.scaler.state_dict(),
            "about": {"exchanges": training.exchanges, "saves": life.saves, "size": training.size},
            "method": life.setting.method,
            "keeps": training.method.keeps,
            "kept": kept,
        }
        torch.save(common, unfinished / "common.pt")
    dist.barrier()
    training.faults.reach("saving", training.step, sync)
    if life.saves == "own files":
        torch.save(sync.state_dict(), unfinished / f"rank-{training.rank}.pt")
    elif life.saves == "rank files":
        save_ranks(sync, unfinished)
    else:
        dcp_save({"sync": sync.stateful()}, checkpoint_id=unfinished / "sync")
    steps = gather(torch.tensor([float(sync.state_dict()["step"]), float(training.exchanges)]))
    if not bool((steps == steps[0, 0]).all()):
        raise LawBroken(f"steps that ranks have in their states, and exchanges that they made: {steps.tolist()}")
    dist.barrier()
    training.saved_at = training.step
    if training.rank == 0:
        unfinished.rename(training.folder / f"step-{training.step:08d}")
        for old in sorted(training.folder.glob("step-*"))[:-2]:
            shutil.rmtree(old)
    dist.barrier()


def resume(training: Training) -> None:
    """Go on from the newest checkpoint, with whatever setting; the ledger sees that nothing is lost on the way."""
    folder, sync = newest(training.folder), training.sync
    assert sync is not None
    if step_of(folder) != training.step:
        raise LawBroken(f"the newest checkpoint is of step {step_of(folder)}, not {training.step}")
    if folder is None:
        training.schedule_rate()
        return
    common = torch.load(folder / "common.pt", weights_only=True)
    training.model.load_state_dict(common["model"])
    if common["keeps"] == training.method.keeps:
        training.optimizer.load_state_dict(common["optimizer"])
    if training.setting.scaled and common["scaler"]:
        training.scaler.load_state_dict(common["scaler"])
    training.schedule_rate()
    before, now = common["keeps"], training.method.keeps
    refused = (before == "updates") != (now == "updates") or (before == "velocities" and now == "gradients")
    about = common["about"]
    try:
        _load(training, folder, about["saves"], about["size"], METHODS[common["method"]].nodes)
    except ValueError as error:
        if not refused:
            raise LawBroken(f"a checkpoint was refused: {error}") from None
        training.ledger.loaded(sync, None, 1.0, 1.0)
        return
    if refused:
        raise LawBroken(f"a checkpoint that holds {before} was taken by a training that keeps {now}")
    training.exchanges = about["exchanges"]
    state = sync.state_dict()
    rate = next(iter(state["rates"].values()), training.rate()) if training.method.options.get("follow_lr") else 1.0
    training.ledger.loaded(sync, common["kept"], unit_of(state, training) / rate, rate)


def _load(training: Training, folder: Path, saves: str, size: int, nodes: bool) -> None:
    sync = training.sync
    assert sync is not None
    same = (size, nodes) == (training.size, training.method.nodes)
    if saves == "rank files" and (same or size != training.size):
        load_ranks(sync, folder)
    elif saves in ("own files", "rank files"):
        name = "rank-{}.pt" if saves == "own files" else f"sparsync-{{}}-of-{size}.pt"
        ranks = [training.rank] if same else range(size)
        states = [torch.load(folder / name.format(rank), weights_only=True) for rank in ranks]
        sync.load_state_dict(states[0] if same else states)
    else:
        dcp_load({"sync": sync.stateful(folder / "sync")}, checkpoint_id=folder / "sync")


def unit_of(state: dict[str, Any], training: Training) -> float:
    """Return what the residual of a state has to be multiplied with, for the ledger."""
    if training.method.keeps == "updates":
        return 1.0
    rate = next(iter(state["rates"].values()), training.rate()) if training.method.options.get("follow_lr") else 1.0
    return float(rate / (state["loss_scale"] or 1.0))
