"""What the papers prove about Top-k, Rand-k and gTop-k, as functions, and their assumptions as checks.

P1 is "Understanding Top-k Sparsification in Distributed Deep Learning" (Shi et al., 2019), P3 is "A Convergence
Analysis of Distributed SGD with Communication-Efficient Gradient Sparsification" (Shi et al., 2019). Throughout, ``u``
is a gradient plus its residual, ``d`` its number of entries and ``k`` how many of them are sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

POINTS = 100  # at most, at which the shape of a gradient is looked at ...
APART = 50  # ... and the entries from one to the next at least: the largest few lie where chance puts them
# An empirical quantile is off by chance; a bend or a step above the line as small as this says nothing.
TOLERANCE = 0.01


def topk_error(u: Tensor, k: int) -> float:
    """Return the exact ratio ‖u − Top_k(u)‖² / ‖u‖² (P1, Eq. 6)."""
    _check_k(k, u.numel())
    return float(_tails(_magnitudes(u))[k])


def topk_errors(u: Tensor, ks: Sequence[int]) -> list[float]:
    """Return the same for several ``k``, sorting once."""
    for k in ks:
        _check_k(k, u.numel())
    tails = _tails(_magnitudes(u))
    return [float(tails[k]) for k in ks]


def randk_error(k: int, d: int) -> float:
    """Return what ‖u − Rand_k(u)‖² / ‖u‖² is on average over the draws, for every u: 1 − k/d (P1, Eq. 4).

    The bound for Top-k of the studies before P1 (Eq. 3).
    """
    _check_k(k, d)
    return 1 - k / d


def topk_bound(k: int, d: int) -> float:
    """P1's bound of ‖u − Top_k(u)‖² / ‖u‖² where u is bell-shaped: (1 − k/d)² (Theorem 1, Eq. 12).

    Not for every u: where all magnitudes are equal the ratio is 1 − k/d. ``bell_shape`` tells.
    """
    return randk_error(k, d) ** 2


def randk_delta(k: int, d: int) -> float:
    """δ with ‖u − Rand_k(u)‖² = (1 − δ) ‖u‖² on average: k/d (P1, Eq. 4)."""
    _check_k(k, d)
    return k / d


def topk_delta(k: int, d: int) -> float:
    """δ with ‖u − Top_k(u)‖² ≤ (1 − δ) ‖u‖² for bell-shaped u: (2kd − k²)/d² (P1, Theorem 1, Eq. 13)."""
    _check_k(k, d)
    return (2 * k * d - k * k) / (d * d)


def convergence_bound(steps: int, delta: float, gap: float, smoothness: float, moment: float) -> float:
    """Return the right-hand side of P1's Theorem 2 (Eq. 14): a bound of the least expected ‖∇f‖² in ``steps``.

    Args:
        steps: T; the learning rate is 1/√(T + 1).
        delta: of the compressor, in (0, 1]: ``topk_delta`` or ``randk_delta``; 1 is dense SGD.
        gap: f(x₀) − f*.
        smoothness: L.
        moment: G, with E‖g‖² ≤ G².
    """
    if steps < 0:
        raise ValueError(f"steps must be 0 or more, got {steps}")
    if not 0 < delta <= 1:
        raise ValueError(f"delta must be above 0 and at most 1, got {delta:g}")
    sgd = (4 * gap + smoothness * moment**2) / (2 * math.sqrt(steps + 1))
    return sgd + 4 * smoothness**2 * moment**2 * (1 - delta) / (delta**2 * (steps + 1))


def randk_catch_up(compression: float) -> float:
    """Order of the iterations after which Rand-k converges at dense SGD's rate: c², with c = d/k (P1, section 3.2).

    As printed there: 1/δ². Where the second term of Eq. 14 falls below the first is of the order 1/δ⁴.
    """
    _check_compression(compression)
    return compression**2


def topk_catch_up(compression: float) -> float:
    """Return the same for Top-k on bell-shaped gradients: c⁴/(2c − 1)², about a quarter of it (P1, section 3.2)."""
    _check_compression(compression)
    return compression**4 / (2 * compression - 1) ** 2


def gtopk_ratio(accumulated: Sequence[Tensor], kept: Tensor, k: int) -> float:
    """Return ‖Σu − gTop_k‖² / E‖Σu − Rand_k(Σu)‖²: at most 1 where gTop-k is no worse than random-k on the sum.

    P3's abstract speaks of certain analytic assumptions; its authors' public code draws this ratio.

    Args:
        accumulated: gradient plus residual of every worker, before anything is taken out.
        kept: the sum that the workers apply, dense, of the same size; not divided by their number.
        k: entries that are sent.
    """
    if not accumulated:
        raise ValueError("accumulated must hold a tensor for every worker, got none")
    total = torch.stack([u.double().flatten() for u in accumulated]).sum(0)
    _check_k(k, total.numel())
    if kept.numel() != total.numel():
        raise ValueError(f"kept must have {total.numel()} entries like what is accumulated, got {kept.numel()}")
    expected = randk_error(k, total.numel()) * total.square().sum()
    if not (expected > 0 and expected.isfinite()):
        raise ValueError(
            f"the sum of what is accumulated must be finite and not 0, and k below {total.numel()}, got k = {k}"
        )
    return float((total - kept.double().flatten()).square().sum() / expected)


@dataclass(frozen=True)
class BellShape:
    """How far a gradient meets P1's assumption. π(i) is the i-th largest magnitude, divided by the largest (Eq. 6).

    Args:
        above_line: how far π rises above the reference line 1 − i/d of Fig. 3(b), at most; not above 0 if it nowhere
            does.
        bend: how far π² lies above the chord between neighbours, at most: 0 where it is convex, as Eq. 8 asks.
        excess: the most by which the exact ratio is above (1 − k/d)², over all k; not above 0 where Theorem 1 holds.
    """

    above_line: float
    bend: float
    excess: float

    @property
    def bell(self) -> bool:
        """Whether the assumption holds, as far as a sample tells: π below its line and π² convex.

        Beside one entry that is far larger than the others both say little; what follows from it must then hold too.
        """
        return max(self.above_line, self.bend, self.excess) <= TOLERANCE

    @property
    def theorem_1(self) -> bool:
        """Whether what follows from it holds: the bound, for every k, up to rounding."""
        return self.excess <= 1e-9


def bell_shape(u: Tensor) -> BellShape:
    """P1's assumption (section 3.2), checked on a gradient ``u`` of any shape, not all zero. Sorts it.

    Of fewer than a hundred entries or so it says little: even those of a normal distribution are above the line often.
    """
    size = _magnitudes(u)
    line = reference_line(size.numel(), device=size.device)
    above = (size / size[0] - line).max()
    # The last point is where the curve meets the axis, beyond the smallest entry.
    points = min(POINTS, max(2, size.numel() // APART))
    pi = torch.cat([_spread(size, points).square(), torch.zeros(1, dtype=torch.float64, device=size.device)])
    bend = (pi[1:-1] - (pi[:-2] + pi[2:]) / 2).max()
    excess = (_tails(size)[:-1] - line.square()).max()
    return BellShape(float(above), max(0.0, float(bend)), float(excess))


def reference_line(d: int, device: torch.device | str = "cpu") -> Tensor:
    """P1's line y = 1 − i/d at i = 0 … d − 1 (Fig. 3): what π stays below if u is bell-shaped."""
    return 1 - torch.arange(d, dtype=torch.float64, device=device) / d


def profile(u: Tensor, points: int) -> Tensor:
    """π at ``points`` places from the largest entry on, spread evenly over the entries (P1, Fig. 3)."""
    return _spread(_magnitudes(u), points)


def _spread(size: Tensor, points: int) -> Tensor:
    places = torch.arange(points, dtype=torch.int64, device=size.device) * size.numel() // points
    return (size / size[0])[places]


def _magnitudes(u: Tensor) -> Tensor:
    """In descending order, as float64: squares of 100 million entries are summed."""
    if not u.numel() or not bool(torch.isfinite(u).all()) or not bool(u.any()):
        raise ValueError(f"a gradient must be finite and not all zero, got one of shape {tuple(u.shape)} that is not")
    flat = u.detach().flatten()
    # Whole numbers have magnitudes that their own kind does not hold: -128 of int8.
    signed = flat if flat.is_floating_point() or flat.is_complex() else flat.double()
    return signed.abs().sort(descending=True).values.double()


def _tails(size: Tensor) -> Tensor:
    """Σ_{i > k} / Σ of the squares, for k from 0 to d."""
    squares = (size / size[0]).square()  # so that they are neither 0 nor infinite
    # Summed from the smallest on, so that a short tail is exact.
    tails = squares.flip(0).cumsum(0).flip(0)
    return torch.cat([tails / tails[0], tails.new_zeros(1)])


def _check_k(k: int, d: int) -> None:
    if not 1 <= k <= d:
        raise ValueError(f"k must be from 1 to {d}, the number of entries, got {k}")


def _check_compression(compression: float) -> None:
    if not compression >= 1:
        raise ValueError(f"compression must be 1 or more, got {compression:g}")
