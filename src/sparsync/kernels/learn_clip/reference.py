"""Recognise what was done to all gradients, in plain PyTorch: the specification of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 1e-5  # so near to what is expected, a factor is that
NEAR = 0.01  # as a share: by so much the factors of gradients that are multiplied alike may differ
SOME = 0.999  # what clips multiplies by less
WHOLE = 1e-4  # so near to a power of 2 it is a loss scale


@dataclass(frozen=True)
class Clipping:
    """What is known of the gradients, on their device.

    Args:
        norms: of what was written, by tensor.
        summary: of the mean gradient: its norm, by what it was clipped, and whether it is finite (1) or not (0).
        max_norm: at what it is clipped: 0-d.
        apart: becomes 1 once gradients were changed, not all by the same factor: 0-d.
        scale: by what the gradients are still multiplied, if nobody but us has touched them.
    """

    norms: Tensor
    summary: Tensor
    max_norm: Tensor
    apart: Tensor
    scale: float


def note_norms(grads: Sequence[Tensor], numbers: Tensor, norms: Tensor) -> None:
    """Write the norms that gradients, or parts of them, have; ``numbers``: of their tensors."""
    double = any(grad.dtype == torch.float64 for grad in grads)
    found = torch._foreach_norm(list(grads), 2, dtype=torch.float64 if double else torch.float32)
    norms.index_copy_(0, numbers, torch.stack(found).float())


def recognise(grads: Sequence[Tensor], numbers: Sequence[int], clipping: Clipping) -> Tensor:
    """Return by what all gradients were multiplied since they were written; 1 / scale if that is not the same for all:
    what is cut in part stays as it was cut, and is noted. Gradients that are 0 now say nothing.

    Args:
        grads: or parts of them, as they are now.
        numbers: of their tensors.
    """
    nothing = torch.full((), 1 / clipping.scale, dtype=torch.float32, device=clipping.norms.device)
    if not grads:
        return nothing
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    found = torch.stack(torch._foreach_norm(list(grads), 2, dtype=dtype)).float()
    shown = torch.where(found != 0, clipping.norms[list(numbers)], 0.0)
    factor = torch.linalg.vector_norm(found) / torch.linalg.vector_norm(shown)
    uniform = (((found - factor * shown).abs() <= NEAR * factor * shown) | (found == 0)).all()
    bad = ~found.isfinite().all() | (clipping.summary[2] <= 0)
    clipping.apart.copy_(torch.where(uniform | bad, clipping.apart, 1.0))
    changed = (factor * clipping.scale - 1).abs() > ROUNDING
    return torch.where(uniform & changed & (factor > 0) & factor.isfinite(), factor, nothing)


def learn_clip(factor: Tensor, clipping: Clipping) -> Tensor:
    """Return whether a factor is the user's own clipping; if so, ``max_norm`` is what it clipped at."""
    clip, power = factor * clipping.scale, torch.log2(factor * clipping.scale)
    cut = (clip < SOME) & ((power - power.round()).abs() > WHOLE) & (clipping.summary[2] > 0)
    clipping.max_norm.copy_(torch.where(cut, clip * clipping.summary[0], clipping.max_norm))
    return cut


def find_undo(grads: Sequence[Tensor], numbers: Sequence[int], clipping: Clipping) -> Tensor:
    """Return by what to multiply gradients, so that a factor on all of them is undone; learn from it how they are
    clipped."""
    factor = recognise(grads, numbers, clipping)
    learn_clip(factor, clipping)
    return 1 / factor
