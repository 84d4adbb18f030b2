"""Recognise a factor on all gradients, as Triton kernels: these lie anywhere, so their addresses are in a table."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels.learn_clip import launch, reference

PROBE = tl.constexpr(len(launch.ProbeRow._fields))
ADDRESS, NUMEL, NUMBER = map(tl.constexpr, range(PROBE.value))
NEAR, ROUNDING = tl.constexpr(reference.NEAR), tl.constexpr(reference.ROUNDING)
SOME, WHOLE = tl.constexpr(reference.SOME), tl.constexpr(reference.WHOLE)


@triton.jit
def note_norms(flat, parts, norms, BLOCK: tl.constexpr):
    """Do as ``reference.note_norms``: one part a program."""
    row, lane = parts + tl.program_id(0) * 3, tl.arange(0, BLOCK)
    own, numel = flat + tl.load(row), tl.load(row + 1)
    total = tl.full([BLOCK], 0.0, tl.float64)
    for i in range(0, numel, BLOCK):
        g = tl.load(own + i + lane, mask=i + lane < numel, other=0.0).to(tl.float64)
        total += g * g
    tl.store(norms + tl.load(row + 2), tl.sqrt(tl.sum(total)).to(tl.float32))


@triton.jit
def measure(rows, squares, BLOCK: tl.constexpr):
    """Sum up the squares of one gradient a program."""
    row, lane = rows + tl.program_id(0) * PROBE, tl.arange(0, BLOCK)
    grad, numel = tl.load(row + ADDRESS).to(tl.pointer_type(tl.float32)), tl.load(row + NUMEL)
    total = tl.full([BLOCK], 0.0, tl.float64)
    for i in range(0, numel, BLOCK):
        g = tl.load(grad + i + lane, mask=i + lane < numel, other=0.0).to(tl.float64)
        total += g * g
    tl.store(squares + tl.program_id(0), tl.sum(total))


@triton.jit
def _norms(rows, squares, norms, i, count, BLOCK: tl.constexpr):
    """Return the norms of some gradients as they are, and as they were written; 0 for both where one is 0 now."""
    probe = i + tl.arange(0, BLOCK)
    real = probe < count
    number = tl.load(rows + probe * PROBE + NUMBER, mask=real, other=0)
    found = tl.sqrt(tl.load(squares + probe, mask=real, other=0.0)).to(tl.float32)
    return found, tl.load(norms + number, mask=real & (found != 0.0), other=0.0)


@triton.jit(do_not_specialize=["scale"])
def find_undo(rows, squares, norms, summary, max_norm, apart, undo, count, scale, BLOCK: tl.constexpr):
    """Do as ``reference.find_undo``: one program."""
    all_found, all_shown = tl.full([BLOCK], 0.0, tl.float64), tl.full([BLOCK], 0.0, tl.float64)
    for i in range(0, count, BLOCK):
        found, shown = _norms(rows, squares, norms, i, count, BLOCK)
        all_found += found.to(tl.float64) * found.to(tl.float64)
        all_shown += shown.to(tl.float64) * shown.to(tl.float64)
    factor = tl.sqrt(tl.sum(all_found) / tl.sum(all_shown)).to(tl.float32)
    differ, bad = 0, tl.where(tl.load(summary + 2) > 0.0, 0, 1)
    for i in range(0, count, BLOCK):
        found, shown = _norms(rows, squares, norms, i, count, BLOCK)
        alike = tl.abs(found - factor * shown) <= factor * shown * NEAR
        differ += tl.sum(tl.where(alike | (found == 0.0), 0, 1))
        bad += tl.sum(tl.where(found < float("inf"), 0, 1))
    uniform = (differ == 0) & (factor > 0.0) & (factor < float("inf"))
    changed = tl.abs(factor * scale - 1.0) > ROUNDING
    factor = tl.where(uniform & changed, factor, tl.div_rn(1.0, scale))
    clip = factor * scale
    power = tl.log2(clip)
    cut = (clip < SOME) & (tl.abs(power - tl.floor(power + 0.5)) > WHOLE) & (tl.load(summary + 2) > 0.0)
    tl.store(apart, 1.0, mask=(differ > 0) & (bad == 0))
    tl.store(max_norm, tl.where(cut, clip * tl.load(summary), tl.load(max_norm)))
    tl.store(undo, tl.div_rn(1.0, factor))
