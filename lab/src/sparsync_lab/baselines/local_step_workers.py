"""Virtual workers that train weights of their own for some steps, and then go on from common ones."""

from __future__ import annotations

from abc import abstractmethod
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from sparsync.simulate.sequential import Batch, SequentialPasses
from sparsync_lab.baselines.base import BaselineWorkers


class LocalStepWorkers(BaselineWorkers):
    """Every worker trains weights of its own, a row of ``weights``, by AdamW. ``model`` has the common ones.

    Args:
        rate, weight_decay, betas: of AdamW.
        passes: is not asked: they run one worker after another.
        given, others: as ``BaselineWorkers`` takes them.
    """

    def __init__(
        self,
        *given: Any,
        rate: float,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.999),
        passes: type[SequentialPasses] = SequentialPasses,
        **others: Any,
    ) -> None:
        super().__init__(*given, passes=LocalPasses, **others)
        self.common = torch.cat([p.detach().flatten() for p in self.parameters])
        for parameter, view in zip(self.parameters, self.views(self.common), strict=True):
            parameter.data = view
        self.weights = self.common.repeat(self.workers, 1)
        assert isinstance(self.passes, LocalPasses)
        for rank, row in enumerate(self.weights):
            self.passes.give(rank, self.views(row))
        local = nn.Parameter(self.weights)
        local.grad = self.rows
        fused = self.rows.is_cuda or None  # one pass over the weights of all workers
        self.optimizer = torch.optim.AdamW([local], rate, betas, weight_decay=weight_decay, fused=fused)
        self.optimizer.register_step_post_hook(self._call_after_step)

    def exchange(self) -> None:
        """Do nothing: workers take a step of their own first."""

    @torch.no_grad()
    def _call_after_step(self, *_: Any) -> None:
        self.after_step()

    @abstractmethod
    def after_step(self) -> None:
        """Do what the method does after a local step of all workers."""


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
