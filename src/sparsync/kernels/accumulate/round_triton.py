"""Round entries that are taken out of the residual to what travels, as Triton functions.

``round_values`` of ``accumulate/reference.py`` is the specification.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.strips_triton import COUNT

LAST_BIT = tl.constexpr(2.0**104)  # of fp32's largest numbers


@triton.jit
def within_range(sent, u, HALF: tl.constexpr):
    """Do as ``value_range.limit``: to the end of fp16's range, or to fp32's last bit."""
    if HALF:
        size = tl.where(tl.abs(u) < 4294967296.0, 65280.0, 32768.0)
        return tl.where(tl.abs(sent) > 65504.0, tl.where(u < 0, -size, size), sent)
    else:
        return tl.where(tl.abs(sent) > LAST_BIT, tl.where(u < 0, -LAST_BIT, LAST_BIT), sent)


@triton.jit
def half_of(u, CODEC: tl.constexpr):
    """Round as the codecs do, to half precision."""
    if CODEC == 1:
        return u.to(tl.float16).to(tl.float32)
    elif CODEC == 2:
        word = u.to(tl.int32, bitcast=True)  # to the nearest, ties to even: written out, as the interpreter cuts off
        return ((word + 0x7FFF + ((word >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    else:
        return u


@triton.jit
def scale_of(peaks, shares, choice, most):
    """Return the scale of signs: the mean magnitude, at least 2**-14 of the largest, in 8 significant bits."""
    top = tl.load(peaks).to(tl.float32, bitcast=True).to(tl.float64)
    number = tl.maximum(tl.load(choice + COUNT), 1).to(tl.float64)
    mean = top * (tl.load(shares).to(tl.float64) / (number * 16777216.0))
    scale = tl.minimum(tl.maximum(mean, top * 6.103515625e-05), most).to(tl.float32)
    return (scale.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def round_for_wire(u, going, peaks, shares, choice, CODEC: tl.constexpr, HALF: tl.constexpr):
    """Return entries as they travel, what stays of each, and which of those that go can be put together again exactly.

    ``peaks``, ``shares``, ``choice``: of their segment. ``HALF``: the mean is going to be fp16.
    """
    if CODEC == 3:
        scale = scale_of(peaks, shares, choice, 32768.0 if HALF else LAST_BIT)
        sent = tl.where(tl.abs(u) >= scale / 2, tl.where(u < 0, -scale, scale), 0.0)
    elif CODEC == 4:
        scale, size = scale_of(peaks, shares, choice, 8192.0 if HALF else LAST_BIT / 4), tl.abs(u)
        level = tl.where(size > 0.75 * scale, scale, scale / 2)
        level = tl.where(size > 1.5 * scale, 2 * scale, level)
        level = tl.where(size > 3.0 * scale, 4 * scale, level)
        least = tl.where(scale < 7.888609052210118e-31, float("inf"), scale / 4)  # 2**-100
        sent = tl.where(size >= least, tl.where(u < 0, -level, level), 0.0)
    else:
        sent = within_range(half_of(u, CODEC), u, HALF or CODEC == 1)
    rest = u - sent
    if CODEC != 0:
        going = going & (sent != 0.0) & (rest + sent == u) & (u - rest == sent)
    elif HALF:  # the last bit of fp32 is subtracted exactly from all there is
        going = going & (rest + sent == u) & (u - rest == sent)
    return sent, rest, going
