"""DeMo (Peng, Quesnelle, Kingma: Decoupled Momentum Optimization, 2024)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sparsync_lab.baselines.base import BaselineWorkers
from sparsync_lab.baselines.blocks import entries_at, largest, mean_of, message_bytes


class DeMo(BaselineWorkers):
    """Every worker has a momentum of its own; of its cosine transform, block by block, it sends the largest
    coefficients and keeps the rest. All take a step by the sign of the mean of what was sent.

    The transform is orthonormal, so that momentum can be kept transformed: that saves a transform and its inverse.
    Coefficients are sent in bfloat16; what that loses stays in the momentum, too.

    Args:
        rate, weight_decay: of the step; decay is decoupled.
        decay: of the momentum, a step.
        given, others: as ``BaselineWorkers`` takes them.
    """

    def __init__(self, *given: Any, rate: float, weight_decay: float, decay: float = 0.999, **others: Any) -> None:
        super().__init__(*given, **others)
        # Without momentum SGD's weight decay is decoupled: rate x (sign + decay x weights).
        self.optimizer = torch.optim.SGD(self.parameters, rate, weight_decay=weight_decay)
        self.decay = decay
        self.momenta = [self.rows.new_zeros(self.workers, group.count, group.area) for group in self.groups]
        self.bases = {side: cosines(side).to(self.rows) for group in self.groups for side in group.shape}
        self._mean = torch.zeros_like(self.rows[0])
        self._means = self.views(self._mean)

    def exchange(self) -> None:
        sent = 0
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            down, right = (self.bases[side] for side in group.shape)
            blocks = group.of(self.rows).view(self.workers, group.count, *group.shape)
            momentum.mul_(self.decay).add_((down @ blocks @ right.T).flatten(2))
            values, places = largest(momentum, entries_at(self.share, group))
            values = values.bfloat16().float()
            momentum.scatter_add_(-1, places, -values)
            mean = mean_of(values, places, group.area).view(group.count, *group.shape)
            group.put((down.T @ mean @ right).sign_(), self._mean)
            sent += values[0].numel()
        for parameter, mean in zip(self.parameters, self._means, strict=True):
            parameter.grad = mean
        self.count(message_bytes(self.groups, self.share, self.value_bits), sent)

    def kept(self) -> list[Tensor]:
        return self.momenta


def cosines(length: int) -> Tensor:
    """Return the orthonormal matrix of the cosine transform (DCT-II)."""
    k, i = torch.arange(length).unsqueeze(1), torch.arange(length)
    matrix = math.sqrt(2 / length) * torch.cos(math.pi / length * (i + 0.5) * k)
    matrix[0] /= math.sqrt(2)
    return matrix
