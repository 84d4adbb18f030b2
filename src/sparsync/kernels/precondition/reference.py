"""Make the update that a gradient asks for, in plain PyTorch: the specification of every faster version."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.kernels.memory import Memory, Update


@dataclass
class Tables:
    """What a step's preconditioner is, on the device: the same bits on every rank, in tensors that stay.

    Args:
        sizes: roots of the second moment: of rows and columns, whose products are those of the entries, or of entries;
            placed as the model's sketches are.
        rates: of each tensor, its learning rate over the first moment's bias correction.
        eps: of each tensor, what is added to the root.
        betas, shares: of each tensor, by what its velocity and the gradient are multiplied.
        kept: of each tensor, by what its residual is multiplied before the update is added: less than 1 where the
            learning rate falls.
        limit: largest magnitude of an update over its rate.
        shrinks: something is less than 1 there.
    """

    sizes: Tensor
    rates: Tensor
    eps: Tensor
    betas: Tensor
    shares: Tensor
    kept: Tensor
    limit: float
    shrinks: bool = False


def shrink(memory: Memory, update: Update) -> None:
    """Multiply the residual as the tables say, into the place that the step writes."""
    for tensor in update.tensors:
        own = slice(tensor.start, tensor.start + tensor.numel)
        torch.mul(memory.before[own], update.tables.kept[tensor.number], out=memory.after[own])
    memory.before = memory.after


def precondition(grad: Tensor, update: Update, out: Tensor) -> None:
    """Write the velocity ``after = beta before + share gradient`` of all tensors, and into ``out`` the update
    rate velocity / (sqrt(v) + eps), within its limit.

    Where either is not finite, the velocity stays as it was and ``out`` is NaN. ``out`` may be ``grad``.
    """
    before, after, tables = update.before, update.after, update.tables
    for tensor in update.tensors:
        shape, number = tensor.matrices, tensor.number
        own = slice(tensor.start, tensor.start + tensor.numel)
        sizes = tables.sizes[tensor.place : tensor.place + tensor.size]
        velocity = (before[own] * tables.betas[number]).add_(grad[own].to(before.dtype) * tables.shares[number])
        if shape is not None:
            cut = shape.stack * shape.rows
            sizes = (sizes[:cut].view(-1, shape.rows, 1) * sizes[cut:].view(-1, 1, shape.cols)).flatten()
        asked = (velocity / (sizes + tables.eps[number])).clamp_(-tables.limit, tables.limit)
        asked *= tables.rates[number]
        finite = torch.isfinite(velocity) & torch.isfinite(asked)
        torch.where(finite, velocity, before[own], out=after[own])
        out[own].copy_(asked.masked_fill_(~finite, torch.nan))
