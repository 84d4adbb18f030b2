"""``sparsync.OuterLoop`` on virtual workers: P workers in one process, each with weights of its own."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from sparsync.compressors import Compressor
from sparsync.config import ExchangePlan
from sparsync.engine.budget import plan_for
from sparsync.layout import Parameter
from sparsync.local_steps.round_plan import cut, round_plan
from sparsync.local_steps.shared_moments import from_means, means_of, numel_of
from sparsync.simulate.exchange import VirtualExchange
from sparsync_lab.baselines.local_step_workers import LocalStepWorkers


class VirtualFragment:
    """A fragment of all workers: where it lies in flat weights, its exchange, and what is on its way.

    Args:
        named: its tensors in the model, which hold the common weights.
        start: of the fragment in flat weights.
    """

    def __init__(
        self, named: Mapping[str, Tensor], start: int, offset: int, workers: int, plan: ExchangePlan, common: Tensor
    ) -> None:
        numel = sum(p.numel() for p in named.values())
        self.place, self.offset, self.due = slice(start, start + numel), offset, 0
        parameters = [Parameter.of(name, p) for name, p in named.items()]
        plan = plan_for(plan, named, workers)
        self.exchange = VirtualExchange(plan, parameters, plan.dense_names(named), workers, common.device)
        places = [self.exchange.place(p) for p in parameters]
        self._grads = [view for rows, _ in places for view in rows]
        self._means, self._shapes = [mean for _, mean in places], [p.shape for p in named.values()]
        self.common = nn.Parameter(common[self.place])
        self.common.grad = torch.zeros_like(common[self.place])
        self.sent = common.new_zeros(workers, numel)
        self.outer: torch.optim.Optimizer

    def send(self, weights: Tensor) -> None:
        """Exchange how far the workers went; ``weights``: their own, a row each."""
        rows, sizes = (self.common - weights).unbind(), [mean.numel() for mean in self._means]
        parts = [[part.view(s) for part, s in zip(torch.split(row, sizes), self._shapes, strict=True)] for row in rows]
        torch._foreach_copy_(self._grads, [part for parts_of in zip(*parts, strict=True) for part in parts_of])
        self.exchange.reduce()
        assert self.common.grad is not None
        torch.cat([mean.reshape(-1) for mean in self._means], out=self.common.grad)
        self.sent.copy_(weights)


class OuterWorkers(LocalStepWorkers):
    """Workers that train as ``OuterLoop`` lets them.

    Args:
        compressor, every, fragments, overlap, outer_lr, outer_momentum, budget, total_steps, options: as ``OuterLoop``
            takes them.
        share_moments: as ``OuterLoop`` does with ``optimizer=``; of all fragments at once.
        others: as ``LocalStepWorkers`` takes them.
    """

    def __init__(
        self,
        *given: Any,
        compressor: str | Compressor | None = None,
        every: int = 30,
        fragments: int = 1,
        overlap: int = 0,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        budget: float | None = None,
        total_steps: int | None = None,
        share_moments: bool = False,
        options: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        super().__init__(*given, every=every, budget=1.0, **others)
        self.overlap = overlap
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._moments = numel_of(named) if share_moments else 0
        plan = round_plan(compressor, budget, total_steps, every, options or {}, self._moments / self.numel)
        self.fragments, start = list[VirtualFragment](), 0
        for number, (own, own_plan) in enumerate(cut(named, fragments, plan, self.workers), 1):
            offset = number * every // fragments % every
            self.fragments.append(VirtualFragment(own, start, offset, self.workers, own_plan, self.common))
            start = self.fragments[-1].place.stop
        for fragment in self.fragments:
            fragment.outer = torch.optim.SGD([fragment.common], outer_lr, outer_momentum, nesterov=outer_momentum > 0)

    def after_step(self) -> None:
        for fragment in self.fragments:
            if fragment.due and fragment.due == self.step:
                self._take(fragment)
            if self.step % self.every == fragment.offset:
                tally = fragment.exchange.tally
                sent, entries = tally.bytes, tally.entries
                fragment.send(self.weights[:, fragment.place])
                self.tally.bytes += tally.bytes - sent
                self.tally.entries += tally.entries - entries
                fragment.due = self.step + self.overlap
                if not self.overlap:
                    self._take(fragment)
        if self._moments and self.step % self.every == 0:
            self._share_moments()

    def _take(self, fragment: VirtualFragment) -> None:
        """Step the common weights of a fragment, and let workers go on from them with what they learned since."""
        fragment.outer.step()
        own = self.weights[:, fragment.place]
        if self.overlap:
            own.add_(fragment.common - fragment.sent)
        else:
            own.copy_(fragment.common.expand_as(own))
        fragment.due = 0

    def _share_moments(self) -> None:
        """Make the second moments of all workers their mean, by rows and columns."""
        (state,) = self.optimizer.state.values()
        for moments in zip(*map(self.views, state["exp_avg_sq"]), strict=True):
            sums = [torch.stack(parts).mean(0) for parts in zip(*map(means_of, moments), strict=True)]
            torch._foreach_copy_(list(moments), [from_means(sums, moments[0].shape)] * self.workers)
        self.tally.bytes += 2 * (self.workers - 1) / self.workers * 4 * self._moments

    def kept(self) -> list[Tensor]:
        moving = [tensor for f in self.fragments for tensor in (f.sent, f.common.grad) if tensor is not None]
        return [self.weights, *moving]

    def state_dict(self) -> dict[str, Any]:
        exchanges = [fragment.exchange.state_dict() for fragment in self.fragments]
        own = [
            (exchange, f.due, deepcopy(f.outer.state_dict()))
            for exchange, f in zip(exchanges, self.fragments, strict=True)
        ]
        return {**super().state_dict(), "fragments": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for fragment, (exchange, due, outer) in zip(self.fragments, state["fragments"], strict=True):
            fragment.exchange.load_state_dict(exchange)
            fragment.exchange.tally.steps, fragment.due = exchange[0]["step"], due
            fragment.outer.load_state_dict(outer)
