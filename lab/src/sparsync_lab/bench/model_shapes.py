"""The tensors of two models, for layouts as large and as cut up as real ones."""

from __future__ import annotations

from math import prod

from sparsync.layout import Span

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """Return the shapes of ResNet-50 for ImageNet: 25,557,032 parameters in 161 tensors."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            convolutions = [(width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:  # the shortcut changes the number of channels
                convolutions.append((4 * width, inputs, 1, 1))
            for shape in convolutions:
                shapes += [shape, shape[:1], shape[:1]]  # a convolution and its norm's weight and bias
            inputs = 4 * width
    return [*shapes, (1000, inputs), (1000,)]


def gpt2() -> list[Shape]:
    """Return the shapes of GPT-2 small, the output tied to the embedding: 124,439,808 parameters in 148 tensors."""
    width = 768
    norm: list[Shape] = [(width,), (width,)]
    attention: list[Shape] = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    perceptron: list[Shape] = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    blocks = 12 * [*norm, *attention, *norm, *perceptron]
    return [(50257, width), (1024, width), *blocks, *norm]


MODELS = {"ResNet-50": (resnet50, 25_557_032), "GPT-2 small": (gpt2, 124_439_808)}


def shape_spans(model: str) -> list[Span]:
    """Return the model's tensors one after another in a flat gradient."""
    make, total = MODELS[model]
    spans, start = [], 0
    for i, shape in enumerate(make()):
        spans.append(Span(f"tensor {i}", start, prod(shape)))
        start += prod(shape)
    assert start == total, (model, start, total)
    return spans
