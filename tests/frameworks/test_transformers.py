"""Hugging Face's Trainer on real processes: sparse by one line, learns, and goes on from its checkpoints."""

from __future__ import annotations

import os
import runpy
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sparsync
from tests.failures.ddp_training import digest, logged
from tests.failures.reducers import error_of
from tests.world import World

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers" / "train.py"
MARGIN = 0.1  # of the loss, over dense
STATES = ("sparsync-0-of-2.pt", "sparsync-1-of-2.pt")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Two ranks that have imported the Trainer."""
    started = World(2)
    yield started
    started.close()


@cache
def resume_on_cpus() -> None:
    """Let torch read to the device ``cpu:0``, as Trainers of last year ask for when they resume on CPUs, and fail."""
    torch.serialization.register_package(
        0, lambda _: None, lambda storage, place: storage if place.startswith("cpu:") else None
    )


def make_trainer(folder: str, steps: int = 4, **options: Any) -> Any:
    """Return a Trainer of a tiny model, the same on every rank."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    rows = [(start + torch.arange(16)) % 64 for start in range(64)]
    quiet = {"disable_tqdm": True, "report_to": [], "use_cpu": True}
    arguments = TrainingArguments(folder, max_steps=steps, per_device_train_batch_size=4, **quiet, **options)
    return Trainer(
        GPT2LMHeadModel(config), arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows]
    )


# ---- the example ----------------------------------------------------------------------------------------------------


def case_example(rank: int, size: int, folder: str, steps: int, save: int) -> dict[str, Any]:
    """Train sparsely, once more from the checkpoint in the middle, and dense."""
    resume_on_cpus()
    main = runpy.run_path(str(EXAMPLE))["main"]
    found: dict[str, Any] = {}
    for name, more in {"whole": [], "resumed": ["--resume"], "dense": ["--dense"]}.items():
        if name == "resumed" and rank == 0:
            shutil.copytree(f"{folder}/whole/checkpoint-{save}", f"{folder}/resumed/checkpoint-{save}")
        torch.distributed.barrier()
        trainer = main(["--folder", f"{folder}/{name}", "--steps", str(steps), *more])
        logs = [one for one in trainer.state.log_history if "loss" in one]
        found[name] = {"weights": digest(trainer.model.parameters()), "loss": logs[-1]["loss"], "logs": logs}
        found[name]["parameters"] = trainer.model.num_parameters()
    return found


def test_the_example_learns_and_goes_on_with_the_same_bits(world: World, tmp_path: Path) -> None:
    ranks = world.run(case_example, folder=str(tmp_path), steps=32, save=16)  # at an epoch's end
    for found in ranks:
        whole, resumed, dense = (found[name] for name in ("whole", "resumed", "dense"))
        assert whole["weights"] == resumed["weights"] == ranks[0]["whole"]["weights"] != dense["weights"]
        assert whole["loss"] < dense["loss"] + MARGIN < 3.0  # from 4.2
        for logs in whole["logs"]:
            assert 0 < logs["sparsync/density"] < 0.1
            assert 0 < logs["sparsync/traffic"] < 4 * whole["parameters"] / 25
        assert not any("sparsync/traffic" in logs for logs in dense["logs"])
    kept = []
    for name in STATES:
        ends = [torch.load(tmp_path / run / "checkpoint-32" / name, weights_only=True) for run in ("whole", "resumed")]
        for kind in ("residuals", "velocities"):
            assert ends[0][kind].keys() == ends[1][kind].keys() != set()
            for parameter, tensor in ends[0][kind].items():
                assert torch.equal(tensor, ends[1][kind][parameter]), parameter
        kept.append(digest(ends[0]["residuals"].values()))
    assert kept[0] != kept[1]  # each rank has its own


# ---- what a Trainer may be asked for --------------------------------------------------------------------------------


def case_options(rank: int, size: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train twice with the same Trainer."""
    trainer = make_trainer(folder, save_steps=2, logging_steps=2, **options)
    sync = sparsync.hosts.transformers.use(trainer, "topk", recipe="default", density=0.02)
    found: dict[str, Any] = {"again": error_of(sparsync.hosts.transformers.use, trainer)}
    trainer.train()
    found["left"] = sync.handle, [*vars(trainer.optimizer.optimizer)["_optimizer_step_pre_hooks"]]
    first = sync.stats().total
    trainer.train()
    found["bytes"] = first.traffic / (4 * first.steps * trainer.model.num_parameters())
    found["steps"] = first.steps, sync.stats().total.steps
    found["weights"] = digest(trainer.model.parameters())
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True, "gradient_accumulation_steps": 3},
        pytest.param({"max_grad_norm": 0.0, "save_only_model": True}, marks=pytest.mark.slow),
        pytest.param({"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.1}, marks=pytest.mark.slow),
        pytest.param({"torch_compile": True, "torch_compile_backend": "aot_eager"}, marks=pytest.mark.slow),
    ],
    ids=["bf16", "model only", "sgd", "compiled"],
)
def test_what_a_trainer_may_be_asked_for(world: World, tmp_path: Path, options: dict[str, Any]) -> None:
    """It is sparse, replicas stay equal, every step is exchanged once, and nothing is left of it at the end."""
    ranks = world.run(case_options, folder=str(tmp_path), options=options)
    for found in ranks:
        assert found["steps"] == (4, 4)
        assert found["bytes"] < 0.1
        assert found["weights"] == ranks[0]["weights"]
        assert found["left"] == (None, [])
        kind, text = found["again"]
        assert kind == "ValueError"
        assert "already" in text
    saved = {path.name for path in (tmp_path / "checkpoint-4").glob("sparsync*")}
    assert saved == (set() if "save_only_model" in options else set(STATES))


def case_first_step(rank: int, size: int, folder: str, resumed: str) -> dict[str, Any]:
    """Resume elsewhere, and look at the residuals before the first step."""
    from transformers import TrainerCallback

    resume_on_cpus()
    found: dict[str, Any] = {}

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not found:
                found.update(sync.handle.state_dict()["residuals"])

    trainer = make_trainer(folder, steps=3)
    sync = sparsync.hosts.transformers.use(trainer, "topk", recipe="default", density=0.02)
    trainer.add_callback(Look())
    with logged() as messages:
        trainer.train(resume_from_checkpoint=resumed)
    return {"residuals": found, "weights": digest(trainer.model.parameters()), "messages": [*messages]}


@pytest.mark.slow
def test_a_checkpoint_is_resumed_by_another_number_of_ranks(world: World, tmp_path: Path) -> None:
    world.run(case_options, folder=str(tmp_path), options={})
    saved = tmp_path / "checkpoint-2"
    states = [torch.load(saved / name, weights_only=True)["residuals"] for name in STATES]
    elsewhere = World(3)
    try:
        ranks = elsewhere.run(case_first_step, folder=str(tmp_path / "more"), resumed=str(saved))
        for name in STATES:
            os.unlink(saved / name)
        without = elsewhere.run(case_first_step, folder=str(tmp_path / "none"), resumed=str(saved))
    finally:
        elsewhere.close()
    assert len({found["weights"] for found in ranks}) == 1
    assert states[0].keys() == states[1].keys() != set()
    for name in states[0]:
        total = sum(found["residuals"].get(name, torch.zeros(())) for found in ranks)
        torch.testing.assert_close(total / 3, (states[0][name] + states[1][name]) / 2)
    assert not any("no residuals" in text for text in ranks[0]["messages"])
    assert any("no residuals" in text for text in without[0]["messages"])


# ---- what cannot be exchanged ---------------------------------------------------------------------------------------


def case_alone(rank: int, size: int, folder: str) -> dict[str, Any]:
    trainer = make_trainer(folder)
    sync = sparsync.hosts.transformers.use(trainer)
    with logged() as messages:
        trainer.train()
    found = {"messages": [*messages], "handle": sync.handle, "steps": trainer.state.global_step}
    for kind in ("fsdp", "deepspeed"):  # which a Trainer has on GPUs alone
        trainer = make_trainer(folder)
        setattr(trainer, f"is_{kind}_enabled", True)
        found[kind] = error_of(sparsync.hosts.transformers.use, trainer)
    found["model"] = error_of(sparsync.hosts.transformers.use, trainer.model)
    found["attach"] = error_of(sparsync.attach, trainer)
    found["misspelt"] = error_of(sparsync.hosts.transformers.use, make_trainer(folder), densty=0.1)
    found["optimizer"] = error_of(sparsync.hosts.transformers.use, make_trainer(folder), optimizer=None)
    found["figures"] = error_of(sync.stats)
    sync = sparsync.hosts.transformers.use(make_trainer(folder))
    found["unwrapped"] = error_of(sync.on_train_begin, SimpleNamespace(world_size=2), None, None)
    return found


def test_one_process_has_nothing_to_exchange_and_shards_are_refused(tmp_path: Path) -> None:
    ((finished, found),) = World.once(1, case_alone, folder=str(tmp_path))
    assert finished, found
    assert sum("nothing to exchange" in text for text in found["messages"]) == 1
    assert (found["handle"], found["steps"]) == (None, 4)

    for kind, name in {"fsdp": "FSDP", "deepspeed": "DeepSpeed"}.items():
        assert found[kind][0] == "ValueError"
        assert f"uses {name}" in found[kind][1]
    for mistake, word in {
        "model": "takes a transformers.Trainer",
        "attach": ".use(trainer)",
        "misspelt": "densty",
        "optimizer": "optimizer= is the Trainer's own",
        "figures": "no training has begun, or it had one process",
        "unwrapped": "GPT2LMHeadModel",
    }.items():
        assert word in found[mistake][1]
