"""Sketches made by kernels, against the specification: the same but for the order in which sums are rounded."""

from __future__ import annotations

import math

import pytest
import torch

from sparsync.kernels import strips
from sparsync.kernels.sketch import draw_signs, reference, sketch
from sparsync.kernels.sketch.launch import (
    ALIGNED,
    ALIGNED_NARROW,
    ANY,
    ANY_NARROW,
    NARROW_UP_TO,
    SketchBuffers,
    TileRow,
)
from sparsync.workspace import Workspace
from tests.methods import gradient
from tests.pairs import DEVICE, MARKS, within_bounds  # noqa: F401
from tests.tensors import TENSORS, numel_of, sketched

pytestmark = MARKS


def signs_of(tensors, step=0):
    return draw_signs(max(t.place + t.size for t in tensors), 3, step, torch.device("cpu"))


def sketch_of(tensors, grad, workspace, step=0):
    """The kernels' sketch; what is written twice or not at all shows."""
    out = torch.full((tensors[-1].at + tensors[-1].size,), 1e30, device=DEVICE)
    sketch(grad.to(DEVICE), tensors, signs_of(tensors, step).to(DEVICE), out, workspace)
    assert workspace.find(SketchBuffers) is not None, "no kernel was launched"
    return out.cpu()


def expected(tensors, grad, step=0):
    out = torch.empty(tensors[-1].at + tensors[-1].size, dtype=torch.float64)
    reference.sketch(grad, tensors, signs_of(tensors, step).double(), out)
    return out


@pytest.mark.each_value
@pytest.mark.parametrize("turns", [1, 8])
@pytest.mark.parametrize("shapes", TENSORS.values(), ids=TENSORS)
def test_the_sketch_of_the_specification(shapes, turns, monkeypatch):
    monkeypatch.setattr(strips, "SMALL", 0 if turns > 1 else 1 << 30)
    tensors, workspace = sketched(shapes), Workspace()
    for step in range(2):
        grad = gradient("normal", numel_of(tensors), torch.float32, step)
        found = sketch_of(tensors, grad, workspace, step)
        torch.testing.assert_close(found.double(), expected(tensors, grad, step), rtol=1e-5, atol=1e-4)
    assert workspace.find(SketchBuffers).turns == turns


@pytest.mark.parametrize("shapes", TENSORS.values(), ids=TENSORS)
def test_integers_are_summed_exactly(shapes):
    tensors = sketched(shapes)
    grad = gradient("integers", numel_of(tensors), torch.float32, 0)
    assert torch.equal(sketch_of(tensors, grad, Workspace()).double(), expected(tensors, grad))


def test_loads_are_wide_where_every_row_starts_at_a_multiple():
    tensors, workspace = sketched([(2, 70, 44), (1, 30, 300), (1, 30, 303), (1, 30, 43)], hole=4), Workspace()
    grad = gradient("integers", numel_of(tensors, 4), torch.float32, 0)
    assert torch.equal(sketch_of(tensors, grad, workspace).double(), expected(tensors, grad))
    kinds = workspace.find(SketchBuffers).tiles.view(-1, len(TileRow._fields))[:, -1]
    assert set(kinds.tolist()) == {ANY, ALIGNED, ANY_NARROW, ALIGNED_NARROW}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype):
    """What comes in is exact, and so are sums of few bits."""
    tensors = sketched([(1, 70, 43), 500, (1, 20, NARROW_UP_TO + 1)])
    grad = gradient("integers", numel_of(tensors), dtype, 0)
    assert torch.equal(sketch_of(tensors, grad, Workspace()).double(), expected(tensors, grad))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_its_row_and_column_and_nowhere_else(odd):
    tensors = sketched([(2, 70, 43), 500])
    grad = gradient("normal", numel_of(tensors), torch.float32, 0)
    first, second = tensors
    grad[first.start + 70 * 43 + 5 * 43 + 7] = grad[second.start + 11] = odd  # of the second matrix
    bad = (~sketch_of(tensors, grad, Workspace()).isfinite()).nonzero().flatten().tolist()
    assert bad == [70 + 5, 2 * 70 + 43 + 7, second.at + 11]


def test_the_same_bits_again_and_from_other_tensors_in_between():
    tensors, others, workspace = sketched([(1, 301, 270)]), sketched([(1, 270, 301), 77]), Workspace()
    grad = gradient("heavy", numel_of(tensors), torch.float32, 0)
    first = sketch_of(tensors, grad, workspace)
    sketch_of(others, gradient("heavy", numel_of(others), torch.float32, 1), workspace)
    assert torch.equal(sketch_of(tensors, grad, workspace), first)


def test_entries_outside_every_tensor_do_not_count():
    tensors = sketched([(1, 70, 43), 500])
    grad = gradient("normal", numel_of(tensors), torch.float32, 0)
    before = sketch_of(tensors, grad, Workspace())
    grad[:3] = grad[3 + 70 * 43 :][:3] = math.nan
    assert torch.equal(sketch_of(tensors, grad, Workspace()), before)
