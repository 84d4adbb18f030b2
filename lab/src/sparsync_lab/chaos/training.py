"""The training of one life, on one of its workers: whatever happens to it, the ledger is kept."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync_lab.chaos import checkpoint
from sparsync_lab.chaos.faults import FaultInjector, Injected
from sparsync_lab.chaos.ledger import LawBroken, Ledger, digest_of, weights_of
from sparsync_lab.chaos.schedule import Event, Life, event_at
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
        step: that it has reached.
        digests: of the weights after each step.
        worst: largest error of the ledger, as a share of its bound.
    """

    end: str = "done"
    faulted: bool = False
    error: str = ""
    step: int = 0
    events: Counter[str] = field(default_factory=Counter)
    digests: dict[int, bytes] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)
    looks: int = 0
    worst: float = 0.0
    drift: float = 0.0
    compared: int = 0


def live(
    worker: Worker, life: Life, folder: Path, known: dict[int, bytes], prepare: Callable[[], None] | None
) -> Outcome:
    """Train until the life ends; ``known``: digests of weights that steps have to come to again."""
    logging.getLogger("sparsync").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if prepare is not None:
        prepare()
    outcome = Outcome(step=life.first)
    deadline = timedelta(seconds=life.deadline)
    dist.init_process_group("gloo", rank=worker.rank, world_size=worker.count, timeout=deadline)
    training = Training(worker, life, folder, known, outcome)
    try:
        training.start()
        training.train()
    except LawBroken as error:
        outcome.end, outcome.error = "broken", str(error)
    except Exception as error:
        if isinstance(error, Injected) and not life.fault.kind.endswith("leave"):
            os._exit(1)  # as a script that nobody has caught an exception of
        outcome.end, outcome.error = "failed", f"{type(error).__name__}: {error}"
        try:
            training.after_failure()
        except LawBroken as broken:
            outcome.end, outcome.error = "broken", f"{broken} (after {outcome.error})"
    outcome.faulted = training.faults.happened
    training.close(alone=outcome.end != "done")
    return outcome


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
        make = torch.optim.AdamW if self.method.optimizer == "adamw" else torch.optim.SGD
        more = {"momentum": 0.9} if self.method.optimizer == "momentum" else {}
        self.optimizer: torch.optim.Optimizer = make(self.model.parameters(), lr=RATES[self.method.optimizer], **more)
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

    def train(self) -> None:
        """Make steps until the training is done or the life is over."""
        while self.step < self.life.last and not self._over():
            event = event_at(self.life.seed, self.step, self.setting)
            self.outcome.history.append(f"step {self.step}: {event.kind}")
            self.outcome.events[event.kind] += 1
            getattr(self, event.kind.replace(" ", "_"))(event)
            self.outcome.step = self.step
            if self.step - self.looked >= self.life.check_every or self.full:
                self.look()
            if self.step - self.saved_at >= self.life.save_every or self.step >= self.life.last or self._over():
                self.look()
                checkpoint.save(self)
            self.report(self.step)

    def _over(self) -> bool:
        return self.life.fault.kind == "restart" and self.step >= self.life.fault.step

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
                    self.scaler.scale(loss).backward()
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

    # ---- what may happen to a step: one method for each kind ---------------------------------------------------------

    def plain(self, event: Event) -> None:
        self.make_step()

    def accumulate(self, event: Event) -> None:
        self.make_step(micro=event.number)

    def two_backwards(self, event: Event) -> None:
        """Exchange twice before a step: with the second, what the first gave is exchanged again."""
        self.optimizer.zero_grad()
        self.exchange()
        if self.ledger.end(self.sync):
            self.exchange(number=1)
            self.apply(self.ledger.end(self.sync))
        else:
            self.apply(False)
        self.scheduler.step()

    def not_finite(self, event: Event) -> None:
        """One rank has a gradient that is not finite."""
        if self.rank == event.rank:
            self.bad_value = (math.nan, math.inf, -math.inf)[event.number - 2]
        else:
            self.bad_value = 0.0
        self.bad_layer = event.layer if self.rank == event.rank else "none here"
        self.make_step()
        self.bad_layer = ""

    def overflow(self, event: Event) -> None:
        """The loss scale is far too large for a step."""
        scale = self.scaler.get_scale()
        self.scaler.update(2.0**127)
        self.make_step()
        self.scaler.update(scale)

    def scale_jump(self, event: Event) -> None:
        self.scaler.update(2.0 ** (4 * event.number))
        self.make_step()

    def rolled_back(self, event: Event) -> None:
        """The user does not apply a step, and says so."""
        assert self.sync is not None
        self.optimizer.zero_grad()
        self.exchange()
        self.sync.rollback()
        self.ledger.end(self.sync, undone=True)
        self.count()
        self.scheduler.step()

    def clipped(self, event: Event) -> None:
        self.optimizer.zero_grad()
        self.exchange()
        good = self.ledger.end(self.sync)
        if self.setting.scaled:
            self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.apply(good)
        self.scheduler.step()

    def slow_rank(self, event: Event) -> None:
        if self.rank == event.rank:
            time.sleep(0.1 * event.number)
        self.make_step()

    def unused_layer(self, event: Event) -> None:
        for _ in range(event.number):
            self.make_step(without="fc1" if event.layer.startswith("fc") else "norm")

    def unused_somewhere(self, event: Event) -> None:
        layer = "fc1" if event.layer.startswith("fc") else "norm"
        self.make_step(without=layer if self.rank == event.rank else "")

    def frozen_layer(self, event: Event) -> None:
        layer = self.model.get_submodule(event.layer)
        layer.requires_grad_(False)
        for _ in range(event.number):
            self.make_step()
        layer.requires_grad_(True)

    def join(self, event: Event) -> None:
        """One rank has data for more steps than the others, some for none."""
        steps = 2 + event.number
        own = steps if self.rank == event.rank else (self.rank * 7 + self.step) % steps
        first, exchanges = self.step, self.exchanges
        self.joining = True
        with self.ddp.join():
            for _ in range(own):
                self.make_step(rate=False)
        self.joining = False
        assert self.sync is not None
        if own < steps:
            self.ledger.forgo(self.sync, self._unit())
        self.step, self.exchanges, self.full = first + steps, exchanges + steps, event.rank
        for _ in range(steps):
            self.scheduler.step()
        if self.setting.scaled:  # which ranks without data have not followed
            state = [self.scaler.state_dict()]
            dist.broadcast_object_list(state, event.rank)
            self.scaler.load_state_dict(state[0])
        self.look()

    def new_group(self, event: Event) -> None:
        """The process group is replaced by another of the same ranks."""
        assert self.sync is not None
        old, self.group = self.group, dist.new_group()
        self.ddp._update_process_group(self.group)
        self.sync.set_process_group(self.group)
        if old is not None:
            dist.destroy_process_group(old)
        self.make_step()

    def detached(self, event: Event) -> None:
        """The model trains dense for a step, and then sparsely again."""
        assert self.sync is not None
        state = self.sync.state_dict()
        self.sync.detach()
        self.sync = None
        self.make_step()
        self.sync = self.attach()
        self.sync.load_state_dict(state)
        self.make_step()

    def rebuilt(self, event: Event) -> None:
        """The DDP model is built anew."""
        assert self.sync is not None
        state = self.sync.state_dict()
        self.sync.detach()
        del self.ddp
        gc.collect()
        self.wrap()
        self.sync = self.attach()
        self.sync.load_state_dict(state)
        self.make_step()

    def state_loaded(self, event: Event) -> None:
        assert self.sync is not None
        self.sync.load_state_dict(self.sync.state_dict())
        self.make_step()

    # ---- the end -----------------------------------------------------------------------------------------------------

    def after_failure(self) -> None:
        """Look, on this rank alone, at what a step that failed has left: what was there, or all that came in."""
        if self.sync is None or not self.sync.is_attached():
            return
        try:
            self.sync.check()
        except sparsync.SparsyncError as error:
            self.outcome.error = f"{type(error).__name__}: {error}"
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
