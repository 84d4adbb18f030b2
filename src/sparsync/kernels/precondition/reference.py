"""Make the update that a gradient asks for, in plain PyTorch: the specification of every faster version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.kernels.accumulate.reference import chunks
from sparsync.kernels.sketch import Sketched


@dataclass
class Tables:
    """What a step's preconditioner is, on the device: the same bits on every rank.

    Args:
        sizes: square roots of the second moment: of rows and columns, whose products are those of the entries, or of
            entries; placed as sketches are.
        rates: of each tensor, its learning rate over the first moment's bias correction.
        eps: of each tensor, what is added to the square root.
        betas, shares: of each tensor, by what its velocity and the gradient are multiplied.
    """

    sizes: Tensor
    rates: Tensor
    eps: Tensor
    betas: Tensor
    shares: Tensor


def write_scales(tensors: Sequence[Sketched], tables: Tables, out: Tensor) -> None:
    """Write rate / (sqrt(v) + eps) of every entry."""
    for tensor in tensors:
        shape, number = tensor.matrices, tensor.number
        sizes = tables.sizes[tensor.place : tensor.place + tensor.size]
        place = out[tensor.start : tensor.start + tensor.numel]
        if shape is None:
            torch.add(sizes, tables.eps[number], out=place)
        else:
            cut = shape.stack * shape.rows
            rows, cols = sizes[:cut].view(-1, shape.rows, 1), sizes[cut:].view(-1, 1, shape.cols)
            torch.mul(rows, cols, out=place.view(shape.stack, shape.rows, shape.cols)).add_(tables.eps[number])
        torch.div(tables.rates[number], place, out=place)


def precondition(
    grad: Tensor,
    before: Tensor,
    after: Tensor,
    scales: Tensor,
    runs: Sequence[tuple[int, int, int]],
    tables: Tables,
    out: Tensor,
) -> None:
    """Write the velocity ``after = beta before + share gradient``, and velocity times ``scales`` into ``out``.

    Where the velocity is not finite it stays as it was, and ``out`` is NaN.

    Args:
        runs: where each starts and stops, and the number of a tensor whose ``beta`` and ``share`` are those of all in
            it.
        out: may be ``grad``.
    """
    for start, stop, number in runs:
        beta, share = tables.betas[number], tables.shares[number]
        for a, b in chunks([(start, stop)], grad.device):
            velocity = torch.mul(before[a:b], beta).add_(grad[a:b].to(before.dtype) * share)
            finite = torch.isfinite(velocity)
            torch.where(finite, velocity, before[a:b], out=after[a:b])
            out[a:b].copy_(velocity.mul_(scales[a:b]).masked_fill_(~finite, torch.nan))
