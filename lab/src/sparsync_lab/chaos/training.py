"""The training of one life, on one of its workers: whatever happens to it, the ledger is kept."""

from __future__ import annotations

import contextlib
import gc
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync_lab.chaos import checkpoint
from sparsync_lab.chaos.faults import FaultInjector
from sparsync_lab.chaos.ledger import LawBroken, Ledger, digest_of, weights_of
from sparsync_lab.chaos.schedule import Life
from sparsync_lab.data import load
from sparsync_lab.training.local_workers import Worker

RATES = {"sgd": 0.05, "momentum": 0.01, "adamw": 1e-3}
PERIOD = 60  # steps in which the learning rate falls to a tenth and rises again
SCALE = 2.0**10
BATCH = 8


class Net(nn.Module):
    """Two hidden layers; one of the layers that keep the width may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc0, self.norm, self.fc1, self.fc2 = (
            nn.Linear(64, 32),
            nn.LayerNorm(32),
            nn.Linear(32, 32),
            nn.Linear(32, 10),
        )

    def forward(self, x: Tensor, without: str = "") -> Tensor:
        x = torch.tanh(self.fc0(x))
        x = x if without == "norm" else self.norm(x)
        x = x if without == "fc1" else torch.tanh(self.fc1(x))
        out: Tensor = self.fc2(x)
        return out


@dataclass
class Outcome:
    """What a worker has to say of its life.

    Args:
        end: ``"done"``, ``"failed"`` (an error ended it) or ``"broken"`` (a law).
        faulted: whether the fault has happened to this worker.
        expected: whether ``error`` is one that a loss may end in: the library's own, or of an exchange in which the
            library has no part, as the ledger's.
        by_torch: whether it is one of the latter.
        step: that it has reached.
        digests: of the weights after each step.
        worst: largest error of the ledger, as a share of its bound.
    """

    end: str = "done"
    faulted: bool = False
    error: str = ""
    expected: bool = False
    by_torch: bool = False
    step: int = 0
    events: Counter[str] = field(default_factory=Counter)
    digests: dict[int, bytes] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)
    looks: int = 0
    worst: float = 0.0
    drift: float = 0.0
    compared: int = 0


class Training:
    """A model, its optimizer and its handle, and the ledger beside them."""

    def __init__(self, worker: Worker, life: Life, folder: Path, known: dict[int, bytes], outcome: Outcome) -> None:
        self.rank, self.size, self.report = worker.rank, worker.count, worker.report
        self.life, self.setting, self.method = life, life.setting, life.method
        self.folder, self.known, self.outcome = folder, known, outcome
        self.faults = FaultInjector(life.fault, worker.rank)
        self.model = Net()
        self.step, self.exchanges, self.looked, self.saved_at = life.first, 0, life.first, life.first
        self.full = 0  # a rank that has made all steps since the last look
        self.last_rate, self.joining = 1.0, False
        self.recording, self.bad_value, self.bad_layer = False, 0.0, ""
        self.group: Any = None
        self.sync: sparsync.Handle | None = None
        images = load("digits")
        self.images, self.labels = images.train_x.flatten(1), images.train_y

    # ---- what a user's script does ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Build everything and go on from the last checkpoint."""
        counts = self.method.keeps != "updates"
        keeps = self.method.options.get("compressor") != "none"
        self.ledger = Ledger(self.model, counts, keeps, self.method.beta, self.setting.undoes)
        for index, (name, parameter) in enumerate(self.model.named_parameters()):
            parameter.register_hook(partial(self._on_gradient, index, name))  # type: ignore[no-untyped-call]
        rate, momentum = RATES[self.method.optimizer], 0.9 if self.method.optimizer == "momentum" else 0.0
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(self.model.parameters(), rate)
            if self.method.optimizer == "adamw"
            else torch.optim.SGD(self.model.parameters(), rate, momentum)
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=7, enabled=self.setting.scaled)
        self.scaler.scale(torch.zeros(()))  # which makes its state
        self.wrap()
        self.sync = self.attach()
        checkpoint.resume(self)

    def schedule_rate(self) -> None:
        """Let the learning rate be that of the step, and change with it."""
        for group in self.optimizer.param_groups:
            group["initial_lr"] = RATES[self.method.optimizer]
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate_at, last_epoch=self.step - 1)

    def wrap(self) -> None:
        self.ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=self.setting.bucket_mb, find_unused_parameters=self.setting.unused
        )

    def attach(self) -> sparsync.Handle:
        options = dict(self.method.options)
        if self.setting.all_sparse and self.method.keeps != "updates":
            options |= {"dense_below": 0, "dense_1d": False}
        elif "recipe" not in options:
            options["dense_below"] = 400
        if self.method.nodes:
            options["per_node"] = [[*range(at, min(at + 2, self.size))] for at in range(0, self.size, 2)]
        return sparsync.attach(
            self.ddp, optimizer=self.optimizer, scaler=self.scaler if self.setting.scaled else None,
            transactional=self.setting.undoes or None, joined="freeze" if self.setting.frozen_joins else "drain",
            deadline=self.life.deadline, seed=3, **options,
        )  # fmt: skip

    def look(self) -> None:
        """Compare all ranks."""
        if self.looked < self.step:
            self.ledger.look(self.step, self.exchanges, self.full)
            self.looked, self.full = self.step, 0
            self.outcome.looks, self.outcome.worst = self.ledger.looks, self.ledger.worst
            self.outcome.drift = self.ledger.drift.abs().max().item()

    # ---- a step ------------------------------------------------------------------------------------------------------

    def exchange(self, micro: int = 1, without: str = "", number: int = 0) -> None:
        """Make gradients of so many batches, and exchange them with the last."""
        for part in range(micro):
            last = part == micro - 1
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                self.faults.reach("forward", self.step, self.sync)
                x, y = self.batch(10 * number + part)
                loss = nn.functional.cross_entropy(self.ddp(x, without), y)
                if last:
                    self.last_rate = self.rate()
                    self.ledger.begin(self._unit(), self.sync)
                    self.recording = True
                try:
                    self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                finally:
                    self.recording = False
        self.exchanges += self.sync is not None

    def apply(self, good: bool) -> None:
        """Make the optimizer's step, unless gradients are not finite; count the step."""
        self.faults.reach("step", self.step, self.sync)
        if self.setting.scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif good:
            self.optimizer.step()
        self.count()

    def count(self) -> None:
        """Go on to the next step; its weights have to be those that were there before a restart."""
        digest = digest_of(weights_of(self.ledger.parameters))
        self.outcome.digests[self.step] = digest
        if self.step in self.known:
            self.outcome.compared += 1
            if self.known[self.step] != digest:
                raise LawBroken(f"step {self.step} was made again after a restart, and its weights have other bits")
        self.step += 1

    def make_step(self, micro: int = 1, without: str = "", rate: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=self.step % 3 > 0)
        self.exchange(micro, without)
        good = self.ledger.end(self.sync)
        if self.setting.scaled and not good and self.bad_layer == "" and self.scaler.get_scale() < 2.0**60:
            raise LawBroken("a step was not finite, though all gradients were")
        self.apply(good)
        if rate:
            self.scheduler.step()

    def batch(self, part: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(1_000_003 * self.step + 101 * part + self.rank)
        chosen = torch.randint(len(self.images), (BATCH,), generator=draw)
        return self.images[chosen], self.labels[chosen]

    def _unit(self) -> float:
        """Return what a gradient has to be multiplied with, for the ledger."""
        if self.method.keeps == "updates":
            return 1.0
        return self.rate() / float(self.scaler.get_scale())

    def rate(self) -> float:
        """Return the learning rate, if residuals follow it."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.method.options.get("follow_lr") else 1.0

    def _on_gradient(self, index: int, name: str, grad: Tensor) -> Tensor | None:
        if not self.recording:
            return None
        self.faults.reach("backward", self.step, self.sync, name)
        if self.bad_layer and name.startswith(self.bad_layer):
            grad = grad.clone()
            grad.view(-1)[self.step % grad.numel()] = self.bad_value
        self.ledger.came_in(index, grad)
        return grad

    # ---- the end -----------------------------------------------------------------------------------------------------

    def after_failure(self) -> None:
        """Look, on this rank alone, at what a step that failed has left: what was there, or all that came in."""
        if self.sync is None or not self.sync.is_attached():
            return
        try:
            self.sync.check()
        except sparsync.SparsyncError as error:
            self.outcome.error, self.outcome.expected = f"{type(error).__name__}: {error}", True
            self.outcome.by_torch = False
        else:
            return  # somebody else's exchange has failed
        if self.method.nodes or self.joining:  # one keeps for others; or makes steps that nobody sees
            return
        state = self.sync.state_dict()
        if state["step"] == self.exchanges:
            self.ledger.after_failure(self.sync, checkpoint.unit_of(state, self))
        elif state["step"] != self.exchanges + 1:
            raise LawBroken(f"a failed step left a state of step {state['step']} after {self.exchanges} exchanges")

    def close(self, alone: bool = False) -> None:
        """Leave nothing behind, as a script that ends."""
        if self.sync is not None:
            self.sync.abandon() if alone else self.sync.detach()
        for name in ("ddp", "sync"):
            vars(self).pop(name, None)
        gc.collect()
        if alone:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        else:
            dist.destroy_process_group()


def rate_at(step: int) -> float:
    """Return the share of the learning rate at a step."""
    return 0.1 + 0.45 * (1 + math.cos(2 * math.pi * step / PERIOD))
