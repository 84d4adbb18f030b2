"""The tensors of two models, for layouts as large and as cut up as real ones."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from sparsync.layout import Span
from sparsync.planner.shapes import gpt2, resnet50

MODELS: dict[str, tuple[Callable[[], list[tuple[int, ...]]], int]] = {
    "ResNet-50": (lambda: [tensor.shape for tensor in resnet50()], 25_557_032),
    "GPT-2 small": (lambda: [tensor.shape for tensor in gpt2()], 124_439_808),
}


def shape_spans(model: str) -> list[Span]:
    """Return the model's tensors one after another in a flat gradient."""
    make, total = MODELS[model]
    spans, start = [], 0
    for i, shape in enumerate(make()):
        spans.append(Span(f"tensor {i}", start, prod(shape)))
        start += prod(shape)
    assert start == total, (model, start, total)
    return spans
