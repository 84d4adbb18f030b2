"""What ``sparsync bench select`` times of preconditioned feedback: sketches, and the pass that makes updates, adds them
to the residual and selects."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from sparsync.compressors import Compressor, ThresholdK, TopK
from sparsync.kernels import Memory, Update
from sparsync.kernels.precondition import Tables, came_in
from sparsync.kernels.sketch import Sketched, draw_signs, sketch
from sparsync.layout import Matrices, Span
from sparsync.workspace import Workspace
from sparsync_lab.bench.bench_methods import BenchMethod, CompressorMethod, MethodEntry, Sent

PRECONDITIONED_FLOOR = "e += g; m += g"
ROWS, COLS = 1024, 4096  # of a matrix
BETA, LIMIT = 0.5, 10.0


class PreconditionedFloor(BenchMethod):
    """Two additions: 24 bytes an entry, as sketches and the pass of preconditioned feedback need."""

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__(PRECONDITIONED_FLOOR, numel, device)
        self.velocity = torch.zeros_like(self.residual)

    def step(self, grad: Tensor) -> None:
        self.residual += grad
        self.velocity += grad


class PreconditionedMethod(CompressorMethod):
    """A compressor behind a preconditioner whose second moments stay as they are: they are a small vector."""

    copied = True  # without kernels, the update takes the gradient's place
    floor = PRECONDITIONED_FLOOR

    def __init__(self, name: str, compressor: Compressor, numel: int, device: torch.device) -> None:
        self.tensors = cut(numel)
        spans = [Span(f"tensor {tensor.number}", tensor.start, tensor.numel) for tensor in self.tensors]
        super().__init__(name, compressor, spans, "global", device)
        size, count = self.tensors[-1].place + self.tensors[-1].size, len(self.tensors)
        rates, eps, betas, shares = (torch.full((count,), x, device=device) for x in (1e-3, 1e-8, BETA, 1 - BETA))
        kept = torch.ones(count, device=device)
        self.tables = Tables(torch.ones(size, device=device), rates, eps, betas, shares, kept, LIMIT)
        self.signs, self.sketch = draw_signs(size, 0, 0, device), torch.zeros(size, device=device)
        self.velocity = torch.zeros(numel, device=device)

    def memory(self) -> Memory:
        update = Update(self.velocity, self.velocity, self.tensors, self.tables)
        return Memory(self.residual, self.residual, update=update, workspace=self.workspace)

    def came_in(self, grad: Tensor) -> Tensor:
        update = Update(self.velocity, self.velocity.clone(), self.tensors, self.tables)
        memory = Memory(self.residual, self.residual, update=update)
        return came_in(grad.float(), memory, Workspace())

    def step(self, grad: Tensor) -> Sent:
        sketch(grad, self.tensors, self.signs, self.sketch, self.workspace)
        return super().step(grad)


def cut(numel: int) -> list[Sketched]:
    """Return the tensors of so long a gradient: matrices, and a vector of what is left."""
    sizes = [ROWS] * (numel // (ROWS * COLS))
    sizes += [numel // COLS - sum(sizes)] if numel // COLS > sum(sizes) else []
    tensors: list[Sketched] = []
    start = place = 0
    for rows in sizes:
        shape = Matrices(1, rows, COLS)
        tensors.append(Sketched(len(tensors), rows * COLS, shape, place, start, place))
        start, place = start + rows * COLS, place + shape.sums
    if start < numel:
        tensors.append(Sketched(len(tensors), numel - start, None, place, start, place))
    return tensors


def preconditioned_methods(numel: int, density: float, device: torch.device) -> list[MethodEntry]:
    """Return what is timed behind a preconditioner."""
    kinds = {"threshold, AdamW": ThresholdK, "topk, AdamW": TopK}
    return [(name, partial(PreconditionedMethod, name, kind(density), numel, device)) for name, kind in kinds.items()]
