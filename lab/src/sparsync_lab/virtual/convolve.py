"""Convolutions of 3 x 3 with few channels on a GPU, in TF32.

cuDNN brings such tensors into another order and back, which takes as long as the work itself.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Measured on an H200, by whether there are at most 16 x 16 weights a pixel.
PIXELS = {True: (256, 4), False: (128, 4)}  # of a block, and its warps
PIECES = {True: (32, 64, 2, 2), False: (8, 64, 4, 2)}  # of a worker's pixels, those of a block, warps, stages


@triton.jit
def _convolve(
    x, w, y, total,
    WIDE: tl.constexpr, NARROW: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, STRIDE: tl.constexpr,
    FLIPPED: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ``BLOCK`` pixels of the output, all channels. FLIPPED: ``w`` is (INPUTS, OUTPUTS, 3, 3), turned round."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    example = at // (NARROW * NARROW)
    pixel = at % (NARROW * NARROW)
    row = pixel // NARROW * STRIDE - 1
    column = pixel % NARROW * STRIDE - 1
    inwards, outwards = tl.arange(0, IN), tl.arange(0, OUT)
    channels = example[None, :] * (INPUTS * WIDE * WIDE) + inwards[:, None] * (WIDE * WIDE)
    known = (inwards < INPUTS)[:, None] & (at < total)[None, :]
    if FLIPPED:
        weights = w + inwards[None, :] * (OUTPUTS * 9) + outwards[:, None] * 9
    else:
        weights = w + outwards[:, None] * (INPUTS * 9) + inwards[None, :] * 9
    given = (outwards < OUTPUTS)[:, None] & (inwards < INPUTS)[None, :]
    found = tl.zeros((OUT, BLOCK), tl.float32)
    for k in tl.static_range(9):
        r, c = row + k // 3, column + k % 3
        inside = (r >= 0) & (r < WIDE) & (c >= 0) & (c < WIDE)
        seen = tl.load(x + channels + (r * WIDE + c)[None, :], known & inside[None, :], 0.0)
        weight = tl.load(weights + (8 - k if FLIPPED else k), given, 0.0)
        found = tl.dot(weight, seen, found, input_precision="tf32")
    to = y + example[None, :] * (OUTPUTS * NARROW * NARROW) + outwards[:, None] * (NARROW * NARROW) + pixel[None, :]
    tl.store(to, found, (outwards < OUTPUTS)[:, None] & (at < total)[None, :])


@triton.jit
def _correlate(
    x, g, out, workers, each, total,
    WIDE: tl.constexpr, NARROW: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, STRIDE: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a worker's gradient of a row of the weights, from ``each`` of its ``total`` pixels."""
    worker, piece, k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    inwards, outwards = tl.arange(0, IN), tl.arange(0, OUT)
    left = tl.zeros((OUT, IN), tl.float32)
    middle = tl.zeros((OUT, IN), tl.float32)
    right = tl.zeros((OUT, IN), tl.float32)
    end = tl.minimum((piece + 1) * each, total)
    for start in range(piece * each, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        example = at // (NARROW * NARROW) * workers + worker
        pixel = at % (NARROW * NARROW)
        grads = example[None, :] * (OUTPUTS * NARROW * NARROW) + outwards[:, None] * (NARROW * NARROW) + pixel[None, :]
        grad = tl.load(g + grads, (outwards < OUTPUTS)[:, None] & (at < end)[None, :], 0.0)
        r = pixel // NARROW * STRIDE + k - 1
        c = pixel % NARROW * STRIDE
        pixels = x + (example * (INPUTS * WIDE * WIDE) + r * WIDE + c)[:, None] + (inwards * (WIDE * WIDE))[None, :]
        rows = (at < end) & (r >= 0) & (r < WIDE)
        known = (inwards < INPUTS)[None, :]
        left = tl.dot(grad, tl.load(pixels - 1, (rows & (c > 0))[:, None] & known, 0.0), left, input_precision="tf32")
        middle = tl.dot(grad, tl.load(pixels, rows[:, None] & known, 0.0), middle, input_precision="tf32")
        seen = tl.load(pixels + 1, (rows & (c < WIDE - 1))[:, None] & known, 0.0)
        right = tl.dot(grad, seen, right, input_precision="tf32")
    base = (piece * workers + worker) * (OUTPUTS * INPUTS * 9) + k * 3
    to = out + base + outwards[:, None] * (INPUTS * 9) + (inwards * 9)[None, :]
    given = (outwards < OUTPUTS)[:, None] & (inwards < INPUTS)[None, :]
    tl.store(to, left, given)
    tl.store(to + 1, middle, given)
    tl.store(to + 2, right, given)


def convolve(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Return ``conv2d(x, weight, None, stride, padding=1)`` of squares."""
    outputs, inputs = weight.shape[:2]
    narrow = (x.shape[2] - 1) // stride + 1
    y = x.new_empty(len(x), outputs, narrow, narrow)
    _launch(x, weight, y, inputs, outputs, stride, False)
    return y


def to_input(grad: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the input of a convolution with stride 1: that of the output, through the weights turned
    round."""
    outputs, inputs = weight.shape[:2]
    x = grad.new_empty(len(grad), inputs, *grad.shape[2:])
    _launch(grad, weight, x, outputs, inputs, 1, True)
    return x


def to_weights(x: Tensor, grad: Tensor, workers: int, stride: int) -> Tensor:
    """Return every worker's gradient of the weights, ``(workers, outputs, inputs, 3, 3)``."""
    inputs, outputs, narrow = x.shape[1], grad.shape[1], grad.shape[2]
    pieces, block, warps, stages = PIECES[inputs * outputs <= 256]
    total = len(x) // workers * narrow * narrow
    each = triton.cdiv(triton.cdiv(total, pieces), block) * block
    pieces = triton.cdiv(total, each)
    parts = x.new_empty(pieces, workers, outputs, inputs, 3, 3)
    _correlate[workers, pieces, 3](
        x, grad, parts, workers, each, total, WIDE=x.shape[2], NARROW=narrow, INPUTS=inputs, OUTPUTS=outputs,
        STRIDE=stride, IN=_wide(inputs), OUT=_wide(outputs), BLOCK=block, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return parts.sum(0)


def _launch(x: Tensor, weight: Tensor, y: Tensor, inputs: int, outputs: int, stride: int, flipped: bool) -> None:
    block, warps = PIXELS[inputs * outputs <= 256]
    total = y.numel() // outputs
    _convolve[(triton.cdiv(total, block),)](
        x, weight, y, total, WIDE=x.shape[2], NARROW=y.shape[2], INPUTS=inputs, OUTPUTS=outputs, STRIDE=stride,
        FLIPPED=flipped, IN=_wide(inputs), OUT=_wide(outputs), BLOCK=block, num_warps=warps,
    )  # fmt: skip


def _wide(channels: int) -> int:
    return max(16, triton.next_power_of_2(channels))
