"""Gaussian-k whose threshold is carried on, and the authors' three masks, on the device against the specification."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparsync import GaussianK
from sparsync.feedback.residual import Correction
from sparsync.kernels import strips
from tests.methods import gradient
from tests.pairs import MARKS, assert_same, assert_told, fading, layout_of, pair_of

pytestmark = MARKS
HELD = GaussianK(0.02, refine="carried")


def assert_alike(fused, plain, grad):
    """The same entries, factors and fallbacks."""
    sent = assert_same(fused, plain, grad)
    for name, own in plain.state.items():
        assert float(fused.state[name]["factor"]) == pytest.approx(float(own["factor"]), rel=1e-12)
        assert int(fused.state[name]["fallbacks"]) == int(own["fallbacks"])
    return sent


def fallbacks(one):
    return sum(int(own["fallbacks"]) for own in one.state.values())


@pytest.mark.parametrize(
    ("sizes", "kind", "scope"),
    [
        ([1], "normal", "layer"),
        ([63, 1, 2], "zero", "layer"),
        ([1023, 2000], "normal", "layer"),
        ([1023, 2000], "heavy", "global"),
        ([2048, 1024], "integers", "layer"),
        ([257] * 4, "mostly zero", "layer"),
    ],
)
def test_the_same_entries_step_after_step(sizes, kind, scope):
    fused, plain = pair_of(HELD, sizes, scope=scope)
    for step in range(5):
        assert_alike(fused, plain, gradient(kind, plain.layout.numel, torch.float32, step))


def test_after_the_first_steps_it_is_hardly_ever_the_k_largest():
    """A heavy tail, far from the quantile that is fitted; and then a gradient of another size."""
    fused, plain = pair_of(HELD, [6000], hole=0)
    first = 0
    for step in range(12):
        scale = 1.0 if step < 6 else 100.0
        sent = assert_alike(fused, plain, gradient("heavy", 6000, torch.float32, step) * scale)
        assert 108 <= int(sent.count) <= 132
        first = first if step > 1 else fallbacks(plain)
    assert first <= 2
    assert fallbacks(plain) <= first + 2


@pytest.mark.parametrize(("above", "falls"), [(80, False), (79, True), (107, False)])
def test_of_equal_entries_all_or_none_go(above, falls):
    """k is 120: as many as no message has room for are equal, and more than two thirds of k lie above them, or not."""
    fused, plain = pair_of(HELD, [6000], hole=0)
    grad = gradient("normal", 6000, torch.float32, 0) / 1000
    grad[:200] = 3.0
    grad[1000 : 1000 + above] = 4.0 + torch.arange(above) / 1000
    sent = assert_alike(fused, plain, grad)
    assert int(sent.count) == (120 if falls else above)
    assert fallbacks(fused) == fallbacks(plain) == falls


@pytest.mark.parametrize("values", ["fp16", "sign", "levels"])
def test_values_momentum_and_clipping(values):
    fused, plain = pair_of(HELD, [1500, 129], values=values, correction=Correction(0.7, True), clip=0.5)
    for grad in fading(plain.layout, 3):
        assert_alike(fused, plain, grad)


def test_what_is_not_finite_stays_out():
    fused, plain = pair_of(HELD, [900, 500])
    for step, grad in enumerate(fading(plain.layout, 3)):
        if step == 1:
            grad[[5, 1000]] = float("nan")
        assert_told(fused, assert_alike(fused, plain, grad), (0, 1) if step == 1 else ())


def test_another_density_goes_on_from_the_factor():
    fused, plain = pair_of(HELD, [4000], hole=0)
    for density in (0.02, 0.1, 0.02):
        other = replace(HELD, density=density)
        layout = layout_of([4000], other, hole=0)
        fused, plain = replace(fused, layout=layout), replace(plain, layout=replace(layout, _tables={}))
        for step in range(2):
            assert_alike(fused, plain, gradient("heavy", 4000, torch.float32, step))


def test_programs_of_several_blocks(monkeypatch):
    monkeypatch.setattr(strips, "SMALL", 0)
    fused, plain = pair_of(HELD, [17_000, 300])
    for step in range(2):
        assert_alike(fused, plain, gradient("normal", plain.layout.numel, torch.float32, step))


@pytest.mark.parametrize("kind", ["normal", "heavy", "mostly zero"])
@pytest.mark.parametrize("density", [0.02, 0.05])
def test_three_masks(kind, density):
    """As the authors' code has it; the fourth would be another one."""
    fused, plain = pair_of(GaussianK(density, two_sided=True, masks=3), [2101], hole=0)
    for step in range(3):
        sent = assert_same(fused, plain, gradient(kind, 2101, torch.float32, step))
        assert 0 < int(sent.count) < plain.layout.capacity  # of too many, which ones go would be left open


def test_the_third_mask_is_the_last():
    """Equal entries: thresholds 1, 1/2, 3/4 and 9/8; above the third are all, above the fourth none."""
    for masks, count in ((3, 400), (4, 0)):
        fused, plain = pair_of(GaussianK(0.05, masks=masks), [1000], hole=0)
        grad = torch.ones(1000)
        assert int(plain.send(grad).count) == count
        assert int(fused.send(grad.to(fused.residual.device)).count) == count
