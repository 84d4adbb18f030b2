"""What bf16 cuts off gradients that travel whole: it is kept as a residual, and added in the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.feedback.residual import Feedback
from sparsync.kernels import Memory
from sparsync.kernels.by_parts.launch import RestBuffer
from sparsync.kernels.device import usable_on
from sparsync.layout import Span


@dataclass
class RoundedGradient:
    """A flat gradient that travels, and what is left of it at home if its step counts."""

    memory: Memory
    rest: Tensor
    buffer: RestBuffer | None = None  # by kernels, on a GPU

    def keep(self, good: Tensor) -> None:
        """Keep the rest where ``good`` is above 0; else what was kept before stays."""
        if self.buffer is not None:
            self.buffer.keep(good, self.memory.before, self.memory.after)
        else:
            torch.where(good > 0, self.rest, self.memory.before, out=self.memory.after)


class RoundingFeedback:
    """The rounding errors of one worker, by parameter name; in units of the gradient, loss scale included.

    Args:
        feedback: keeps them, as it keeps the residuals of what is compressed.
    """

    def __init__(self, feedback: Feedback) -> None:
        self.feedback = feedback
        self._travelling: list[RoundedGradient] = []

    def begin_step(self) -> None:
        """Begin a step."""
        self._travelling = []

    def round(self, key: str, spans: Sequence[Span], grad: Tensor) -> None:
        """Add what was kept to the flat gradient ``key``, and round it, in its place.

        An entry whose gradient is 0 sends nothing: a tensor that rests must not be woken by what is left of it.
        """
        memory = self.feedback.memory(key, spans, grad.numel(), grad.device)
        if memory.after.dtype == grad.dtype == torch.float32 and usable_on(grad.device):
            made_for = (grad.data_ptr(), grad.numel())
            buffer = memory.workspace.get(RestBuffer, made_for, lambda: RestBuffer(grad))
            buffer.round(memory.before)
            self._travelling.append(RoundedGradient(memory, buffer.rest, buffer))
            return
        total = memory.before + grad
        sent = torch.where(grad != 0, total, 0).bfloat16()
        self._travelling.append(RoundedGradient(memory, total - sent))
        grad.copy_(sent)

    def keep(self, good: Tensor) -> None:
        """Keep what was cut off in this step; if that was not good on any worker (0), what was kept before stays."""
        for own in self._travelling:
            own.keep(good)
        self._travelling = []
