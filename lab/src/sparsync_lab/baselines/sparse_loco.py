"""SparseLoCo (Sarfi, Thérien, Lidin, Belilovsky: Communication Efficient LLM Pre-training with SparseLoCo, 2025)."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from sparsync.simulate.sequential import Batch, Loss, SequentialPasses
from sparsync_lab.baselines.base import BaselineWorkers
from sparsync_lab.baselines.blocks import entries_at, largest, mean_of, message_bytes


class SparseLoCo(BaselineWorkers):
    """Every worker trains weights of its own by AdamW. Every so many steps it adds how far it went to its error, which
    decays, and sends the largest entries of every block of that, with two bits each; all go on from the common weights
    less the mean of what was sent.

    ``model`` has the common weights. A value is its sign and whether it is above the mean magnitude of its block; the
    means of both kinds, in bfloat16, come with the block.

    Args:
        rate, weight_decay, betas: of AdamW.
        local_steps: between exchanges; H in the paper.
        decay: of the error, an exchange.
        outer: learning rate of the common weights.
        others: as ``BaselineWorkers`` takes them; passes run one worker after another.
    """

    value_bits = 2
    block_bits = 32

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        workers: int,
        *,
        rate: float,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.999),
        local_steps: int = 15,
        decay: float = 0.95,
        outer: float = 1.0,
        passes: type[SequentialPasses] = SequentialPasses,
        **others: Any,
    ) -> None:
        super().__init__(model, loss_fn, workers, every=local_steps, passes=LocalPasses, **others)
        self.decay, self.outer = decay, outer
        self.common = torch.cat([p.detach().flatten() for p in self.parameters])
        for parameter, view in zip(self.parameters, self.views(self.common), strict=True):
            parameter.data = view
        self.weights = self.common.repeat(workers, 1)
        assert isinstance(self.passes, LocalPasses)
        for rank, row in enumerate(self.weights):
            self.passes.give(rank, self.views(row))
        local = nn.Parameter(self.weights)
        local.grad = self.rows
        self.errors = torch.zeros_like(self.rows)
        fused = self.rows.is_cuda or None  # one pass over the weights of all workers
        self.optimizer = torch.optim.AdamW([local], rate, betas, weight_decay=weight_decay, fused=fused)
        self.optimizer.register_step_post_hook(self._after_step)

    def exchange(self) -> None:
        """Do nothing: workers take a step of their own first."""

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        if self.step % self.every:
            return
        self.errors.mul_(self.decay).add_(self.common).sub_(self.weights)
        mean, sent = torch.zeros_like(self.common), 0
        for group in self.groups:
            values, places = largest(group.of(self.errors), entries_at(self.share, group))
            values = two_bits(values)
            group.put(mean_of(values, places, group.area), mean)
            taken = group.places.view(1, group.count, group.area).expand(self.workers, -1, -1).gather(2, places)
            self.errors.scatter_add_(1, taken.flatten(1), -values.flatten(1))
            sent += values[0].numel()
        self.common.sub_(mean, alpha=self.outer)
        self.weights.copy_(self.common.expand_as(self.weights))
        self.count(message_bytes(self.groups, self.share, self.value_bits, self.block_bits), sent)

    def kept(self) -> list[Tensor]:
        return [self.weights, self.errors]


class LocalPasses(SequentialPasses):
    """Passes of workers that have weights of their own."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        model = self.models[0]
        if any(True for _ in model.buffers()):
            raise ValueError("workers with weights of their own take no model with buffers, such as batch norm's")
        self.models = [deepcopy(model) for _ in self.models]
        self._own = [[p for p in model.parameters() if p.requires_grad] for model in self.models]

    def give(self, rank: int, weights: list[Tensor]) -> None:
        """Give a worker its weights."""
        for parameter, own in zip(self._own[rank], weights, strict=True):
            parameter.data = own

    def _one(self, rank: int) -> None:
        batch: Batch = self.inputs[rank]
        loss, _ = self.loss_fn(self.models[rank], batch, ())
        grads = torch.autograd.grad(loss, self._own[rank])
        with torch.no_grad():
            torch._foreach_copy_(self.views[rank], list(grads))
            self.losses[rank].copy_(loss)

    def _broadcast(self) -> None:
        """Do nothing: there are no buffers."""


def two_bits(values: Tensor) -> Tensor:
    """Return values ``(..., k)`` as two magnitudes with signs: the means of those above, and not above, the mean."""
    sizes = values.abs()
    high = sizes > sizes.mean(-1, keepdim=True)
    above = (sizes * high).sum(-1, keepdim=True) / high.sum(-1, keepdim=True).clamp(min=1)
    below = (sizes * ~high).sum(-1, keepdim=True) / (~high).sum(-1, keepdim=True).clamp(min=1)
    levels = torch.where(high, above.bfloat16().float(), below.bfloat16().float())
    return levels * values.sign()
