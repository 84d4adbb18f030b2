"""P1's figures about the shape of gradients: 3 and 5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparsync import theory
from sparsync_lab.papers.item import Result, RunContext
from sparsync_lab.report import Curve, Figure, LineChart, Row, Table

NUMEL = 100_000  # entries of P1's random vector
POINTS = 100  # of a curve
SHAPE, CATCH_UP = "The shape of π as a check", "What follows"  # tables
SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # k/d


def gaussian_vector(seed: int, numel: int = NUMEL) -> Tensor:
    """Draw P1's vector: normal, with mean 0 and deviation 1."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def histogram(u: Tensor, bins: int = POINTS) -> tuple[list[float], list[float]]:
    """Return the middles of the bins, spread evenly over all entries, and the density in each."""
    low, high = float(u.min()), float(u.max())
    width = (high - low) / bins or 1.0
    counts = torch.histc(u.float(), bins, low, high) if high > low else torch.zeros(bins)
    middles = [low + (i + 0.5) * width for i in range(bins)]
    return middles, (counts.double() / (u.numel() * width)).tolist()


def figure_3(context: RunContext) -> Result:
    """Draw distribution, π and π² of a normal vector, with the reference line."""
    u = gaussian_vector(context.seed)
    middles, density = histogram(u)
    places = [i * NUMEL // POINTS for i in range(POINTS)]
    line = theory.reference_line(NUMEL)[places].tolist()
    pi = theory.profile(u, POINTS).tolist()
    squares = [p * p for p in pi]
    charts = [
        LineChart("(a) Distribution of u", "u", [Curve("density", middles, density)]),
        LineChart("(b) π over its line", "i", [Curve("1 − i/d", places, line), Curve("π", places, pi)]),
        LineChart("(c) π² over the line", "i", [Curve("1 − i/d", places, line), Curve("π²", places, squares)]),
    ]
    captions = (
        "A normal vector of 100,000 entries, deviation 1.",
        "Magnitudes in descending order over the largest: P1 takes them to be convex, and below the line.",
        "Their squares: what the areas of Eq. 7 are taken of.",
    )
    return Result(
        [_shape_table({"normal": u})],
        [Figure(chart, caption) for chart, caption in zip(charts, captions, strict=True)],
        [
            "Nothing differs from the paper but the vector, which is drawn anew, from our seed. The table has how far "
            f"π rises above the line, over all entries, and how far π and π² are from convex, at {POINTS} places. P1's "
            "text speaks of π; its area argument needs π² to be convex. A convex π that falls to 0 has a convex π²."
        ],
        {"i": places, "pi": pi, "pi_squared": squares, "line": line, "u": middles, "density": density},
    )


def figure_5(context: RunContext, trained: Sequence[tuple[str, dict[float, float]]], others: Result) -> Result:
    """Draw the exact ratio and the two bounds over k: on a normal vector, and on gradients of trainings.

    Args:
        trained: of each gradient, its name and its exact ratio by k/d.
        others: what trainings bring along.
    """
    u = gaussian_vector(context.seed)
    ks = [max(1, round(share * NUMEL)) for share in SHARES]
    exact = theory.topk_errors(u, ks)
    before = [theory.randk_error(k, NUMEL) for k in ks]
    ours = [theory.topk_bound(k, NUMEL) for k in ks]
    bounds = [Curve("1 − k/d", SHARES, before), Curve("(1 − k/d)²", SHARES, ours)]
    figures = [
        Figure(
            LineChart("Gaussian vector", "k/d", [*bounds, Curve("exact", SHARES, exact)]),
            "‖u − Top_k(u)‖²/‖u‖² of a normal vector of 100,000 entries, and the bounds of it.",
        )
    ]
    rows = [Row(_cells(share, *values)) for share, *values in zip(SHARES, exact, ours, before, strict=True)]
    columns = {"k_over_d": list(SHARES), "exact normal": exact, "bound": ours, "previous bound": before}
    for name, ratios in trained:
        shares = sorted(ratios)
        values = [ratios[share] for share in shares]
        curves = [
            Curve("1 − k/d", shares, [1 - s for s in shares]),
            Curve("(1 − k/d)²", shares, [(1 - s) ** 2 for s in shares]),
            Curve("exact", shares, values),
        ]
        figures.append(Figure(LineChart(name, "k/d", curves), f"The same of gradient + residual: {name}."))
        columns[f"exact {name}"] = values
    broken = [name for name, ratios in trained if any(v > (1 - s) ** 2 for s, v in ratios.items())]
    found = (
        f"On {', '.join(broken)} the exact ratio is above (1 − k/d)² somewhere."
        if broken
        else "In every case the exact ratio stays below (1 − k/d)², and that below 1 − k/d."
    )
    table = Table(
        "A normal vector: the exact ratio and its bounds",
        ["k/d", "exact", "(1 − k/d)², P1", "1 − k/d, before"],
        rows,
        [found],
    )
    notes = [
        "P1 does not say from which models and iterations its gradients of trainings are; ours are named.",
        *others.notes,
    ]
    return replace(others, tables=[table, catch_up_table()], figures=figures, notes=notes, rows=columns)


def catch_up_table() -> Table:
    """Return what the bounds say about convergence, as numbers."""
    rows = []
    for c in (10, 100, 1000):
        delta = theory.topk_delta(1, c), theory.randk_delta(1, c)
        rows.append(
            Row(
                [
                    f"{c:,}",
                    f"{delta[0]:.3g}",
                    f"{delta[1]:.3g}",
                    f"{theory.topk_catch_up(c):,.0f}",
                    f"{theory.randk_catch_up(c):,.0f}",
                    f"{theory.convergence_bound(c**2, delta[0], 1, 1, 1):.3g}",
                    f"{theory.convergence_bound(c**2, delta[1], 1, 1, 1):.3g}",
                ]
            )
        )
    headings = ["c = d/k", "δ Top-k", "δ Rand-k", "c⁴/(2c−1)²", "c²", "Eq. 14 Top-k", "Eq. 14 Rand-k"]
    return Table(
        f"{CATCH_UP}: δ, iterations to catch up with dense SGD, and the right-hand side of Theorem 2 after c² of them",
        headings,
        rows,
        [
            "Theorem 2 with f(x₀) − f* = L = G = 1. P1 says that T ≥ O(1/δ²) iterations make its first term dominate; "
            "from Eq. 14 as printed it takes O(1/δ⁴). The ratio of Top-k to Rand-k changes from 4 to 16 with that. No "
            "training here tests Theorem 2."
        ],
    )


def bend(values: Sequence[float]) -> float:
    """Return how far a falling curve that ends at 0 lies above the chord between neighbours, at most: 0 where it is
    convex."""
    curve = [*values, 0.0]
    return max(
        0.0, *(own - (before + after) / 2 for before, own, after in zip(curve, curve[1:], curve[2:], strict=False))
    )


def _shape_table(vectors: dict[str, Tensor]) -> Table:
    rows = []
    for name, u in vectors.items():
        shape = theory.bell_shape(u)
        own = bend(theory.profile(u, POINTS).tolist())
        holds = "yes" if shape.bell and own <= theory.TOLERANCE else "no"
        rows.append(
            Row([name, f"{shape.above_line:.3g}", f"{own:.3g}", f"{shape.bend:.3g}", f"{shape.excess:.3g}", holds])
        )
    return Table(
        SHAPE,
        ["vector", "π − line, at most", "bend of π", "bend of π²", "excess over the bound", "holds"],
        rows,
        ["Holds: π below its line, π and π² convex, up to the noise of a sample."],
    )


def _cells(share: float, *values: float) -> list[str]:
    return [f"{share:g}", *(f"{value:.4f}" for value in values)]
