"""Lightning's own trainer on real processes: the callback makes it sparse, learns, and goes on from checkpoints."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.world import World

pytest.importorskip("lightning.pytorch")
ROOT = Path(__file__).parents[2]
BUDGET = 0.1
MARGIN = {"sgd": 0.2, "adamw": 0.1, "manual": 0.1}  # of the loss over dense's, after some 60 to 120 steps
DENSE_BYTES = 4 * (64 * 128 + 128 + 128 * 10 + 10)  # that a rank hands over in a step


# ---- what runs on every rank ----------------------------------------------------------------------------------------


def module_of(kind: str) -> Any:
    """Return a small classifier with an optimizer of this kind."""
    import lightning.pytorch as pl

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = kind not in ("manual", "two")
            self.net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            if kind == "manual":
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def configure_optimizers(self) -> Any:
            if kind == "sgd":
                return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
            adamw = torch.optim.AdamW(self.parameters(), 3e-3)
            return [adamw, torch.optim.SGD(self.net[0].parameters(), 0.1)] if kind == "two" else adamw

    torch.manual_seed(1)
    return Classifier()


def batches() -> Any:
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset

    digits = load_digits()
    pictures = torch.tensor(digits.data, dtype=torch.float32) / 16
    return DataLoader(TensorDataset(pictures, torch.tensor(digits.target)), batch_size=32, shuffle=True)


@contextmanager
def ranks_as_torchrun_says(rank: int, size: int) -> Any:
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, str(value))
        yield


def make_trainer(size: int, folder: str, callbacks: list[Any], epochs: int, **options: Any) -> Any:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    options = {"strategy": "ddp", "enable_checkpointing": False, **quiet, **options}
    return pl.Trainer(
        accelerator="cpu", devices=size, plugins=[TorchElasticEnvironment()], max_epochs=epochs, callbacks=callbacks,
        default_root_dir=folder, use_distributed_sampler=True, **options,
    )  # fmt: skip


def fit(
    rank: int, size: int, folder: str, kind: str = "adamw", sparse: bool = True, epochs: int = 2, saved: str = "",
    resume: str = "", every: bool = False, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train; returns what became of the weights, of this rank's state and of the loss over all pictures, and what was
    sent.

    Args:
        saved: name of a checkpoint that is written when training has ended.
        every: one is also written when an epoch ends.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from sparsync.hosts.lightning import Sparsync

    sync = Sparsync(budget=BUDGET, total_steps=100)
    callbacks: list[Any] = [sync] if sparse else []
    if every:
        options["enable_checkpointing"] = True
        callbacks.append(ModelCheckpoint(folder, "epoch{epoch}", auto_insert_metric_name=False, save_top_k=-1))
    if options.pop("log", False):
        options |= {"logger": CSVLogger(folder, name="csv", version=0), "log_every_n_steps": 5}
    with ranks_as_torchrun_says(rank, size):
        trainer = make_trainer(size, folder, callbacks, epochs, **options)
        module = module_of(kind)
        trainer.fit(module, batches(), ckpt_path=f"{folder}/{resume}" if resume else None)
        if saved:
            trainer.save_checkpoint(f"{folder}/{saved}")
    data = batches().dataset
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(module.net(data.tensors[0]), data.tensors[1])
    found = {"weights": {k: v.clone() for k, v in module.state_dict().items()}, "loss": float(loss)}
    if sparse:
        total = sync.stats().total
        found |= {"state": sync._kept, "steps": total.steps, "bytes": total.bytes, "attached": sync.handle is not None}
    return found


def told(rank: int, size: int, folder: str, kind: str = "adamw", strategy: Any = "ddp") -> tuple[list[str], str]:
    """Return what is logged by one step of training, and what it raises."""
    from lightning.pytorch.strategies import DDPStrategy
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    from sparsync.hosts.lightning import Sparsync

    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sparsync").addHandler(handler)
    error = ""
    try:
        with ranks_as_torchrun_says(rank, size):
            chosen = DDPStrategy(ddp_comm_hook=fp16_compress_hook) if strategy == "hook" else strategy
            trainer = make_trainer(size, folder, [Sparsync()], 1, strategy=chosen, max_steps=1)
            trainer.fit(module_of(kind), batches())
    except ValueError as raised:
        error = str(raised)
    finally:
        logging.getLogger("sparsync").removeHandler(handler)
    return records, error


def fail_on_one_rank(rank: int, size: int, folder: str) -> list[Any]:
    """Return what ``fit`` raises, and what is left of the handle, when rank 1 fails in its fourth step; after that it
    goes away."""
    import lightning.pytorch as pl

    from sparsync.hosts.lightning import Sparsync

    class Fail(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, number: int) -> None:
            if rank == 1 and number == 3:
                raise KeyError("only here")

    sync, error = Sparsync(deadline=20.0), ""
    with ranks_as_torchrun_says(rank, size):
        try:
            make_trainer(size, folder, [sync, Fail()], 1).fit(module_of("adamw"), batches())
        except KeyError as raised:
            error = raised.args[0]
        except Exception as raised:
            error = f"{raised} {raised.__cause__}"
    return [error, sync.handle]


def residual_means(rank: int, size: int, folder: str, resume: str) -> dict[str, Tensor]:
    """Return the mean over the ranks of what a resumed training begins with."""
    import lightning.pytorch as pl
    import torch.distributed as dist

    from sparsync.hosts.lightning import Sparsync

    means: dict[str, Tensor] = {}

    class Look(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            kept = sync.handle.state_dict()["residuals"]
            for name, parameter in pl_module.named_parameters():
                mean = kept.get(name, torch.zeros_like(parameter)).clone().detach()
                dist.all_reduce(mean)
                means[name] = mean / size

    sync = Sparsync(budget=BUDGET, total_steps=100)
    with ranks_as_torchrun_says(rank, size):
        trainer = make_trainer(size, folder, [sync, Look()], 3, limit_train_batches=2)
        trainer.fit(module_of("adamw"), batches(), ckpt_path=f"{folder}/{resume}")
    return means


# ---- tests ----------------------------------------------------------------------------------------------------------


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def test_the_callback_makes_training_sparse_and_goes_on_to_the_same_bits(
    worlds: dict[int, World], tmp_path: Path
) -> None:
    world, folder = worlds[2], str(tmp_path)
    whole = world.run(fit, folder=folder, every=True, saved="end.ckpt", log=True)
    assert whole[0]["bytes"] < DENSE_BYTES / 4 * whole[0]["steps"]
    assert not whole[0]["attached"]
    assert same(whole[0]["weights"], whole[1]["weights"])
    assert not same(whole[0]["state"], whole[1]["state"])
    logged = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    assert "sparsync/traffic" in logged[0]
    assert len(logged) == 1 + 2 * 29 // 5

    dense = world.run(fit, folder=folder, sparse=False)
    assert whole[0]["loss"] < dense[0]["loss"] + MARGIN["adamw"], (whole[0]["loss"], dense[0]["loss"])

    resumed = world.run(fit, folder=folder, resume="epoch0.ckpt")  # which was written with one epoch left
    assert resumed[0]["steps"] == 29
    for rank in range(2):
        assert same(resumed[rank]["weights"], whole[rank]["weights"])
        drop = {"training": ""}
        assert same(resumed[rank]["state"] | drop, whole[rank]["state"] | drop)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sgd", {}),
        ("adamw", {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}),
        ("adamw", {"precision": "bf16-mixed"}),
        ("sgd", {"gradient_clip_val": 0.5, "precision": "bf16-mixed"}),
        ("manual", {}),
    ],
)
def test_a_checkpoint_of_a_finished_training_goes_on_to_the_same_bits(
    kind: str, options: dict[str, Any], worlds: dict[int, World], tmp_path: Path
) -> None:
    world, folder = worlds[2], str(tmp_path)
    whole = world.run(fit, folder=folder, kind=kind, epochs=4, **options)
    dense = world.run(fit, folder=folder, kind=kind, epochs=4, sparse=False, **options)
    assert whole[0]["loss"] < dense[0]["loss"] + MARGIN[kind], (whole[0]["loss"], dense[0]["loss"])
    world.run(fit, folder=folder, kind=kind, epochs=2, saved="half.ckpt", **options)
    resumed = world.run(fit, folder=folder, kind=kind, epochs=4, resume="half.ckpt", **options)
    for rank in range(2):
        assert same(resumed[rank]["weights"], whole[rank]["weights"])
        assert same(resumed[rank]["state"]["residuals"], whole[rank]["state"]["residuals"])
        assert same(resumed[rank]["state"]["velocities"], whole[rank]["state"]["velocities"])


def test_what_cannot_be_exchanged_is_told(
    worlds: dict[int, World], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy

    from sparsync.hosts.lightning import Sparsync, _callback_class

    world, folder = worlds[2], str(tmp_path)
    records, error = world.run(told, folder=folder, strategy="hook")[0]
    assert not error
    assert any("on CUDA alone" in one for one in records)
    records, error = world.run(told, folder=folder, kind="two")[0]
    assert "one optimizer, and Classifier has 2" in error
    with pytest.raises(ValueError, match="FSDPStrategy makes no such model"):
        Sparsync()._go_without(FSDPStrategy())
    sync = Sparsync()
    sync._go_without(SingleDeviceStrategy("cpu"))
    assert "a single device and nothing to exchange" in caplog.text
    sync._loaded = [{}, {}]
    with pytest.raises(ValueError, match="residuals of 2 workers, which SingleDeviceStrategy would lose"):
        sync._go_without(SingleDeviceStrategy("cpu"))
    with pytest.raises(ValueError, match="optimizer= is the trainer's"):
        Sparsync(optimizer=None)
    with pytest.raises(TypeError, match="denisty"):
        Sparsync(denisty=0.1)
    with pytest.raises(ValueError, match="there are no figures: no training has begun"):
        sync.stats()
    with patch("sparsync.hosts.lightning.PACKAGES", {}), pytest.raises(ImportError, match="needs Lightning"):
        _callback_class()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_another_number_of_workers_keeps_the_mean(size: int, worlds: dict[int, World], tmp_path: Path) -> None:
    folder = str(tmp_path)
    worlds[2].run(fit, folder=folder, epochs=2, saved="two.ckpt")
    states = torch.load(tmp_path / "two.ckpt", weights_only=True)["sparsync"]
    found = worlds[size].run(residual_means, folder=folder, resume="two.ckpt")[0]
    kept = [name for name in found if name in states[0]["residuals"]]
    assert kept
    for name in kept:
        mean = sum(state["residuals"][name] for state in states) / 2
        torch.testing.assert_close(found[name], mean)


@pytest.mark.slow
def test_an_exception_on_one_rank_ends_all(tmp_path: Path) -> None:
    answers = World.once(2, fail_on_one_rank, folder=str(tmp_path))
    assert answers[1] == (True, ["only here", None])
    finished, (error, handle) = answers[0]
    assert finished
    assert handle is None
    assert "not heard from: 1" in error  # among what DDP makes of it


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_the_example_runs_and_resumes(package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    program = tmp_path / "train.py"
    program.write_text((ROOT / "examples" / "lightning" / "train.py").read_text().replace("lightning.pytorch", package))
    command = [sys.executable, str(program), "--folder", str(tmp_path), "--epochs", "1"]
    for extra in ([], ["--resume"]):
        done = subprocess.run(
            [*command, *extra], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert "of dense's bytes" in done.stdout
