"""Apply an update to parameters, as a Triton kernel: these lie anywhere, so their addresses are in a table."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.apply_update import launch

STRIP, CHANGE = tl.constexpr(len(launch.ParameterStrip._fields)), tl.constexpr(len(launch.ChangeRow._fields))
NUMBER, START, NUMEL = map(tl.constexpr, range(STRIP.value))
PARAMETER, GRAD, SHOWN, KEPT = map(tl.constexpr, range(CHANGE.value))
ALIGNED = tl.constexpr(launch.ALIGNED)


@triton.jit
def _change(parameter, grad, kept, factor, size, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr):
    for i in range(BLOCKS):
        at = i * BLOCK + tl.arange(0, BLOCK)
        if MASKED:
            p = tl.load(parameter + at, mask=at < size, other=0.0)
            g = tl.load(grad + at, mask=at < size, other=0.0)
            tl.store(parameter + at, p * kept - g * factor, mask=at < size)
        else:
            tl.store(parameter + at, tl.load(parameter + at) * kept - tl.load(grad + at) * factor)


@triton.jit
def apply_update(strips, rows, undo, skip, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Change one strip a program."""
    strip = strips + tl.program_id(0) * STRIP
    row, start = rows + tl.load(strip + NUMBER) * CHANGE, tl.load(strip + START)
    size = tl.where(tl.load(skip) > 0.0, 0, tl.load(strip + NUMEL)).to(tl.int32)
    parameter, grad = tl.load(row + PARAMETER), tl.load(row + GRAD)
    kept = tl.load(row + KEPT).to(tl.int32).to(tl.float32, bitcast=True)
    factor = tl.div_rn(tl.load(undo), tl.load(tl.load(row + SHOWN).to(tl.pointer_type(tl.float32))))
    # Pointers are made where they are used: what ``tl.multiple_of`` says of one holds wherever that is.
    if ((parameter | grad) % ALIGNED == 0) & (size == BLOCK * BLOCKS):
        near = tl.multiple_of(start, BLOCK)
        p = tl.multiple_of(parameter.to(tl.pointer_type(tl.float32)), ALIGNED)
        g = tl.multiple_of(grad.to(tl.pointer_type(tl.float32)), ALIGNED)
        _change(p + near, g + near, kept, factor, size, BLOCK, BLOCKS, False)
    else:
        p, g = parameter.to(tl.pointer_type(tl.float32)), grad.to(tl.pointer_type(tl.float32))
        _change(p + start, g + start, kept, factor, size, BLOCK, BLOCKS, True)
