"""Second moments as Triton kernels: four short launches (five of SGD) over vectors of rows and columns, two over the
tensors that travel dense.

Sums are made in a fixed order: the same bits on every rank.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels import rng
from sparsync.kernels.second_moment import launch
from sparsync.kernels.second_moment.reference import HYPER
from sparsync.kernels.second_moment.reference import LARGEST as LARGEST_SUM

STRIP, DENSE = tl.constexpr(len(launch.MomentStrip._fields)), tl.constexpr(len(launch.DenseStrip._fields))
PLACE, SIZE, TENSOR, EXACT, LENGTH, FIRST, STRIPS, PAIR_FIRST, PAIR_STRIPS = map(tl.constexpr, range(STRIP.value))
DENSE_TENSOR, DENSE_PLACE, DENSE_AT, DENSE_SIZE, DENSE_FIRST, DENSE_STRIPS = map(tl.constexpr, range(DENSE.value))
RATE, BETA1, BETA2, EPS, KNOWN = (tl.constexpr(HYPER.index(n)) for n in ("rate", "first", "second", "eps", "known"))
TAKE2, TAKE1, CORRECTION, LEAST = map(tl.constexpr, range(len(launch.TAKEN)))
FIRST_FACTOR, SECOND_FACTOR = (tl.constexpr(factor) for factor in rng.FACTORS)
LARGEST = tl.constexpr(LARGEST_SUM)
INFINITE = tl.constexpr(0x7F800000)  # bits of infinity; NaN is above


@triton.jit(do_not_specialize=["key"])
def begin_step(sums, signs, size, key, BLOCK: tl.constexpr):
    """Clear the sums and draw signs, as ``draw_signs``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = at.to(tl.uint32) ^ key.to(tl.uint32)
    x = (x ^ (x >> 16)) * FIRST_FACTOR
    x = (x ^ (x >> 13)) * SECOND_FACTOR
    sign = 1 - 2 * ((x ^ (x >> 16)) & 1).to(tl.int32)
    tl.store(signs + at, sign.to(tl.float32), mask=at < size)
    tl.store(sums + at, tl.zeros([BLOCK], tl.float32), mask=at < size)


@triton.jit
def _within(came):
    """Return what a sum is taken as, without loss scale."""
    return tl.minimum(tl.maximum(came, -LARGEST), LARGEST)


@triton.jit(do_not_specialize=["share"])
def measure(sums, strips, parts, share, BLOCK: tl.constexpr):
    """Sum up the squares of one strip a program; NaN where anything is not finite."""
    row, lane = strips + tl.program_id(0) * STRIP, tl.arange(0, BLOCK)
    came = tl.load(sums + tl.load(row + PLACE) + lane, mask=lane < tl.load(row + SIZE), other=0.0)
    nonfinite = tl.sum(((came.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= INFINITE).to(tl.int32))
    came = _within(came * share)
    tl.store(parts + tl.program_id(0), tl.where(nonfinite > 0, float("nan"), tl.sum(came * came)))


@triton.jit
def _tensor_sum(parts, strips, strip_count, own, BLOCK: tl.constexpr):
    """Return the sum of all tensors' parts, and that of one: a group's is that of its matrix, of rows and of columns
    alike."""
    everybody, mine = tl.full([BLOCK], 0.0, tl.float64), tl.full([BLOCK], 0.0, tl.float64)
    for i in range(0, strip_count, BLOCK):
        strip = i + tl.arange(0, BLOCK)
        real = strip < strip_count
        part = tl.load(parts + strip, mask=real, other=0.0).to(tl.float64)
        part = tl.where(tl.load(strips + strip * STRIP + EXACT, mask=real, other=1) != 0, part, part / 2)
        everybody += part
        mine += tl.where(tl.load(strips + strip * STRIP + TENSOR, mask=real, other=-1) == own, part, 0.0)
    return tl.sum(everybody), tl.sum(mine)


@triton.jit(do_not_specialize=["share"])
def decide(
    parts, strips, strip_count, hyper, powers1, powers2, steps, norms, max_norm, summary, taken, rates, eps, betas,
    shares, rises, tensors, share, floor, rise, BLOCK: tl.constexpr, SGD: tl.constexpr,
):  # fmt: skip
    """Find the norms, and what becomes of one tensor a program: its tables, and what its moments take."""
    own = tl.program_id(0)
    total, mine = _tensor_sum(parts, strips, strip_count, own, BLOCK)
    good = total == total
    norm = tl.sqrt(tl.where(good, total, 0.0)).to(tl.float32)
    own_norm = tl.sqrt(tl.where(good, mine, 0.0)).to(tl.float32)
    clip = tl.minimum(tl.div_rn(tl.load(max_norm), norm + 1e-6), 1.0)
    beta1, beta2 = tl.load(hyper + BETA1 * tensors + own), tl.load(hyper + BETA2 * tensors + own)
    has_gradient = good & (own_norm > 0.0)
    active = has_gradient & (tl.load(hyper + KNOWN * tensors + own) > 0.0)
    step = tl.load(steps + own)
    if tl.load(rises + own) != 0:
        beta2 = tl.minimum(beta2, (1.0 - tl.exp(-(tl.log(step + 1.0) * rise))).to(tl.float32))
    power1 = tl.load(powers1 + own) * tl.where(active, beta1, 1.0).to(tl.float64)
    power2 = tl.load(powers2 + own) * tl.where(active, beta2, 1.0).to(tl.float64)
    step += active.to(tl.float64)
    rate = tl.load(hyper + RATE * tensors + own).to(tl.float64)
    if not SGD:
        rate = rate / tl.maximum(1.0 - power1, 1e-300)
    tl.store(powers1 + own, power1)
    tl.store(powers2 + own, power2)
    tl.store(steps + own, step)
    tl.store(norms + own, own_norm)
    tl.store(rates + own, tl.where(active, rate, 0.0).to(tl.float32))
    tl.store(eps + own, tl.load(hyper + EPS * tensors + own))
    tl.store(betas + own, tl.where(has_gradient, beta1, 1.0))  # who has no gradient rests
    tl.store(shares + own, tl.where(good, (1.0 - beta1) * clip * share, 0.0))
    tl.store(taken + TAKE2 * tensors + own, tl.where(active, 1.0 - beta2, 0.0))
    tl.store(taken + TAKE1 * tensors + own, tl.where(active, 1.0 - beta1, 0.0))
    tl.store(taken + CORRECTION * tensors + own, tl.maximum((1.0 - power2).to(tl.float32), 1e-30))
    least = tl.maximum(0.5 / tl.maximum(step * step, 0.5), floor)
    tl.store(taken + LEAST * tensors + own, least.to(tl.float32))
    if own == 0:
        tl.store(summary, norm)
        tl.store(summary + 1, clip)
        tl.store(summary + 2, good.to(tl.float32))


@triton.jit
def _lerp(start, end, weight):
    """Do as ``torch.lerp``."""
    return tl.where(weight < 0.5, start + weight * (end - start), end - (end - start) * (1.0 - weight))


@triton.jit(do_not_specialize=["share"])
def take_in(
    sums, squares, means, strips, taken, summary, totals, tensors, share, BLOCK: tl.constexpr, MEANS: tl.constexpr
):
    """Take the step's gradient into the moments of one strip a program, and sum these up."""
    row, lane = strips + tl.program_id(0) * STRIP, tl.arange(0, BLOCK)
    at, inside, own = tl.load(row + PLACE) + lane, lane < tl.load(row + SIZE), taken + tl.load(row + TENSOR)
    clip, good = tl.load(summary + 1), tl.load(summary + 2) > 0.0
    came = _within(tl.load(sums + at, mask=inside, other=0.0) * share)
    came = tl.where(good, came, 0.0)
    square = _lerp(
        tl.load(squares + at, mask=inside, other=0.0), came * came * (clip * clip), tl.load(own + TAKE2 * tensors)
    )
    tl.store(squares + at, square, mask=inside)
    now = tl.div_rn(square, tl.load(own + CORRECTION * tensors) + tl.zeros_like(square))
    tl.store(totals + tl.program_id(0), tl.sum(tl.where(inside, now, 0.0)))
    if MEANS:
        mean = _lerp(tl.load(means + at, mask=inside, other=0.0), came * clip, tl.load(own + TAKE1 * tensors))
        tl.store(means + at, mean, mask=inside)


@triton.jit
def scale_rates(totals, strips, strip_count, plain, numels, rates, eps, BLOCK: tl.constexpr):
    """Multiply the rate and eps of one tensor a program by the root mean square of its second moment, unless it travels
    dense."""
    own = tl.program_id(0)
    _, energy = _tensor_sum(totals, strips, strip_count, own, BLOCK)
    size = tl.maximum(tl.sqrt(energy / tl.load(numels + own).to(tl.float64)).to(tl.float32), 1e-20)
    size = tl.where(tl.load(plain + own) != 0, 1.0, size)
    tl.store(rates + own, tl.load(rates + own) * size)
    tl.store(eps + own, tl.load(eps + own) * size)


@triton.jit
def _total(totals, first, strips, LANES: tl.constexpr):
    """Return the sum of a group's moments."""
    total = tl.zeros([LANES], tl.float32)
    for i in range(0, strips, LANES):
        strip = i + tl.arange(0, LANES)
        total += tl.load(totals + first + strip, mask=strip < strips, other=0.0)
    return tl.maximum(tl.sum(total), 1e-37)


@triton.jit
def make_sizes(squares, sizes, strips, taken, totals, tensors, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Make the roots of the second moments of one strip a program."""
    row, lane = strips + tl.program_id(0) * STRIP, tl.arange(0, BLOCK)
    at, inside, own = tl.load(row + PLACE) + lane, lane < tl.load(row + SIZE), taken + tl.load(row + TENSOR)
    now = tl.load(squares + at, mask=inside, other=0.0)
    now = tl.div_rn(now, tl.load(own + CORRECTION * tensors) + tl.zeros_like(now))
    if tl.load(row + EXACT) == 0:
        total = _total(totals, tl.load(row + FIRST), tl.load(row + STRIPS).to(tl.int32), LANES)
        other = _total(totals, tl.load(row + PAIR_FIRST), tl.load(row + PAIR_STRIPS).to(tl.int32), LANES)
        least = tl.div_rn(tl.load(own + LEAST * tensors) * total, tl.load(row + LENGTH).to(tl.float32))
        # Each side has the root of the matrix's sum.
        now = tl.maximum(now, least) * tl.div_rn(tl.sqrt_rn((total + other) / 2), total)
    tl.store(sizes + at, tl.sqrt_rn(now), mask=inside)


@triton.jit
def _dense_update(row, lane, means, sizes, rates, eps, summary, SGD: tl.constexpr):
    """Return the updates of one strip, and 0 beside it."""
    at, inside, own = tl.load(row + DENSE_PLACE) + lane, lane < tl.load(row + DENSE_SIZE), tl.load(row + DENSE_TENSOR)
    update = tl.load(means + at, mask=inside, other=0.0) * tl.load(rates + own)
    if not SGD:
        update = tl.div_rn(update, tl.load(sizes + at, mask=inside, other=1.0) + tl.load(eps + own))
    return tl.where(inside, tl.where(tl.load(summary + 2) > 0.0, update, float("nan")), 0.0), inside


@triton.jit
def measure_dense(means, sizes, rates, eps, summary, strips, parts, BLOCK: tl.constexpr, SGD: tl.constexpr):
    """Sum up the squares of the updates of one strip a program."""
    row = strips + tl.program_id(0) * DENSE
    update, _ = _dense_update(row, tl.arange(0, BLOCK), means, sizes, rates, eps, summary, SGD)
    tl.store(parts + tl.program_id(0), tl.sum(update.to(tl.float64) * update.to(tl.float64)))


@triton.jit(do_not_specialize=["scale"])
def write_dense(
    means, sizes, rates, eps, summary, strips, parts, norms, out, factor, shown, strip_count, scale,
    BLOCK: tl.constexpr, LANES: tl.constexpr, SGD: tl.constexpr,
):  # fmt: skip
    """Write the updates of one strip a program, times what gives all of them the norm of their gradients."""
    pid = tl.program_id(0)
    row, lane = strips + pid * DENSE, tl.arange(0, BLOCK)
    update, inside = _dense_update(row, lane, means, sizes, rates, eps, summary, SGD)
    first, own_strips = tl.load(row + DENSE_FIRST), tl.load(row + DENSE_STRIPS)
    zeros = tl.full([LANES], 0.0, tl.float64)
    total, mine, wanted = zeros, zeros, zeros
    for i in range(0, strip_count, LANES):
        strip = i + tl.arange(0, LANES)
        real = strip < strip_count
        part = tl.load(parts + strip, mask=real, other=0.0)
        total += part
        mine += tl.where((strip >= first) & (strip < first + own_strips), part, 0.0)
        one = real & (tl.load(strips + strip * DENSE + DENSE_FIRST, mask=real, other=0) == strip)  # of each tensor
        tensor = tl.load(strips + strip * DENSE + DENSE_TENSOR, mask=one, other=0)
        norm = tl.load(norms + tensor, mask=one, other=0.0).to(tl.float64)
        wanted += norm * norm
    own, norm = tl.sqrt(tl.sum(total)).to(tl.float32), tl.sqrt(tl.sum(wanted)).to(tl.float32)
    known = (own > 0.0) & (norm > 0.0)
    times = tl.where(known, tl.div_rn(norm, tl.where(known, own, 1.0)), 1.0) * scale
    tl.store(out + tl.load(row + DENSE_AT) + lane, (update * times).to(out.dtype.element_ty), mask=inside)
    if pid == first:
        tl.store(shown + tl.load(row + DENSE_TENSOR), tl.sqrt(tl.sum(mine)).to(tl.float32) * times)
    if pid == 0:
        tl.store(factor, times)
