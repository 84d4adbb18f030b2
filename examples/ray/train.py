"""Ray Train on two CPU workers, sparse by ``attach``; every worker puts its own state into Ray's checkpoint.

python examples/ray/train.py
python examples/ray/train.py --resume
"""

import argparse
import gc
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

import sparsync


def train(config: dict[str, Any]) -> None:
    """Run on every worker."""
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)  # the same pictures and weights everywhere
    centers, labels = torch.randn(10, 64), torch.arange(4000) % 10
    pictures = 0.25 * centers[labels] + torch.randn(4000, 64)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

    model = prepare_model(net)  # DistributedDataParallel
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sync = sparsync.attach(model, optimizer=optimizer) if config["sparse"] else None
    first = load(config["resume"], net, optimizer, sync) if config["resume"] else 0

    for epoch in range(first, config["epochs"]):
        mine = torch.randperm(4000, generator=torch.Generator().manual_seed(epoch)).chunk(config["workers"])[rank]
        for batch in mine.split(32):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(pictures[batch]), labels[batch])
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            figures = {"epoch": epoch, "loss": float(torch.nn.functional.cross_entropy(net(pictures), labels))}
        if sync is not None:
            total = sync.stats().total
            figures |= {"bytes": total.bytes, "traffic": total.traffic, "steps": total.steps}
        with tempfile.TemporaryDirectory() as folder:  # Ray puts the files of all workers into one checkpoint
            save(Path(folder), rank, epoch, net, optimizer, sync)
            ray.train.report(figures, checkpoint=Checkpoint.from_directory(folder))

    if sync is not None:
        sync.detach()
    del model  # before Ray takes the process group away
    gc.collect()


def save(folder: Path, rank: int, epoch: int, net: Any, optimizer: Any, sync: sparsync.Handle | None) -> None:
    """Write what all share on the first worker, and on every worker its own residuals."""
    if rank == 0:
        shared = {"epoch": epoch, "model": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(shared, folder / "model.pt")
    if sync is not None:
        torch.save(sync.state_dict(), folder / f"sparsync-{rank}.pt")


def load(checkpoint: str, net: Any, optimizer: Any, sync: sparsync.Handle | None) -> int:
    """Go on from a checkpoint of any number of workers; returns the epoch to begin with."""
    shared = torch.load(Path(checkpoint) / "model.pt", weights_only=True)
    net.load_state_dict(shared["model"])
    optimizer.load_state_dict(shared["optimizer"])
    if sync is not None:
        ranks = range(len(list(Path(checkpoint).glob("sparsync-*.pt"))))
        sync.load_state_dict([torch.load(Path(checkpoint) / f"sparsync-{i}.pt", weights_only=True) for i in ranks])
    return int(shared["epoch"]) + 1


def fit(folder: Path, epochs: int = 3, workers: int = 2, resume: str = "", sparse: bool = True) -> Any:
    """Return Ray's result of a training; its checkpoint's folder is named in ``last.txt``."""
    config = {"epochs": epochs, "workers": workers, "resume": resume, "sparse": sparse}
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=False),
        run_config=RunConfig(storage_path=str(folder.resolve())),
    )
    result = trainer.fit()
    (folder / "last.txt").write_text(result.checkpoint.path)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("runs/ray"))
    parser.add_argument("--epochs", type=int, default=3, help="with --resume as many more")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    resume, epochs = "", options.epochs
    if options.resume:
        resume = (options.folder / "last.txt").read_text()
        epochs += int(torch.load(Path(resume) / "model.pt", weights_only=True)["epoch"]) + 1
    result = fit(options.folder, epochs, resume=resume)
    dense = result.metrics["steps"] * 4 * (64 * 256 + 256 + 256 * 10 + 10)  # what a ring of two sends
    share = result.metrics["traffic"] / dense
    loss = result.metrics["loss"]
    print(f"{result.metrics['steps']} steps, loss {loss:.3f}, a worker sent {share:.1%} of dense's bytes")
    print(f"{result.checkpoint.path} holds the residuals of every worker; --resume goes on from it")


if __name__ == "__main__":
    main()
