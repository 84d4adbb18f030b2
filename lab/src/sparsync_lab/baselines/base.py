"""Virtual workers of a published method: passes, clipping, counts and checkpoints, all but the method itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from sparsync.simulate.sequential import Batch, Loss, SequentialPasses
from sparsync.simulate.virtual_units import Tally
from sparsync_lab.baselines.blocks import groups_of, share_within


class BaselineWorkers(ABC):
    """P workers in one process, with the part of ``VirtualWorkers``' interface that trainings use.

    Every worker's gradient is a row of ``rows``, ``(P, n)``. Messages are gathered: a worker sends P - 1 of them.

    Args:
        model: on its device; it holds what is evaluated.
        loss_fn: as ``VirtualWorkers`` takes it; nothing is carried on from step to step.
        workers: P.
        budget: bytes a worker may send, as a share of dense's: fp32 gradients summed in a ring, every step.
        clip: largest norm of a worker's gradient.
        graph, streams, passes: as ``VirtualWorkers`` takes them.
    """

    optimizer: torch.optim.Optimizer
    value_bits = 16
    block_bits = 0

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        workers: int,
        *,
        budget: float,
        every: int = 1,
        clip: float | None = None,
        graph: bool = False,
        streams: int = 1,
        passes: type[SequentialPasses] = SequentialPasses,
    ) -> None:
        self.model, self.workers, self.clip, self.every = model, workers, clip, every
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.sizes = [p.numel() for p in self.parameters]
        self.numel, device = sum(self.sizes), self.parameters[0].device
        self.rows = torch.zeros(workers, self.numel, device=device)
        self.groups = groups_of([p.shape for p in self.parameters], device)
        dense = 2 * (workers - 1) / workers * 4 * self.numel
        allowed = every * budget * dense / (workers - 1)
        self.share = share_within(self.groups, allowed, self.value_bits, self.block_bits)
        self.tally = Tally()
        views = [self.views(row) for row in self.rows]
        self.passes = passes(model, loss_fn, self.parameters, views, (), graph, streams)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return a flat tensor's views in the shapes of the parameters."""
        parts = torch.split(flat, self.sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    @property
    def step(self) -> int:
        return self.tally.steps

    def backward(self, batches: Sequence[Batch]) -> Tensor:
        """Compute every worker's gradient, and whatever of the method comes before the optimizer's step; return the
        mean of the losses."""
        loss = self.passes.run(batches).mean()
        with torch.no_grad():
            if self.clip is not None:
                norms = torch.linalg.vector_norm(self.rows, dim=1, keepdim=True)
                self.rows.mul_(self.clip / norms.clamp(min=self.clip))
            self.tally.steps += 1
            self.tally.possible += self.workers * self.numel
            self.exchange()
        return loss

    @abstractmethod
    def exchange(self) -> None:
        """Do what the method does with ``rows`` before the optimizer's step."""

    def count(self, message: int, entries: int) -> None:
        """Count an exchange: a worker's message and the entries in it."""
        self.tally.bytes += (self.workers - 1) * message
        self.tally.entries += self.workers * entries

    @abstractmethod
    def kept(self) -> list[Tensor]:
        """Return the tensors that workers keep from step to step, beside the optimizer's."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "optimizer": deepcopy(self.optimizer.state_dict()),
            "kept": [tensor.clone() for tensor in self.kept()],
            "tally": dict(vars(self.tally)),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for own, stored in zip(self.kept(), state["kept"], strict=True):
            own.copy_(stored)
        self.tally = Tally(**state["tally"])

    def forget(self) -> None:
        """Refuse to carry on from the start: nothing is carried."""
        raise NotImplementedError

    def detach(self) -> None:
        """Leave the optimizer as it is: nothing was taken from it."""
        return
