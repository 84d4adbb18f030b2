"""A part of a model that workers train by themselves: shared weights, and the exchange that steps them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn import Module, Parameter

from sparsync.collectives.comm.device_status import Report
from sparsync.config import ExchangePlan
from sparsync.engine.bucketing import future_on
from sparsync.engine.stats import ExchangeRecord
from sparsync.hosts.handle import Handle
from sparsync.local_steps.shared_moments import SharedMoments
from sparsync.local_steps.state import State

log = logging.getLogger("sparsync")

NOT_FINITE = "rank %d: weights were not finite after %d steps: it misses the round and goes on from the shared ones"


class SharedWeights(Module):
    """The weights that all workers have in common, in fp32, under the names of the model's own."""

    def __init__(self, own: Mapping[str, Tensor]) -> None:
        super().__init__()
        zeros = {name: torch.zeros(p.shape, dtype=torch.float32, device=p.device) for name, p in own.items()}
        self.by_name = {name: Parameter(tensor) for name, tensor in zeros.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Parameter]]:
        yield from self.by_name.items()


class Fragment:
    """A part of the model that travels as one.

    Its pseudo-gradient, shared weights less a worker's own, is pushed as the only bucket of a step of the engine; the
    mean that comes back is the gradient by which the outer optimizer steps the shared weights.

    Args:
        own: this worker's parameters, by name, which local steps change.
        offset: steps after each multiple of H at which it leaves.
        rate, momentum: of the outer optimizer.
        plan: how it is exchanged.
        group: process group of the workers.
        moments: of the local optimizer, which a round shares, if any.
    """

    def __init__(
        self,
        own: Mapping[str, Tensor],
        offset: int,
        rate: float,
        momentum: float,
        plan: ExchangePlan,
        group: Any,
        moments: SharedMoments | None = None,
    ) -> None:
        self.own, self.offset, self.due = dict(own), offset, 0
        self.weights, self.shared = list(own.values()), SharedWeights(own)
        self.parameters: list[Tensor] = list(self.shared.parameters())
        self.buffer = torch.cat([torch.zeros_like(p).view(-1) for p in self.parameters])
        parts = torch.split(self.buffer, [p.numel() for p in self.parameters])
        self.grads = [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            parameter.grad = grad
        self.optimizer = torch.optim.SGD(self.parameters, rate, momentum, nesterov=momentum > 0)
        self.handle = Handle(self.shared, plan, group)
        self.moments, self._reducer = moments, self.handle.start()
        self.channel = self._reducer.channel
        self.future: Future[Tensor] | None = None
        self._moments_there, self._moments_summed = threading.Event(), list[Report]()
        self.sent: list[Tensor] | None = None  # own weights as far as they were sent, if they have changed since

    @torch.no_grad()
    def begin(self) -> None:
        """Share the weights that this worker has, which all others have, too."""
        torch._foreach_copy_(self.parameters, self.weights)

    @torch.no_grad()
    def send(self, step: int, overlap: int, miss: bool) -> None:
        """Begin to exchange how far this worker went.

        Args:
            step: of the training.
            overlap: local steps until the result is taken.
            miss: send nothing: what was learned goes with the next round.
        """
        # As local steps began from them: what a cast cut off was not learned.
        start = [p.to(w.dtype).float() for p, w in zip(self.parameters, self.weights, strict=True)]
        torch._foreach_copy_(self.grads, start)
        torch._foreach_sub_(self.grads, [w.float() for w in self.weights])
        bad = not bool(self.buffer.isfinite().all())
        if bad:
            log.warning(NOT_FINITE, self.channel.rank, step)
            torch._foreach_copy_(self.weights, start)
        if overlap or (miss and not bad):
            self.sent = [t.clone() for t in (start if miss or bad else [w.float() for w in self.weights])]
        miss = miss or bad
        if miss:
            self.buffer.zero_()
        if self.moments is not None:
            self.moments.gather(miss)
            self._moments_there.clear()
            self._moments_summed.clear()
        self.due = step + overlap
        self.future = self.handle.push(0, self.buffer, self.parameters, last=True, joined=miss)
        if self.moments is not None:
            self._reducer.path.submit([self._sum_moments], self.buffer.device)

    def _sum_moments(self) -> None:
        """Sum the moments over the workers, on the communication thread, behind the entries."""
        try:
            self._reducer.path.run_exchange("second moments", self.buffer.device, self._exchange_moments)
        finally:
            self._moments_there.set()

    def _exchange_moments(self) -> None:
        assert self.moments is not None
        record, flat = ExchangeRecord("second moments"), self.moments.flat
        record.compressed = record.started = time.perf_counter()
        self.channel.unit = record.unit
        self.channel.all_reduce(flat)
        self._moments_summed.append(Report.of(flat[-1:], []))  # NCCL's sum has only begun
        record.exchanged = record.decoded = time.perf_counter()
        record.bytes, record.traffic = self.channel.take_count(), 2 * (1 - 1 / self.channel.size) * flat.nbytes
        self._reducer.stats.add(record)

    @torch.no_grad()
    def take(self) -> None:
        """Wait for the mean, step the shared weights by it, and go on from them; what was learned since stays."""
        assert self.future is not None
        self.wait()
        self.future = None
        if self.moments is not None:
            self.moments.give()
        self._step()
        if self.sent is None:
            torch._foreach_copy_(self.weights, self.parameters)
        else:
            for weight, shared, sent in zip(self.weights, self.parameters, self.sent, strict=True):
                weight.add_(shared - sent)
            self.sent = None

    def _step(self) -> None:
        """Step the shared weights by the mean, if that is finite: else what was sent is back in the residuals."""
        if bool(self.buffer.isfinite().all()):
            self.optimizer.step()

    def wait(self) -> None:
        """Wait for what is on its way; raise what ended it, before the deadline: where the device decides, futures are
        there at once, and whoever asked the device for a result would wait for a lost rank for ever."""
        assert self.future is not None
        self.future.wait()
        if self.moments is not None:
            self._moments_there.wait()  # which comes before the deadline of the exchange
            for summed in self._moments_summed:
                self.channel.await_report(summed)
        self.handle.check()

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, this worker's weights included; what is on its way is waited for."""
        kinds: dict[str, list[Tensor]] = {"own": self.weights, "shared": self.parameters, "momentum": self._momentum()}
        if self.future is not None:
            self.wait()
            assert self.sent is not None  # there is something on its way only while local steps are made
            kinds |= {"mean": self.grads, "sent": self.sent}
        tensors = {
            kind: dict(zip(self.own, [t.detach().clone() for t in of], strict=False)) for kind, of in kinds.items()
        }
        summed = {} if self.moments is None or self.future is None else {"moments": self.moments.flat.clone()}
        return {"exchange": self.handle.state_dict(), "due": self.due, **tensors, **summed}

    def check_state(self, state: State | Sequence[State]) -> None:
        """Refuse, with a ``ValueError``, what ``load_state_dict`` cannot go on from, of a form that is checked; changes
        nothing."""
        self.handle.check_state(state["exchange"] if isinstance(state, Mapping) else [one["exchange"] for one in state])
        for one in [state] if isinstance(state, Mapping) else state:
            if self.moments is not None and "moments" in one and one["moments"].shape != self.moments.flat.shape:
                raise ValueError("the outer loop's state is damaged: its second moments are of another size")

    @torch.no_grad()
    def load_state_dict(self, state: State | Sequence[State]) -> None:
        """Go on from this worker's own state, or from its share of those of all workers of an earlier run; all of it
        has been checked, and nothing is on its way.

        With another number of workers, the mean over the workers of what was learned since the last round is kept: each
        goes on for some of the old ones.
        """
        rank, workers = self.channel.rank, self.channel.size
        alone = isinstance(state, Mapping)
        states = [state] * workers if isinstance(state, Mapping) else list(state)
        mine, old = states[rank % len(states)], len(states)
        self.handle.load_state_dict(mine["exchange"] if alone else [one["exchange"] for one in states])
        self._fill(self.parameters, mine["shared"])
        self.optimizer.state.clear()
        for name, momentum in mine["momentum"].items():
            parameter = self.shared.by_name[name]
            self.optimizer.state[parameter]["momentum_buffer"] = momentum.to(parameter, copy=True)
        self.future, self.sent, self.due = None, None, mine["due"]
        if "mean" in mine:
            self._fill(self.grads, mine["mean"])
        if old == workers:
            self._fill(self.weights, mine["own"])
            if "mean" in mine:
                self.sent = [torch.empty_like(p) for p in self.parameters]
                self._fill(self.sent, mine["sent"])
                self.future = future_on(self.buffer.device)
                self.future.set_result(self.buffer)
                self._moments_there.set()
                self._moments_summed.clear()
                if self.moments is not None:
                    self.moments.flat.zero_()  # of which nobody gives, unless there are some
                    if "moments" in mine:
                        self.moments.flat.copy_(mine["moments"])
            return
        if "mean" in mine:
            self._step()
        torch._foreach_copy_(self.weights, self.parameters)
        for one in states[rank::workers]:
            for name, weight in self.own.items():
                begun = one["sent"][name] if "sent" in one else one["shared"][name].to(weight.dtype)  # as in a round
                learned = one["own"][name].float() - begun.float()
                weight.add_(learned.to(weight), alpha=workers / old)

    def _fill(self, tensors: Sequence[Tensor], named: Mapping[str, Tensor]) -> None:
        torch._foreach_copy_(list(tensors), [named[name].to(t) for name, t in zip(self.own, tensors, strict=True)])

    def _momentum(self) -> list[Tensor]:
        buffers = [self.optimizer.state[p].get("momentum_buffer") for p in self.parameters]
        return [buffer for buffer in buffers if buffer is not None]
