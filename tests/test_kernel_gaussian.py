"""The kernels of Gaussian-k against the specification: the same entries, residuals and velocities, step after step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparsync import GaussianK
from sparsync.feedback.residual import Correction
from sparsync.kernels import strips
from sparsync.kernels.gaussian import launch
from sparsync.kernels.gaussian.launch import GaussianLists
from tests.methods import gradient
from tests.pairs import (
    DEVICE,
    INTERPRETED,
    MARKS,
    assert_nothing_is_lost,
    assert_same,
    assert_told,
    entries,
    fading,
    pair_of,
    specified,
)

pytestmark = MARKS
SIZES = {
    "one": [1],
    "small": [63],
    "odd": [1023, 1, 2, 2000],
    "aligned": [2048, 1024],
    "many": [257] * 3,
    "large": [6003, 129],
}


def pair(sizes, density, *, two_sided=False, **options):
    return pair_of(GaussianK(density, two_sided), sizes, **options)


def assert_alike(fused, plain, grad):
    """The same entries; but where more lie above than may be sent, only as many, and nothing lost."""
    if int(replace(plain).send(grad).count) < plain.layout.capacity:
        return assert_same(fused, plain, grad)
    sent = fused.send(grad.to(DEVICE))
    assert int(sent.count) == plain.layout.capacity
    indices, values = entries(sent)
    assert indices.unique().numel() == indices.numel()
    assert torch.equal(fused.residual.cpu().index_add_(0, indices, values), grad)
    return sent


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Count the fused launches; a test that never made one proves nothing."""
    launches = []
    real = launch._add
    monkeypatch.setattr(launch, "_add", lambda *a: launches.append(1) or real(*a))
    yield launches
    assert launches


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("kind", "scope", "two_sided"),
    [("normal", "layer", False), ("heavy", "global", True), ("mostly zero", "layer", False), ("zero", "global", False)],
)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_same_entries_step_after_step(sizes, kind, scope, two_sided, launches):
    fused, plain = pair(sizes, 0.02, scope=scope, two_sided=two_sided)
    for step in range(2):
        assert_same(fused, plain, gradient(kind, plain.layout.numel, torch.float32, step))
    assert len(launches) == 2


@pytest.mark.parametrize(("scope", "kind"), [("layer", "normal"), ("global", "heavy")])
def test_programs_of_several_blocks(scope, kind, monkeypatch):
    """As a large gradient is cut: whole strips and their ends, and a lane that finds several entries."""
    monkeypatch.setattr(strips, "SMALL", 0)
    fused, plain = pair([17_000, 300], 0.02, scope=scope)
    for step in range(2):
        grad = gradient(kind, plain.layout.numel, torch.float32, step)
        grad[9000 + 7000 * step] = float("nan")
        sent = assert_same(fused, plain, grad)
        assert int(sent.where) == 0
    assert fused.workspace.find(GaussianLists).blocks > 1
    assert int(sent.count) > 50


KINDS = {
    "normal": lambda g: g,
    "laplace": lambda g: g.sign() * -(1 - (g.abs() / 2**0.5).erf()).log(),
    "cauchy": lambda g: g / g.roll(1),
    "two values": lambda g: torch.where(g > 2.8, 5.0, 1.0),
    "shifted": lambda g: g + 20,
    "negative": lambda g: (g - 3) * (g.abs() > 0.5),
    "tiny": lambda g: g * 1e-36,
    "subnormal": lambda g: g * 1e-41,
}


@pytest.mark.parametrize("density", [0.003, 0.05, 0.6])
@pytest.mark.parametrize("kind", KINDS)
def test_many_ways_through_the_loop(kind, density):
    """The loop ends at another threshold for each; with a negative one, everything but zero lies above."""
    fused, plain = pair([2101], density, hole=0)
    grad = KINDS[kind](gradient("normal", 2101, torch.float32, 0))
    assert_alike(fused, plain, grad)


@pytest.mark.each_value
@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "sign", "levels"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_half_precision(dtype, values):
    for kind, steps in (("normal", 2), ("huge", 1)):
        fused, plain = pair([1500, 200], 0.02, dtype=dtype, values=values)
        for step in range(steps):
            assert_same(fused, plain, gradient(kind, plain.layout.numel, dtype, step) * 0.5**step)


@pytest.mark.parametrize("undoable", [False, True])
@pytest.mark.parametrize(("clip", "masking"), [(None, False), (None, True), (0.5, True)])
def test_momentum_and_clipping(clip, masking, undoable):
    options = {"correction": Correction(0.7, masking), "clip": clip, "transactional": undoable}
    fused, plain = pair([1500, 129], 0.02, **options)
    for grad in fading(plain.layout, 3):
        assert_same(fused, plain, grad)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_out_and_is_told(odd):
    fused, plain = pair([1000, 500, 900], 0.02, correction=Correction(0.5, True))
    for step, grad in enumerate(fading(plain.layout, 3)):
        if step == 1:
            grad[[1100, 1600]] = odd
        assert_told(fused, assert_same(fused, plain, grad), (1, 2) if step == 1 else ())


def test_density_1_sends_everything():
    fused, plain = pair([1000, 70], 1.0)
    for step in range(2):
        sent = assert_same(fused, plain, gradient("normal", plain.layout.numel, torch.float32, step))
        assert int(sent.count) == 1070


@pytest.mark.parametrize("constant", [1.0, 0.1, -3.0, 3e38])
@pytest.mark.parametrize("density", [0.01, 0.6])
def test_of_equal_entries_none_is_above(constant, density):
    """Thresholds t, t/2, 3t/4, 9t/8: the last mask is empty, as printed. A negative t lets everything through."""
    fused, plain = pair([1500], density, hole=0)
    sent = assert_alike(fused, plain, torch.full((1500,), constant))
    assert int(sent.count) == (plain.layout.capacity if constant < 0 else 0)


def crowded(numel, seed, share=1.0):
    """Negative entries, whose mean makes a negative threshold; or a few far above the rest. Either are too many."""
    rng = torch.Generator().manual_seed(seed)
    large = torch.rand(numel, generator=rng) < share
    sign = torch.randn(numel, generator=rng).sign() if share < 1 else -1
    return large * (2 + torch.rand(numel, generator=rng)) * sign


@pytest.mark.parametrize("values", ["fp32", "bf16", "sign"])
@pytest.mark.parametrize("share", [0.06, 1.0])
def test_what_is_too_much_waits(share, values):
    """Which entries go is left open; how many, and that none is lost, is not."""
    fused, plain = pair([6000, 70], 0.005, values=values)
    for step in range(2):
        grad = crowded(plain.layout.numel, step, share)
        plain.residual.copy_(fused.residual)
        sent, expected = assert_nothing_is_lost(fused, grad), plain.send(grad)
        if values == "fp32":
            assert int(sent.count) == int(expected.count)
            assert int((entries(sent)[0] < 6000).sum()) == 240


in_order = pytest.mark.skipif(not INTERPRETED, reason="on a GPU, programs come in no certain order")


@pytest.mark.parametrize("sizes", [[900], pytest.param([3000, 30], marks=in_order)])
def test_overflow_favours_no_index(sizes):
    """Entries that come anew in each step: over the steps every third of a tensor gets its share."""
    fused, plain = pair(sizes, 0.01, hole=0)
    numel, steps = sizes[0], 15
    sent_from = torch.zeros(3)
    for step in range(steps):
        fused.residual.zero_()
        indices, _ = entries(fused.send(crowded(plain.layout.numel, step).to(DEVICE)))
        sent_from += torch.histc(indices[indices < numel].float(), 3, 0, numel)
    assert sent_from.sum() == 0.08 * numel * steps
    assert sent_from.min() > 0.7 * sent_from.mean()
    assert sent_from.max() < 1.4 * sent_from.mean()


@pytest.mark.parametrize("refine", [False, True])
def test_whole_and_asleep_keep_to_the_specification(launches, refine):
    """What the kernels cannot do; the last step shows that they can do the rest."""
    fused, _ = pair_of(GaussianK(0.02, refine=refine), [3000, 200])
    grad = gradient("normal", fused.layout.numel, torch.float32, 0).to(DEVICE)
    replace(fused, whole=True).send(grad)
    fused.send(grad, frozenset({"p1"}))
    assert not launches
    fused.send(grad)
    assert len(launches) == 1


def test_another_layout_or_quantile_makes_other_tables():
    """One memory, asked for another density and then for the other quantile."""
    fused, plain = pair([4000], 0.02)
    for density, two_sided in ((0.02, False), (0.1, False), (0.1, True)):
        other, _ = pair([4000], density, two_sided=two_sided)
        fused = replace(fused, compressor=other.compressor, layout=other.layout)
        plain = replace(plain, compressor=specified(other.compressor), layout=other.layout)
        assert_same(fused, plain, gradient("normal", plain.layout.numel, torch.float32, 0))
        assert fused.workspace.find(GaussianLists).layout is other.layout
