"""SparseLoCo (Sarfi, Thérien, Lidin, Belilovsky: Communication Efficient LLM Pre-training with SparseLoCo, 2025)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsync_lab.baselines.blocks import entries_at, largest, mean_of, message_bytes
from sparsync_lab.baselines.local_step_workers import LocalStepWorkers


class SparseLoCo(LocalStepWorkers):
    """Every worker trains weights of its own by AdamW. Every so many steps it adds how far it went to its error, which
    decays, and sends the largest entries of every block of that, with two bits each; all go on from the common weights
    less the mean of what was sent.

    ``model`` has the common weights. A value is its sign and whether it is above the mean magnitude of its block; the
    means of both kinds, in bfloat16, come with the block.

    Args:
        local_steps: between exchanges; H in the paper.
        decay: of the error, an exchange.
        outer: learning rate of the common weights.
        others: as ``LocalStepWorkers`` takes them.
    """

    value_bits = 2
    block_bits = 32

    def __init__(
        self, *given: Any, local_steps: int = 15, decay: float = 0.95, outer: float = 1.0, **others: Any
    ) -> None:
        super().__init__(*given, every=local_steps, **others)
        self.decay, self.outer = decay, outer
        self.errors = torch.zeros_like(self.rows)

    def after_step(self) -> None:
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


def two_bits(values: Tensor) -> Tensor:
    """Return values ``(..., k)`` as two magnitudes with signs: the means of those above, and not above, the mean."""
    sizes = values.abs()
    high = sizes > sizes.mean(-1, keepdim=True)
    above = (sizes * high).sum(-1, keepdim=True) / high.sum(-1, keepdim=True).clamp(min=1)
    below = (sizes * ~high).sum(-1, keepdim=True) / (~high).sum(-1, keepdim=True).clamp(min=1)
    levels = torch.where(high, above.bfloat16().float(), below.bfloat16().float())
    return levels * values.sign()
