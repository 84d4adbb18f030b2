"""Sketch a gradient, in plain PyTorch: the specification of every faster version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.kernels.rng import MASK_32, STRIDE, scramble
from sparsync.layout import Matrices

ALIGNED = 64  # bytes, as torch's CPU allocator gives them


@dataclass(frozen=True)
class Sketched:
    """A tensor of a flat gradient, and where its sketch goes.

    Args:
        number: of the tensor in the model.
        numel: its entries.
        matrices: what it consists of; ``None``: its entries themselves are the sketch.
        place: where its sketch starts in that of the model, and its signs among all: the rows', then the columns'.
        start: of the tensor in the flat gradient.
        at: where its sketch starts in that of the flat gradient.
    """

    number: int
    numel: int
    matrices: Matrices | None
    place: int
    start: int = 0
    at: int = 0

    @property
    def size(self) -> int:
        return self.numel if self.matrices is None else self.matrices.sums


def sign_key(seed: int, step: int) -> int:
    """Return the 32 bits that a step's signs are drawn from."""
    return scramble((scramble((seed * STRIDE + 1) & MASK_32) + step * STRIDE) & MASK_32)


def draw_signs(count: int, seed: int, step: int, device: torch.device) -> Tensor:
    """Return so many random signs: the same on every device, others in each step."""
    bits = scramble(torch.arange(count, dtype=torch.int64, device=device) ^ sign_key(seed, step))
    return 1.0 - 2.0 * (bits & 1).float()


def sketch(grad: Tensor, tensors: Sequence[Sketched], signs: Tensor, out: Tensor) -> None:
    """Write the signed sums of every row and column of each matrix G, G z and w G, into the flat tensor ``out``.

    The squares of these are, in expectation over the signs, the rows' and columns' sums of squares; and unlike sums of
    squares they can be added over the workers: the sum of all sketches is the sketch of the sum.
    """
    for tensor in tensors:
        own = grad[tensor.start : tensor.start + tensor.numel]
        place, shape = out[tensor.at : tensor.at + tensor.size], tensor.matrices
        if shape is None:
            place.copy_(own)
            continue
        cut, matrices = shape.stack * shape.rows, _aligned(own.to(out.dtype)).view(shape.stack, shape.rows, shape.cols)
        own_signs = signs[tensor.place : tensor.place + tensor.size]
        w, z = own_signs[:cut].view(shape.stack, 1, shape.rows), own_signs[cut:].view(shape.stack, shape.cols, 1)
        place[:cut] = torch.bmm(matrices, z).flatten()
        place[cut:] = torch.bmm(w, matrices).flatten()


def _aligned(values: Tensor) -> Tensor:
    """Return values where memory is aligned: elsewhere a product is summed in another order, and virtual workers have
    their tensors in other places than real ones."""
    return values.clone() if values.device.type == "cpu" and values.data_ptr() % ALIGNED else values
