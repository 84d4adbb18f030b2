"""Parameters with a gradient for every worker.

The examples of P workers lie in one batch, worker by worker in turn: example ``b`` of worker ``p`` is number
``b * P + p``. A contiguous ``(B * P, C, ...)`` is then a ``(B, P * C, ...)``, too, without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class PerWorkerParams:
    """P views of the values of every parameter, one a worker, each with a gradient of its own.

    Args:
        workers: P.
        parameters: of the model.
        norms: those that must be repeated in memory.
    """

    def __init__(self, workers: int, parameters: Iterable[nn.Parameter], norms: Iterable[nn.Parameter]) -> None:
        self.workers, self.examples = workers, 0
        self._parameters, self._norms = list(parameters), list(norms)
        self._repeated = [p.new_empty(workers, *p.shape) for p in self._norms]
        self._params: dict[int, Tensor] = {}

    @torch.no_grad()
    def refresh(self, examples: int) -> None:
        """Make new views before a pass of so many examples, those of all workers together."""
        self.examples = examples
        params = {id(p): p.detach().expand(self.workers, *p.shape) for p in self._parameters}
        if self._norms:
            rows = [row for repeated in self._repeated for row in repeated]
            torch._foreach_copy_(rows, [p for p in self._norms for _ in range(self.workers)])
            params |= {id(p): repeated.detach() for p, repeated in zip(self._norms, self._repeated, strict=True)}
        self._params = {id(p): params[id(p)].requires_grad_(p.requires_grad) for p in self._parameters}

    def of(self, parameter: Tensor) -> Tensor:
        """Return the views of a parameter, ``(P, *shape)``."""
        return self._params[id(parameter)]

    def check(self, x: Tensor, dimensions: int, layer: nn.Module, or_more: bool = False) -> None:
        """Raise unless what reaches a layer is still the batch of all workers, in the precision of the weights."""
        if not isinstance(x, Tensor):
            raise ValueError(f"batched passes: a {type(layer).__name__} takes tensors, got {type(x).__name__}")
        if torch.is_autocast_enabled(x.device.type):
            raise ValueError("batched passes take no autocast; sequential ones do")
        if x.dim() < dimensions or (x.dim() > dimensions and not or_more) or len(x) != self.examples:
            raise ValueError(
                f"batched passes: a {type(layer).__name__} must be given {dimensions} dimensions"
                f"{' or more' if or_more else ''} and all {self.examples} examples, got {tuple(x.shape)}; "
                "sequential passes take any"
            )


def rows_by_worker(x: Tensor, workers: int) -> Tensor:
    """Return ``(B * P, ..., features)`` as ``(P, rows, features)``: all that a worker has, one row after another."""
    return torch.unflatten(x, 0, (-1, workers)).transpose(0, 1).flatten(1, -2)
