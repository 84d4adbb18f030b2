"""The methods that ``sparsync bench select`` times: each with a residual of its own, stepped with one gradient after
another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from sparsync.compressors import DGCK, Compressor, Context, GaussianK, ThresholdK, TopK, TrimmedK
from sparsync.kernels import Memory
from sparsync.kernels.threshold.launch import select
from sparsync.layout import Layout, Span, entries_for
from sparsync.workspace import Workspace
from sparsync_lab.bench.baselines import BASELINES, SELECTIONS, Baseline, Selection

OURS: dict[str, Callable[[float], Compressor]] = {
    "topk": TopK,
    "gaussian": GaussianK,
    "dgc": DGCK,
    "trimmed": TrimmedK,
}
FLOOR, ZEROING_FLOOR = "e += g", "e += g; g.zero_()"
# What was sent: values, padded with zeros perhaps, and how many are real.
Sent = tuple[Tensor, Tensor | int]


class BenchMethod:
    """One method and its residual.

    ``family``: floor, ours, or PyTorch. ``copied``: gradients come as copies, always in the same place, and may be
    overwritten. ``floor``: what it is compared with. ``k``: how many entries it wants.
    """

    family = "floor"
    scope = ""
    copied = False
    floor = FLOOR
    k = 0

    def __init__(self, name: str, numel: int, device: torch.device) -> None:
        self.name = name
        self.residual = torch.zeros(numel, device=device)

    def came_in(self, grad: Tensor) -> Tensor:
        """Return what a gradient adds to the residual; it may be overwritten."""
        return grad

    def step(self, grad: Tensor) -> Sent | None:
        """Add ``grad``, select, take out: the call that is timed."""
        raise NotImplementedError

    def warmed_up(self, place: Tensor) -> None:
        """Prepare for timing: called once, after the warm-up."""


class Floor(BenchMethod):
    """``e += g``: the least that error feedback can cost."""

    def step(self, grad: Tensor) -> None:
        self.residual += grad


class ZeroingFloor(BenchMethod):
    """The same, and the gradient is zeroed for the next backward pass."""

    copied = True

    def step(self, grad: Tensor) -> None:
        self.residual += grad
        grad.zero_()


class PyTorchMethod(BenchMethod):
    """A method in plain PyTorch."""

    family = "PyTorch"

    def __init__(self, name: str, baseline: Baseline, density: float, numel: int, device: torch.device) -> None:
        super().__init__(name, numel, device)
        self.baseline, self.k = baseline, entries_for(density, numel)

    def step(self, grad: Tensor) -> Sent:
        _, values = self.baseline(grad, self.residual, self.k)
        return values, values.numel()


class AloneMethod(BenchMethod):
    """Selection of a gradient's entries in plain PyTorch, without error feedback."""

    family = "PyTorch, alone"

    def __init__(self, name: str, select: Selection, density: float, numel: int, device: torch.device) -> None:
        super().__init__(name, numel, device)
        self.select, self.k = select, entries_for(density, numel)

    def step(self, grad: Tensor) -> Sent:
        indices = self.select(grad, self.k)
        return grad[indices], indices.numel()


class CompressorMethod(BenchMethod):
    """A compressor of this library, called as the reducer calls it."""

    family = "ours"

    def __init__(
        self, name: str, compressor: Compressor, spans: Sequence[Span], scope: str, device: torch.device
    ) -> None:
        super().__init__(name, spans[-1].stop, device)
        self.compressor, self.scope, self.number = compressor, scope, 0
        self.layout = Layout.cut(
            spans,
            numel=spans[-1].stop,
            scope=scope,
            density=compressor.density,
            capacity=compressor.capacity,
            name="all",
        )
        self.k, self.state = self.layout.k, compressor.init(self.layout)
        self.workspace = Workspace()

    def memory(self) -> Memory:
        return Memory(self.residual, self.residual, workspace=self.workspace)

    def step(self, grad: Tensor) -> Sent:
        self.number += 1
        sent = self.compressor.compress(grad, self.memory(), self.layout, Context(self.number), self.state)
        return sent.values, sent.count


class GraphedMethod(CompressorMethod):
    """``ThresholdK`` replayed from a CUDA graph, which reads every gradient from the same place."""

    copied = True
    graph: torch.cuda.CUDAGraph | None = None

    def warmed_up(self, place: Tensor) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.sent = super().step(place)
        self.graph = graph

    def step(self, grad: Tensor) -> Sent:
        if self.graph is None:
            return super().step(grad)
        self.graph.replay()
        return self.sent


class ZeroingMethod(CompressorMethod):
    """``ThresholdK``'s fused pass, which zeroes the gradient as it goes."""

    copied = True
    floor = ZEROING_FLOOR

    def step(self, grad: Tensor) -> Sent:
        sent = select(grad, self.memory(), self.layout, self.state, "fp32", zero=True)
        return sent.values, sent.count


# A method's name, and what sets it up.
MethodEntry = tuple[str, Callable[[], BenchMethod]]


def floors(numel: int, device: torch.device) -> list[BenchMethod]:
    return [Floor(FLOOR, numel, device), ZeroingFloor(ZEROING_FLOOR, numel, device)]


def flat_methods(numel: int, density: float, device: torch.device) -> list[MethodEntry]:
    """Return every method for one flat gradient; what matters most comes first."""
    spans = [Span("gradient", 0, numel)]
    entries: list[MethodEntry] = [
        _threshold(*kind, spans, "global", density, device) for kind in _threshold_kinds(device)
    ]
    if device.type == "cuda":
        entries.append(_threshold("threshold, zeroing", ZeroingMethod, spans, "global", density, device))
    for name, baseline in BASELINES.items():
        entries.append(
            (f"{name} (PyTorch)", partial(PyTorchMethod, f"{name} (PyTorch)", baseline, density, numel, device))
        )
    for name, compressor in OURS.items():
        entries.append((name, partial(CompressorMethod, name, compressor(density), spans, "global", device)))
    return entries


def methods_alone(numel: int, density: float, device: torch.device) -> list[MethodEntry]:
    """Return selection in plain PyTorch without error feedback."""
    named = {f"{name} (PyTorch)": select for name, select in SELECTIONS.items()}
    return [(name, partial(AloneMethod, name, select, density, numel, device)) for name, select in named.items()]


def scoped_methods(spans: Sequence[Span], density: float, device: torch.device) -> list[MethodEntry]:
    """Return ``ThresholdK`` over a model's tensors: one segment in all, or one each."""
    return [
        _threshold(*kind, spans, scope, density, device)
        for scope in ("global", "layer")
        for kind in _threshold_kinds(device)
    ]


def _threshold_kinds(device: torch.device) -> list[tuple[str, type[CompressorMethod]]]:
    return [("threshold", CompressorMethod), *([("threshold (graph)", GraphedMethod)] if device.type == "cuda" else [])]


def _threshold(
    name: str, kind: type[CompressorMethod], spans: Sequence[Span], scope: str, density: float, device: torch.device
) -> MethodEntry:
    return name, partial(kind, name, ThresholdK(density), spans, scope, device)
