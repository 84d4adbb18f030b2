"""How much is clipped, found by kernels, against the specification."""

from __future__ import annotations

import math

import pytest
import torch

from sparsync.compressors import TopK
from sparsync.kernels import strips
from sparsync.kernels.clip import clip_scale, clip_scales
from sparsync.kernels.clip.launch import ClipBuffers
from sparsync.workspace import Workspace
from tests.methods import gradient
from tests.pairs import DEVICE, MARKS, layout_of, within_bounds  # noqa: F401

pytestmark = MARKS
SIZES = {"one": [1], "odd": [1023, 1, 5000, 129], "many": [3 * i % 97 + 1 for i in range(60)], "long": [70_001, 20_000]}


def expected(grad, layout, most):
    found = [clip_scale(grad.cpu(), segment.runs(), most) for segment in layout.segments]
    return torch.tensor(found, dtype=torch.float64)


def assert_scales(grad, layout, most, workspace):
    """Within the rounding of a float32 of the specification: sums are made in another order."""
    scales = clip_scales(grad.to(DEVICE), layout, most, workspace).cpu()
    assert scales.dtype == torch.float32
    torch.testing.assert_close(scales.double(), expected(grad, layout, most), rtol=2**-24 * 1.001, atol=0)
    return scales


@pytest.mark.parametrize(  # every pair
    ("sizes", "scope", "blocks"),
    [(sizes, ("layer", "global")[i], (1, 8)[(i + j) % 2]) for j, sizes in enumerate(SIZES) for i in range(2)],
)
def test_the_scales_of_the_specification(sizes, scope, blocks, monkeypatch):
    monkeypatch.setattr(strips, "SMALL", 0 if blocks > 1 else 1 << 30)
    layout, workspace = layout_of(SIZES[sizes], TopK(0.01), scope, hole=3), Workspace()
    for step, kind in enumerate(("normal", "heavy", "mostly zero", "huge")):
        grad = gradient(kind, layout.numel, torch.float32, step)
        own = torch.cat([grad[span.start : span.stop] for span in layout.spans]).double().norm().item()
        scales = assert_scales(grad, layout, 0.4 * own or 1.0, workspace)
        if scope == "global" and own:
            assert scales.item() == pytest.approx(0.4)
    assert workspace.find(ClipBuffers).blocks == blocks


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype):
    layout = layout_of([3000, 700], TopK(0.01))
    assert (assert_scales(gradient("normal", layout.numel, dtype, 0), layout, 0.5, Workspace()) < 1).all()


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_out(odd):
    layout = layout_of([3000, 700], TopK(0.01))
    grad = gradient("normal", layout.numel, torch.float32, 0)
    grad[[5, 2999]] = odd
    assert (assert_scales(grad, layout, 0.5, Workspace()) < 1).all()


@pytest.mark.parametrize("most", [0.1, math.inf])
def test_nothing_is_clipped_that_is_small_enough(most):
    layout = layout_of([3000, 700], TopK(0.01))
    grad = torch.zeros(layout.numel) if most < 1 else gradient("huge", layout.numel, torch.float32, 0)
    assert (assert_scales(grad, layout, most, Workspace()) == 1).all()


def test_entries_outside_every_segment_do_not_count():
    layout = layout_of([3000, 700], TopK(0.01), hole=3)
    grad = gradient("normal", layout.numel, torch.float32, 0)
    before = assert_scales(grad, layout, 0.5, Workspace())
    grad[3000:3003] = 1e6
    assert torch.equal(assert_scales(grad, layout, 0.5, Workspace()), before)


def test_the_norm_may_change_from_step_to_step_and_so_may_the_layout():
    layout, workspace = layout_of([3000, 700], TopK(0.01)), Workspace()
    grad = gradient("normal", layout.numel, torch.float32, 0)
    scales = [assert_scales(grad, layout, most, workspace).clone() for most in (0.5, 1.0, 0.5)]
    assert torch.equal(scales[0], scales[2])
    assert not torch.equal(scales[0], scales[1])
    assert_scales(grad, layout_of([1000, 2000, 700], TopK(0.01), hole=0), 0.5, workspace)


def test_a_gradient_that_is_clipped_as_one():
    layout = layout_of([3000, 700], TopK(0.01))
    grad = gradient("normal", layout.numel, torch.float32, 0)
    scale = clip_scales(grad.to(DEVICE), layout, 0.5, Workspace(), together=True).item()
    assert scale == pytest.approx(clip_scale(grad, [(0, layout.numel)], 0.5), rel=1e-7)
