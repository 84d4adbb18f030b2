"""Tensors of a flat gradient as preconditioning knows them, in all shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsync.kernels.precondition import Tables
from sparsync.kernels.sketch import Sketched
from sparsync.layout import Matrices

# Of each tensor its matrices (stack, rows, columns), or how many entries it has where these are taken one by one.
Shapes = Sequence[tuple[int, int, int] | int]

TENSORS: dict[str, Shapes] = {
    "one entry": [1],
    "one row and column": [(1, 1, 1)],
    "63 entries": [63],
    "1023 entries": [1023, (1, 11, 93)],
    "one row": [(1, 1, 1023)],
    "one column": [(1, 1023, 1)],
    "tall": [(1, 2051, 5)],
    "wide": [(1, 3, 5003)],
    "many tiles": [(1, 600, 131)],
    "aligned": [(1, 64, 256), (1, 256, 64)],
    "odd": [(1, 317, 315), 148],
    "prime": [(1, 7, 13), 100_003],
    "stacks": [(3, 33, 37), (2, 40, 300), (70, 2, 3)],
    "mixed": [(1, 40, 257), 129, (2, 32, 48), 1, (1, 7, 1500)],
}


def sketched(shapes: Shapes, hole: int = 3) -> list[Sketched]:
    """Tensors one after another, with entries of nobody between them; they are not the first of their model."""
    tensors, start, at, place = [], hole, 0, 7
    for number, shape in enumerate(shapes, start=2):
        matrices = None if isinstance(shape, int) else Matrices(*shape)
        numel = shape if isinstance(shape, int) else shape[0] * shape[1] * shape[2]
        tensors.append(Sketched(number, numel, matrices, place, start, at))
        start, at, place = start + numel + hole, at + tensors[-1].size, place + tensors[-1].size + hole
    return tensors


def numel_of(tensors: Sequence[Sketched], hole: int = 3) -> int:
    """Entries of the flat gradient."""
    return tensors[-1].start + tensors[-1].numel + hole


def tables_of(tensors: Sequence[Sketched], limit: float = 2.5, shrinks: bool = False) -> Tables:
    """Tables of a model that has more tensors than these; ``shrinks``: every second residual becomes smaller."""
    rng = torch.Generator().manual_seed(len(tensors))
    count, size = 1 + max(t.number for t in tensors), max(t.place + t.size for t in tensors)
    rates, eps, betas, shares = torch.rand(4, count, generator=rng)
    kept = torch.ones(count)
    kept[::2] = 0.7 if shrinks else 1.0
    return Tables(torch.rand(size, generator=rng) + 0.1, rates, eps * 1e-3, betas, shares, kept, limit, shrinks)


def moved(tables: Tables, device: str) -> Tables:
    """The same on a device."""
    tensors = (tables.sizes, tables.rates, tables.eps, tables.betas, tables.shares, tables.kept)
    return Tables(*(tensor.to(device) for tensor in tensors), tables.limit, tables.shrinks)
