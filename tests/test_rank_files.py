"""Every rank's state in a file of its own: same number of ranks, same bits; another number, same mean."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsync.hosts.states.rank_files import load_ranks, save_ranks
from tests.failures.ddp_training import SIZES, Chain, loss_of, training
from tests.failures.reducers import error_of
from tests.world import World


def case_save(rank: int, size: int, folder: str) -> dict[str, torch.Tensor]:
    with training(Chain(SIZES), "topk", density=0.02, momentum="keep") as run:
        for step in range(3):
            run.step(partial(loss_of, rank=rank, step=step))
        save_ranks(run.handle, folder)
        return run.residuals()


def case_load(rank: int, size: int, folder: str, again: bool = True) -> dict[str, Any]:
    """Load, save in the same place, and load ``again``."""
    with training(Chain(SIZES), "topk", density=0.02, momentum="keep") as run:
        found: list[bool] = []
        error = error_of(lambda: found.append(load_ranks(run.handle, folder)))
        kept = run.residuals()
        if again and found == [True]:
            save_ranks(run.handle, folder)
            load_ranks(run.handle, folder)
        return {"found": found, "error": error, "residuals": kept, "again": run.residuals()}


def mean_of(states: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    return sum(state.get(name, torch.zeros(())) for state in states) / len(states)  # type: ignore[return-value]


@pytest.mark.parametrize(("old", "new"), [(2, 2), (2, 3), (5, 2)])
def test_files_load_on_any_number_of_ranks(worlds: dict[int, World], tmp_path: Path, old: int, new: int) -> None:
    saved = worlds[old].run(case_save, folder=str(tmp_path))
    assert len(list(tmp_path.iterdir())) == old
    loaded = worlds[new].run(case_load, folder=str(tmp_path))
    for rank, found in enumerate(loaded):
        assert found["found"] == [True], found["error"]
        for name, tensor in found["residuals"].items():
            assert torch.equal(tensor, found["again"][name])
            if old == new:
                assert torch.equal(tensor, saved[rank][name])
    for name in saved[0]:
        torch.testing.assert_close(mean_of([one["residuals"] for one in loaded], name), mean_of(saved, name))
    assert {path.name for path in tmp_path.iterdir()} == {f"sparsync-{rank}-of-{new}.pt" for rank in range(new)}


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("nothing saved", None),
        ("one lacks", "on rank 1 of 2"),
        ("damaged", "cannot be loaded"),
        ("two sets", "of 4 and of 5"),
    ],
)
def test_files_that_are_not_whole_are_refused_on_every_rank(
    worlds: dict[int, World], tmp_path: Path, harm: str, words: str | None
) -> None:
    if harm != "nothing saved":
        worlds[2].run(case_save, folder=str(tmp_path))
        first, last = (tmp_path / f"sparsync-{rank}-of-2.pt" for rank in range(2))
        if harm == "one lacks":
            last.unlink()
        elif harm == "damaged":
            last.write_bytes(last.read_bytes()[:-100])
        else:
            for workers in (4, 5):
                for rank in range(workers):
                    (tmp_path / f"sparsync-{rank}-of-{workers}.pt").write_bytes(first.read_bytes())
            first.unlink()
    for found in worlds[2].run(case_load, folder=str(tmp_path), again=False):
        if words is None:
            assert found["found"] == [False]
        else:
            kind, text = found["error"]
            assert kind == "ValueError"
            assert words in text
            assert not found["residuals"], "a rank has loaded what another one cannot"
