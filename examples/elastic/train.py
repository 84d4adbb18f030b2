"""A training that survives kill -9 of any worker, and goes on with fewer or more of them.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic/train.py --folder runs/elastic

Every few steps all workers write a checkpoint, every one its own residual. When one dies, torchrun starts all again,
and they go on from the last whole checkpoint. So they do when torchrun itself is started again, with any number.
"""

import argparse
import gc
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

import sparsync


def join():
    """Join the process group. Workers that are started again find the store of those before them: they begin anew."""
    store, rank, workers = next(rendezvous("env://"))
    store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    return rank, workers


def batch(step, rank, teacher):
    """Return what a worker learns from in a step: drawn anew, so that there is nothing else to save."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, (x @ teacher).argmax(1)


def save(folder, step, model, optimizer, sync):
    """Write a checkpoint beside the others; it has its name once it is whole."""
    unfinished = folder / "unfinished"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, unfinished / "model.pt")
    dist.barrier()
    dcp.save({"sync": sync.stateful()}, checkpoint_id=unfinished / "sync")  # every worker's residual
    if dist.get_rank() == 0:
        unfinished.rename(folder / f"step-{step:08d}")
        for old in sorted(folder.glob("step-*"))[:-2]:
            shutil.rmtree(old)


def resume(folder, model, optimizer, sync):
    """Go on from the newest checkpoint, of any number of workers; return its step, 0 if there is none."""
    newest = [max(folder.glob("step-*"), default=None)]
    dist.broadcast_object_list(newest)  # all of them from the same
    if newest[0] is None:
        return 0
    common = torch.load(newest[0] / "model.pt", weights_only=True)
    model.load_state_dict(common["model"])
    optimizer.load_state_dict(common["optimizer"])
    dcp.load({"sync": sync.stateful(newest[0] / "sync")}, checkpoint_id=newest[0] / "sync")
    return int(newest[0].name.removeprefix("step-"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/elastic"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    given = parser.parse_args()

    rank, workers = join()
    torch.manual_seed(0)
    teacher = torch.randn(32, 4)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 4))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sync = sparsync.attach(ddp, optimizer=optimizer, total_steps=given.steps)
    first = resume(given.folder, model, optimizer, sync)
    if rank == 0:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        print(f"{workers} workers, start {restarts}, from step {first}", flush=True)

    for step in range(first, given.steps):
        x, y = batch(step, rank, teacher)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        if (step + 1) % given.every == 0 or step + 1 == given.steps:
            save(given.folder, step + 1, model, optimizer, sync)

    x, y = batch(-1, 0, teacher)
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    if rank == 0:
        print(f"{workers} workers, step {given.steps}: accuracy {accuracy:.1%}; checkpoints in {given.folder}")
    sync.detach()
    del ddp
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
