"""A real training of a few steps on shaped links: real data and passes, every method from the same weights.

What an emulated model's steps take there, with the same compute waited for, stands beside it: that is the check of all
that the lab measures without computing.
"""

# No `from __future__ import annotations` here: see methods.py.

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.config.recipes import AUTO
from sparsync_lab import data
from sparsync_lab.models import build
from sparsync_lab.network.methods import HOOKS, OPTIMIZERS, POWER_SGD, OrderedPowerSGD
from sparsync_lab.training.local_workers import Worker
from sparsync_lab.training.methods import DENSE, has_budget, method_options
from sparsync_lab.virtual.worker_batches import random_windows

MODEL, LENGTH = "gpt", 64  # words of a window
RATE, WARM_UP = 0.002, 10  # of AdamW, reached in so many steps
LOCAL_STEPS = 20  # of a step that exchanges nothing
FEWEST = 4  # steps


@dataclass(frozen=True)
class RealTraining:
    """What every method trains.

    Args:
        steps: of the optimizer.
        batch: windows of each worker.
        device: ``"cpu"``, or ``"cuda"``, which all workers of the machine share.
        folder: of the Penn Treebank.
    """

    steps: int
    batch: int = 16
    device: str = "cpu"
    folder: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < FEWEST or self.batch < 1:
            raise ValueError(f"a real training has {FEWEST} steps or more of a window or more, got {self}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device!r}")


@dataclass
class RealSteps:
    """A training with one method, on one rank or on all.

    Args:
        losses, seconds: of every step; a step ends with its slowest rank, losses are means over the ranks.
        decided: what 'auto' is at in the end.
    """

    method: str
    losses: list[float]
    seconds: list[float]
    decided: str = ""

    @property
    def typical(self) -> float:
        """Seconds of a step, the median of the second half: before that steps set up, and 'auto' settles."""
        return statistics.median(self.seconds[len(self.seconds) // 2 :])

    @property
    def reached(self) -> float:
        """The mean loss of the last tenth."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 10) :])

    def to_csv(self) -> list[dict[str, Any]]:
        """Return a row for every step."""
        rows = enumerate(zip(self.losses, self.seconds, strict=True), 1)
        return [
            {"method": self.method, "step": step, "loss": f"{loss:.5f}", "step_ms": f"{1e3 * took:.2f}"}
            for step, (loss, took) in rows
        ]


def train_really(worker: Worker, training: RealTraining, method: str) -> RealSteps:
    """Train on a worker that is on one of the lab's hosts; every rank returns the same."""
    if training.device == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // worker.count))
    device = torch.device(training.device, *([0] if training.device == "cuda" else []))
    torch.manual_seed(training.seed)
    model = build(MODEL).to(device)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    handle = _exchange(ddp, optimizer, method, training.steps)
    losses, seconds = [], []
    batches = islice(_batches(worker, training, device), training.steps)
    _synchronize(device)
    dist.barrier()
    begun = time.perf_counter()
    for step, (words, following) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(words).flatten(0, 1), following.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss))  # which waits until the device is done with the step
        now = time.perf_counter()
        seconds.append(now - begun)
        begun = now
        worker.report(1)
    _synchronize(device)
    told = torch.tensor([losses, seconds], dtype=torch.float64)
    dist.all_reduce(told[0])
    dist.all_reduce(told[1], op=dist.ReduceOp.MAX)
    decided = handle._auto.describe()["auto"] if method == AUTO else ""
    if handle is not None:
        handle.detach()
    return RealSteps(method, (told[0] / worker.count).tolist(), told[1].tolist(), decided)


def _exchange(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, method: str, steps: int) -> Any:
    """Let a model's gradients be exchanged by a method; return the library's handle, if it is one of its own."""
    if method == DENSE:
        return None
    if method in HOOKS:
        ddp.register_comm_hook((HOOKS[method][0], OrderedPowerSGD() if method == POWER_SGD else None), _called)
        return None
    options = method_options(method)
    assert options is not None
    if has_budget(options):
        options["total_steps"] = steps
    return sparsync.attach(ddp, optimizer=optimizer, **options)


def _called(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """Call one of DDP's own hooks: DDP asks for NCCL where it sees the one of bf16, which Gloo sums as well."""
    hook, own = state
    found: Future[Tensor] = hook(own, bucket)
    return found


def _batches(worker: Worker, training: RealTraining, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this worker's windows of the text, the same for every method."""
    text = data.load_ptb(training.folder).train.to(device)
    for everyone in random_windows(text, worker.count, training.batch, LENGTH, seed=training.seed):
        words, following = everyone[worker.rank]
        yield words, following


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
