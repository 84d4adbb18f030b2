"""A training whose workers go on when one of them is killed, without a restart, and let another one join.

    python examples/survive/train.py --workers 3 --kills 2

The process that is started here trains nothing: it hosts the store, which so outlives every worker, starts the workers,
and starts another one when one has died. torchrun does not: it ends all workers when one dies. Workers elsewhere join
with ``--store HOST:PORT``, as its first line says, and the same ``--steps``.
"""

import argparse
import gc
import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

import sparsync


def batch(step, rank, teacher):
    """Return what a worker learns from in a step; the batch of all workers is as large as there are workers."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, (x @ teacher).argmax(1)


def join(store, rank, workers, seconds):
    """Join the first process group; a worker that comes later is in one of its own until ``attach`` lets it join."""
    store = PrefixStore("start" if rank is not None else f"alone {os.getpid()}", store)
    rank, workers = (0, 1) if rank is None else (rank, workers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, timeout=timedelta(seconds=seconds))


def work(given):
    """Train as one of the workers."""
    host, port = given.store.rsplit(":", 1)
    store = TCPStore(host, int(port), is_master=False)
    join(store, given.rank, given.workers, given.deadline)
    torch.manual_seed(0)
    teacher = torch.randn(32, 4)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 4))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)

    def on_change(change):  # the place to share out the data anew
        if change.rank == 0:
            print(f"{change.workers} workers from step {change.steps} on", flush=True)

    try:
        sync = sparsync.attach(
            ddp, optimizer=optimizer, on_loss="continue", on_change=on_change, states=[scheduler],
            deadline=given.deadline, total_steps=given.steps,
        )  # fmt: skip
    except sparsync.PeerLost as error:  # it came when all was over
        print(error)
        return
    while sync.steps < given.steps:
        with sync.surviving():
            x, y = batch(sync.steps, dist.get_rank(), teacher)
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
            scheduler.step()
        store.set("steps", str(sync.steps))
        time.sleep(given.pause)
    sync.finish()

    x, y = batch(-1, 0, teacher)
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    if dist.get_rank() == 0:
        lost = sync.stats().total.lost_ranks
        print(f"{dist.get_world_size()} workers, step {sync.steps}: accuracy {accuracy:.1%}, {lost} lost", flush=True)
    sync.detach()
    del ddp
    gc.collect()
    dist.destroy_process_group()


def lead(given):
    """Host the store, start workers, kill some, and start another for each that dies."""
    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    print(f"the store is at port {store.port}; another worker joins with --store HOST:{store.port}", flush=True)

    def start(rank=None):
        own = [] if rank is None else [f"--rank={rank}"]
        options = [f"--{name}={getattr(given, name)}" for name in ("workers", "steps", "deadline", "pause")]
        return subprocess.Popen([sys.executable, __file__, f"--store=127.0.0.1:{store.port}", *own, *options])

    workers, killed = [start(rank) for rank in range(given.workers)], 0
    while workers:
        time.sleep(0.1)
        steps = int(store.get("steps")) if store.check(["steps"]) else 0
        if killed < given.kills and steps > (killed + 1) * given.steps // (given.kills + 2):
            victim = random.choice(workers)
            print(f"killing process {victim.pid} at step {steps}", flush=True)
            victim.send_signal(signal.SIGKILL)
            killed += 1
        for worker in [worker for worker in workers if worker.poll() is not None]:
            workers.remove(worker)
            if worker.returncode and workers:  # others go on, and another one joins them
                workers.append(start())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--kills", type=int, default=2, help="workers that are killed on the way")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds that a worker may be silent")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds after every step, as if it took longer")
    parser.add_argument("--store", help="host:port of the store; makes this process a worker")
    parser.add_argument("--rank", type=int, help="of a worker that begins; one that joins later has none")
    given = parser.parse_args()
    if given.store:
        work(given)
    else:
        lead(given)


if __name__ == "__main__":
    main()
