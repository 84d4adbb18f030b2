"""The papers' statements, held against numbers."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import pytest
import torch
from torch import Tensor

import sparsync
from sparsync import theory
from sparsync.layout import Layout, Span
from sparsync.sparse import SparseGrad
from sparsync.wire import Wire

D = 20_000


def drawn(name: str, d: int = D) -> Tensor:
    random = torch.Generator().manual_seed(3)
    normal, uniform = torch.randn(d, generator=random), torch.rand(d, generator=random)
    sign = torch.where(torch.rand(d, generator=random) < 0.5, -1.0, 1.0)
    return {
        "normal": normal,
        "laplace": -uniform.log() * sign,
        "uniform": (2 * uniform - 1),
        "equal": sign,
        # Two heaps far from zero: nothing like a bell.
        "two heaps": sign * (1 + 0.01 * normal),
    }[name]


BELLS, OTHERS = ("normal", "laplace", "uniform"), ("equal", "two heaps")


@pytest.mark.parametrize("name", [*BELLS, *OTHERS])
@pytest.mark.parametrize("k", [1, 20, 2000, D - 1, D])
def test_the_exact_ratio_is_what_top_k_leaves(name: str, k: int) -> None:
    u = drawn(name).double()
    left = u.clone()
    left[u.abs().topk(k).indices] = 0
    exact = (left.square().sum() / u.square().sum()).item()
    assert theory.topk_error(u, k) == pytest.approx(exact, rel=1e-9, abs=1e-15)
    assert theory.topk_error(u, k) <= theory.randk_error(k, D) + 1e-12  # Eq. 4
    assert theory.topk_errors(u, [1, k]) == [theory.topk_error(u, 1), theory.topk_error(u, k)]


@pytest.mark.parametrize("name", BELLS)
def test_theorem_1_holds_for_bells(name: str) -> None:
    u = drawn(name)
    for k in (1, 20, 200, 2000, 10_000, 19_000):
        assert theory.topk_error(u, k) <= theory.topk_bound(k, D) < theory.randk_error(k, D)
    shape = theory.bell_shape(u)
    assert shape.bell
    assert shape.theorem_1
    assert shape.excess <= 0


@pytest.mark.parametrize("name", OTHERS)
def test_theorem_1_needs_its_assumption(name: str) -> None:
    u = drawn(name)
    assert theory.topk_error(u, 2000) > theory.topk_bound(2000, D)
    shape = theory.bell_shape(u)
    assert not shape.bell
    assert not shape.theorem_1
    assert shape.above_line > 0.5


def test_equal_magnitudes_reach_the_bound_of_rand_k() -> None:
    u = drawn("equal")
    for k in (1, 1000, 15_000):
        assert theory.topk_error(u, k) == pytest.approx(theory.randk_error(k, D), rel=1e-12)
    # (1 - x) - (1 - x)^2 is largest at 1/2.
    assert theory.bell_shape(u).excess == pytest.approx(0.25, abs=1e-4)


def test_the_uniform_distribution_lies_on_the_reference_line() -> None:
    u = drawn("uniform")
    assert theory.profile(u, 4).tolist() == pytest.approx([1, 0.75, 0.5, 0.25], abs=0.02)
    assert theory.topk_error(u, 5000) == pytest.approx(0.75**3, abs=0.01)
    assert theory.reference_line(4).tolist() == [1, 0.75, 0.5, 0.25]


def test_a_shape_below_the_line_that_bends_is_no_bell() -> None:
    """A step down to a plateau: below the line, but not convex."""
    u = torch.cat([torch.full((100,), 1.0), torch.full((400,), 0.45), torch.full((500,), 0.01)])
    shape = theory.bell_shape(u)
    assert shape.bend > 0.05
    assert not shape.bell


@pytest.mark.parametrize("d", [64, 500, 5000])
def test_the_shape_of_few_entries_is_not_a_stair(d: int) -> None:
    """Exact quantiles of a Laplace distribution: a bell, however many there are."""
    u = -torch.log((torch.arange(d) + 0.5) / d)
    assert theory.bell_shape(u).bell
    assert not theory.bell_shape(1 + u / 100).bell


def test_a_single_large_entry_hides_nothing() -> None:
    """All others are equal, and 200 times smaller: π lies below its line, and Theorem 1 does not hold."""
    shape = theory.bell_shape(torch.cat([torch.tensor([200.0]), torch.ones(100_000)]))
    assert max(shape.above_line, shape.bend) < 0.01
    assert not shape.theorem_1
    assert not shape.bell


def test_few_normal_entries_are_a_bell() -> None:
    random = torch.Generator().manual_seed(0)
    assert sum(theory.bell_shape(torch.randn(500, generator=random)).bell for _ in range(20)) >= 18


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_squares_that_no_float_holds(scale: float) -> None:
    u = drawn("normal").double()
    assert theory.bell_shape(scale * u).excess == pytest.approx(theory.bell_shape(u).excess, abs=1e-12)
    assert theory.topk_error(scale * u, 20) == pytest.approx(theory.topk_error(u, 20), rel=1e-12)


@pytest.mark.parametrize("kind", [torch.int8, torch.int64, torch.bool])
def test_whole_numbers_are_magnitudes_too(kind: torch.dtype) -> None:
    u = torch.tensor([-128, 1, 0, 2]).to(kind)
    assert theory.topk_error(u, 1) == theory.topk_error(u.double(), 1)
    assert theory.bell_shape(u) == theory.bell_shape(u.double())


def test_rand_k_leaves_exactly_its_share_on_average() -> None:
    """Over every choice of 3 out of 7 entries, in whole numbers."""
    u = [Fraction(v) for v in (3, -1, 4, 1, -5, 9, 2)]
    whole = sum(v * v for v in u)
    left = [sum(u[i] ** 2 for i in range(7) if i not in kept) for kept in combinations(range(7), 3)]
    assert Fraction(sum(left), len(left)) / whole == Fraction(4, 7)
    assert theory.randk_error(3, 7) == pytest.approx(4 / 7)


def test_delta_is_what_the_bounds_leave() -> None:
    for k, d in ((1, 1000), (10, 100), (100, 100)):
        assert 1 - theory.topk_delta(k, d) == pytest.approx(theory.topk_bound(k, d), abs=1e-12)
        assert 1 - theory.randk_delta(k, d) == pytest.approx(theory.randk_error(k, d), abs=1e-12)
        assert theory.randk_delta(k, d) <= theory.topk_delta(k, d)


def test_catching_up_is_one_over_delta_squared() -> None:
    for c in (1, 2, 100, 1000):
        assert theory.topk_catch_up(c) == pytest.approx(theory.topk_delta(1, c) ** -2)
        assert theory.randk_catch_up(c) == pytest.approx(theory.randk_delta(1, c) ** -2)
    assert theory.randk_catch_up(1000) == 1_000_000
    assert theory.topk_catch_up(1000) == pytest.approx(250_250, rel=1e-4)


def test_theorem_2() -> None:
    # By hand: (4·2 + 3·5²) / (2·√100) + 4·3²·5²·(1 − 0.5) / (0.5²·100)
    assert theory.convergence_bound(99, 0.5, gap=2, smoothness=3, moment=5) == pytest.approx(83 / 20 + 18)
    dense = theory.convergence_bound(99, 1, gap=2, smoothness=3, moment=5)
    assert dense == pytest.approx(83 / 20)
    k, d = 10, 10_000
    top = theory.convergence_bound(10**6, theory.topk_delta(k, d), 2, 3, 5)
    random = theory.convergence_bound(10**6, theory.randk_delta(k, d), 2, 3, 5)
    assert dense / 100 < top < random


def test_the_two_terms_of_theorem_2_meet_only_at_one_over_delta_to_the_fourth() -> None:
    """P1 (and the study it takes Eq. 14 from) says 1/δ²; there the second term is still about 1/δ times the first."""
    delta = theory.topk_delta(1, 1000)

    def cost(steps: float) -> float:
        dense = theory.convergence_bound(int(steps), 1, 2, 3, 5)
        return theory.convergence_bound(int(steps), delta, 2, 3, 5) / dense - 1

    share = 8 * 3**2 * 5**2 / (4 * 2 + 3 * 5**2)  # of the constants
    assert cost(delta**-2) == pytest.approx(share / delta, rel=0.01)
    assert cost(delta**-4) == pytest.approx(share, rel=0.01)


def gtopk(us: list[Tensor], k: int) -> Tensor:
    """What our own gTop-k makes of what each worker's top-k sends."""
    d = us[0].numel()
    layout = Layout.cut([Span("all", 0, d)], numel=d, scope="global", density=k / d)
    sents = []
    for u in us:
        indices = u.abs().topk(k).indices.sort().values
        sents.append(SparseGrad(indices, u[indices], torch.tensor(k), d, torch.tensor(0), torch.tensor(-1)))
    (total,) = sparsync.GTopK().reduce_local(sents, layout, Wire())[0].mean.terms
    return total.densify()


def test_gtopk_meets_the_condition_of_p3_and_a_poor_choice_does_not() -> None:
    random = torch.Generator().manual_seed(0)
    us = [torch.randn(5000, generator=random) for _ in range(4)]
    total, k = torch.stack(us).sum(0), 50
    assert theory.gtopk_ratio(us, gtopk(us, k), k) < 1
    smallest = torch.zeros_like(total)
    least = total.abs().topk(k, largest=False).indices
    smallest[least] = total[least]
    assert theory.gtopk_ratio(us, smallest, k) > 1
    # Rand-k itself has the ratio 1 on average.
    ratios = []
    for _ in range(400):
        kept = torch.zeros_like(total)
        chosen = torch.randperm(5000, generator=random)[:k]
        kept[chosen] = total[chosen]
        ratios.append(theory.gtopk_ratio(us, kept, k))
    assert math.fsum(ratios) / 400 == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: theory.topk_error(torch.ones(3), 4), "k must be from 1 to 3, the number of entries, got 4"),
        (lambda: theory.topk_bound(0, 3), "k must be from 1 to 3"),
        (lambda: theory.bell_shape(torch.zeros(3)), "not all zero"),
        (lambda: theory.bell_shape(torch.tensor([1.0, math.nan])), "finite"),
        (lambda: theory.convergence_bound(1, 0.0, 1, 1, 1), "delta must be above 0 and at most 1, got 0"),
        (lambda: theory.convergence_bound(-1, 0.5, 1, 1, 1), "steps must be 0 or more, got -1"),
        (lambda: theory.topk_catch_up(0.5), "compression must be 1 or more, got 0.5"),
        (lambda: theory.gtopk_ratio([torch.zeros(4)], torch.zeros(4), 1), "must be finite and not 0"),
        (lambda: theory.gtopk_ratio([torch.ones(4)], torch.ones(1), 1), "kept must have 4 entries .* got 1"),
        (lambda: theory.gtopk_ratio([], torch.ones(1), 1), "accumulated must hold a tensor for every worker, got none"),
    ],
)
def test_what_makes_no_sense_is_refused(call: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()  # type: ignore[operator]
