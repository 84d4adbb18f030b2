"""Shapes of well-known models: enough to know what their gradients take, without building them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import NamedTuple


class TensorShape(NamedTuple):
    """A parameter by its shape.

    Args:
        positions: how often a pass uses each of its entries for one sample: the pixels of a convolution's output. Time
            of backward is shared out by that.
    """

    shape: tuple[int, ...]
    positions: int = 1

    @property
    def numel(self) -> int:
        return prod(self.shape)


def resnet50() -> list[TensorShape]:
    """Return ResNet-50 for ImageNet: 25,557,032 parameters in 161 tensors."""
    tensors, inputs, side = _normed((64, 3, 7, 7), 112), 64, 56
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            stride = 2 if block == 0 and width > 64 else 1
            tensors += _normed((width, inputs, 1, 1), side)
            side //= stride
            tensors += _normed((width, width, 3, 3), side) + _normed((4 * width, width, 1, 1), side)
            if block == 0:  # the shortcut changes the number of channels
                tensors += _normed((4 * width, inputs, 1, 1), side)
            inputs = 4 * width
    return [*tensors, TensorShape((1000, inputs)), TensorShape((1000,))]


def vgg16() -> list[TensorShape]:
    """Return VGG-16 for ImageNet: 138,357,544 parameters."""
    tensors, inputs, side = list[TensorShape](), 3, 224
    for count, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(count):
            tensors += _biased((width, inputs, 3, 3), side)
            inputs = width
        side //= 2
    return [*tensors, *_biased((4096, 512 * 49)), *_biased((4096, 4096)), *_biased((1000, 4096))]


def alexnet() -> list[TensorShape]:
    """Return AlexNet for ImageNet: 61,100,840 parameters."""
    convolutions = [((64, 3, 11, 11), 55), ((192, 64, 5, 5), 27)]
    convolutions += [((384, 192, 3, 3), 13), ((256, 384, 3, 3), 13), ((256, 256, 3, 3), 13)]
    tensors = [tensor for shape, side in convolutions for tensor in _biased(shape, side)]
    return [*tensors, *_biased((4096, 256 * 36)), *_biased((4096, 4096)), *_biased((1000, 4096))]


def gpt2(layers: int = 12, width: int = 768) -> list[TensorShape]:
    """Return GPT-2, the output tied to the embedding; the small one has 124,439,808 parameters in 148 tensors."""
    norm = [TensorShape((width,)), TensorShape((width,))]
    attention = [TensorShape(shape) for shape in ((width, 3 * width), (3 * width,), (width, width), (width,))]
    perceptron = [TensorShape(shape) for shape in ((width, 4 * width), (4 * width,), (4 * width, width), (width,))]
    blocks = layers * [*norm, *attention, *norm, *perceptron]
    return [TensorShape((50257, width)), TensorShape((1024, width)), *blocks, *norm]


def bert_large() -> list[TensorShape]:
    """Return BERT-large with its pooler: 335,141,888 parameters."""
    width, inner = 1024, 4096
    norm = [TensorShape((width,)), TensorShape((width,))]
    square, wide, narrow = _biased((width, width)), _biased((inner, width)), _biased((width, inner))
    blocks = 24 * [*square, *square, *square, *square, *norm, *wide, *narrow, *norm]
    return [TensorShape((30522, width)), TensorShape((512, width)), TensorShape((2, width)), *norm, *blocks, *square]


def any_model(parameters: int) -> list[TensorShape]:
    """Return matrices of so many entries altogether, as wide as those of a transformer of that size."""
    width = max(1, min(8192, round((parameters / 96) ** 0.5 / 64) * 64 or 16))
    whole, left = divmod(parameters, width * width)
    rest = [TensorShape((left // width, width))] if left // width else []
    return [*whole * [TensorShape((width, width))], *rest, *([TensorShape((left % width,))] if left % width else [])]


def _normed(shape: tuple[int, ...], side: int) -> list[TensorShape]:
    """Return a convolution without bias, whose output has ``side`` by ``side`` pixels, and its norm."""
    return [TensorShape(shape, side * side), TensorShape(shape[:1]), TensorShape(shape[:1])]


def _biased(shape: tuple[int, ...], side: int = 1) -> list[TensorShape]:
    return [TensorShape(shape, side * side), TensorShape(shape[:1], side * side)]


Shapes = Callable[[], list[TensorShape]]
SHAPES: Mapping[str, Shapes] = {
    "resnet50": resnet50,
    "vgg16-imagenet": vgg16,
    "alexnet": alexnet,
    "gpt2": gpt2,
    "gpt2-medium": lambda: gpt2(24, 1024),
    "gpt2-large": lambda: gpt2(36, 1280),
    "gpt2-xl": lambda: gpt2(48, 1600),
    "bert-large": bert_large,
}
