"""What may happen to a step of a chaotic training: one method for each kind."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch import nn

from sparsync_lab.chaos import checkpoint
from sparsync_lab.chaos.schedule import Event, event_at
from sparsync_lab.chaos.training import Training

LONG = 60  # steps after which a fault is waited for no longer


class EventfulTraining(Training):
    """A training to whose steps something happens now and then."""

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
        """Return whether it is time for a restart: it was meant, or the fault has found no occasion."""
        fault = self.life.fault
        return self.step >= fault.step + (0 if fault.kind == "restart" else LONG)

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
        self.look()

    def new_group(self, event: Event) -> None:
        """The process group is replaced by another of the same ranks."""
        assert self.sync is not None
        limit = timedelta(seconds=self.life.deadline)  # of what DDP exchanges itself, under join
        old, self.group = self.group, dist.new_group(timeout=limit)
        self.ddp._update_process_group(self.group)  # type: ignore[no-untyped-call]
        self.sync.set_process_group(self.group)
        if old is not None:
            dist.destroy_process_group(old)
        self.make_step()

    def detached(self, event: Event) -> None:
        """The model trains dense for a step, and then sparsely again."""
        with self._attached_again():
            self.make_step()

    def rebuilt(self, event: Event) -> None:
        """The DDP model is built anew."""
        with self._attached_again():
            del self.ddp
            gc.collect()
            self.wrap()

    @contextmanager
    def _attached_again(self) -> Iterator[None]:
        """Detach; afterwards attach with the same state, and make a step."""
        assert self.sync is not None
        state = self.sync.state_dict()
        self.sync.detach()
        self.sync = None
        yield
        self.sync = self.attach()
        self.sync.load_state_dict(state)
        self.make_step()

    def state_loaded(self, event: Event) -> None:
        assert self.sync is not None
        self.sync.load_state_dict(self.sync.state_dict())
        self.make_step()
