"""The loop of a training, as it runs on each of its workers."""

from __future__ import annotations

import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync_lab import models
from sparsync_lab.data import Images, check_workers, step_generator
from sparsync_lab.training.all_ranks import gather, on_rank_0
from sparsync_lab.training.checkpoints import Checkpoint, Checkpoints
from sparsync_lab.training.run_folder import RunFolder
from sparsync_lab.training.run_lock import hold_lock
from sparsync_lab.training.settings import ADAMW, Outcome, Point, Training, attach_options, dense_bytes

__all__ = ["Outcome", "Point", "Training", "attach_options", "dense_bytes", "train"]

POINTS = 10  # in a training, about
SAVE_EVERY = 100  # steps at most between checkpoints
REPORT_EVERY = 10  # steps
RATE_WARM_UP = 10  # steps until the learning rate is whole
UNTIMED = 5  # steps: the first ones set up buckets and connections


def train(
    rank: int,
    workers: int,
    training: Training,
    images: Images,
    *,
    folder: Path | None = None,
    resume: bool = False,
    launch: str | None = None,
    points: int = POINTS,
    on_point: Callable[[Point], None] = lambda point: None,
    on_step: Callable[[int], None] = lambda step: None,
) -> Outcome | None:
    """Train on one of the workers of torch's process group; return the outcome on rank 0, ``None`` on the others.

    Args:
        folder: the run folder to write, or to go on from with ``resume``; ``None`` writes nothing. All ranks see it.
        launch: name of the launch, by which workers that are started again know their run.
        points: how many the curve has, about.
        on_point: called on rank 0 at each of them.
        on_step: called on rank 0 with the number of steps done, every few steps.
    """
    check_workers(workers, len(images.train_x), training.batch)
    run_folder = None if folder is None else RunFolder(folder)
    with ExitStack() as held:
        saved: int | None = None
        if run_folder is not None:
            on_rank_0(lambda: held.enter_context(hold_lock(run_folder.folder)))
            saved = _newest_checkpoint(run_folder.checkpoints, rank, workers) if resume else None
            on_rank_0(lambda: run_folder.begin(training, workers, resume, saved, launch))
        session = TrainingSession(rank, workers, training, images)
        curve: list[Point] = []
        if run_folder is not None and saved is not None:
            session.restore(run_folder.checkpoints, saved)
            curve = run_folder.points(saved)
        points_every = max(1, training.steps // points)
        save_every = min(SAVE_EVERY, points_every)
        x, y = (part.to(session.device) for part in images.shard(rank, workers))
        order = torch.Generator().manual_seed(1000 * training.seed + rank)
        for batch in islice(batch_indices(len(x), training.batch, order), session.step, training.steps):
            crops = step_generator(training.seed, rank, session.step)
            session.advance(images.inputs(x[batch], crops), y[batch])
            last = session.step == training.steps
            if session.step % points_every == 0 or last:
                if rank == 0:
                    curve.append(session.point())
                    if run_folder is not None:
                        run_folder.append(curve[-1])
                    on_point(curve[-1])
                session.forget_losses()
            if rank == 0 and (session.step % REPORT_EVERY == 0 or last):
                on_step(session.step)
            if run_folder is not None and (session.step % save_every == 0 or last):
                run_folder.checkpoints.save(rank, session.checkpoint(), session.rank_state())
        outcome = session.outcome(curve) if rank == 0 else None
        session.close()
        if run_folder is not None and outcome is not None:
            run_folder.finish(outcome)
        return outcome


def _newest_checkpoint(checkpoints: Checkpoints, rank: int, workers: int) -> int | None:
    """Return the step of the newest checkpoint that every rank can read, the same on all; say if it is not the last."""
    step, wrong = checkpoints.newest_whole(rank, workers, gather)
    if wrong is not None and rank == 0:
        warnings.warn(f"{wrong}; going on from the checkpoint before it, of step {step}", stacklevel=1)
    return step


class TrainingSession:
    """A model being trained on one worker, and all of it that a checkpoint must hold."""

    def __init__(self, rank: int, workers: int, training: Training, images: Images) -> None:
        self.rank, self.workers, self.training, self.images = rank, workers, training, images
        on_gpu = dist.get_backend() == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        torch.manual_seed(training.seed)
        self.model = models.make_image_model(training.model, images).to(self.device)
        self.numel = sum(parameter.numel() for parameter in self.model.parameters())
        self.dense_bytes = dense_bytes(self.numel, workers)
        self.ddp: DistributedDataParallel | None = DistributedDataParallel(self.model)
        # DDP regroups its buckets after the first backward. That is over with before the first step, so that a resumed
        # training sums in the same order as one that was never interrupted.
        self.ddp(images.inputs(images.train_x[:1].to(self.device))).sum().backward()
        self.ddp.zero_grad()
        self.optimizer = make_optimizer(training, self.model)
        options = attach_options(training)
        self.sync = None if options is None else sparsync.attach(self.ddp, optimizer=self.optimizer, **options)
        self.step = 0
        self.times: list[float] = []
        self.losses = torch.zeros((), dtype=torch.float64, device=self.device)  # summed since the last point
        self.counted = 0
        self.before = {"bytes": 0.0, "entries": 0.0, "possible": 0.0, "step_s": math.nan}  # before the last resume

    def advance(self, x: Tensor, y: Tensor) -> None:
        """Train one step on a batch."""
        assert self.ddp is not None
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.rate * min(1.0, (self.step + 1) / RATE_WARM_UP)
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.ddp(x), y)
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError:
            if self.sync is not None:
                self.sync.check()  # the same error, not mangled by DDP
            raise
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter() - begun)
        self.step += 1
        self.losses += loss.detach()
        self.counted += 1

    def point(self) -> Point:
        """Measure the model on the test images."""
        loss = self.losses.item() / self.counted if self.counted else math.nan
        if not all(bool(parameter.isfinite().all()) for parameter in self.model.parameters()):
            loss = math.nan
        right = 0
        self.model.eval()
        with torch.no_grad():
            for start in range(0, len(self.images.test_x), 1000):
                x, y = self.images.test_x[start : start + 1000], self.images.test_y[start : start + 1000]
                right += int((self.model(self.images.inputs(x.to(self.device))).argmax(1) == y.to(self.device)).sum())
        self.model.train()
        return Point(self.step, loss, right / len(self.images.test_y), self._progress()["bytes"])

    def forget_losses(self) -> None:
        """Begin the mean loss of the next point."""
        self.losses.zero_()
        self.counted = 0

    def checkpoint(self) -> Checkpoint:
        """Return what all ranks have in common."""
        progress = self._progress() | {"losses": self.losses.item(), "counted": self.counted}
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        return Checkpoint(self.training, self.workers, self.step, model, optimizer, progress)

    def rank_state(self) -> dict[str, Any]:
        """Return what this rank alone knows."""
        return {"sync": None if self.sync is None else self.sync.state_dict()}

    def restore(self, checkpoints: Checkpoints, step: int) -> None:
        """Resume from a checkpoint; it may be of another number of workers."""
        saved = checkpoints.load(step)
        self.model.load_state_dict(saved.model)
        self.optimizer.load_state_dict(dict(saved.optimizer))
        if self.sync is not None:
            if saved.workers == self.workers:
                self.sync.load_state_dict(checkpoints.rank_states(step, [self.rank])[0]["sync"])
            else:
                states = checkpoints.rank_states(step, range(saved.workers))
                self.sync.load_state_dict([state["sync"] for state in states])
        self.step = saved.step
        self.before = {name: saved.progress[name] for name in self.before}
        self.losses += saved.progress["losses"]
        self.counted = int(saved.progress["counted"])

    def outcome(self, curve: Sequence[Point]) -> Outcome:
        """Return the outcome, on rank 0."""
        points = list(curve) if curve and curve[-1].step == self.step else [*curve, self.point()]
        done = self._progress()
        return Outcome(
            self.training,
            self.workers,
            self.numel,
            accuracy=points[-1].accuracy,
            bytes=done["bytes"] / self.step,
            dense_bytes=self.dense_bytes,
            density=done["entries"] / done["possible"],
            step_s=done["step_s"],
            curve=points,
        )

    def close(self) -> None:
        """Release DDP, which must happen before the process group ends."""
        if self.sync is not None:
            self.sync.detach()
        self.ddp = self.sync = None
        gc.collect()

    def _progress(self) -> dict[str, float]:
        """Return sums since step 0, earlier sessions included."""
        if self.sync is None:
            sent, entries, possible = self.dense_bytes * self.step, float(self.numel), float(self.numel)
        else:
            total = self.sync.stats().total
            sent = self.before["bytes"] + total.traffic
            entries, possible = self.before["entries"] + total.entries, self.before["possible"] + total.numel
        timed = self.times[UNTIMED:] or self.times
        step_s = statistics.median(timed) if timed else self.before["step_s"]
        return {"bytes": sent, "entries": entries, "possible": possible, "step_s": step_s}


def make_optimizer(training: Training, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a training."""
    if training.optimizer == ADAMW:
        return torch.optim.AdamW(model.parameters(), lr=training.rate, betas=(training.momentum, 0.999))
    return torch.optim.SGD(model.parameters(), lr=training.rate, momentum=training.momentum)


def batch_indices(images: int, batch: int, order: torch.Generator) -> Iterator[Tensor]:
    """Yield indices for every step, without end: all images in a new order each epoch, whole batches only."""
    if not 1 <= batch <= images:
        raise ValueError(f"batch must be from 1 to {images}, what a worker has to learn from, got {batch}")
    while True:
        shuffled = torch.randperm(images, generator=order)
        yield from shuffled[: images // batch * batch].view(-1, batch)
