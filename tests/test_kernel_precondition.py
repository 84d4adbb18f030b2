"""Updates made by kernels, against the specification: the same bits."""

from __future__ import annotations

import math

import pytest
import torch

from sparsync.kernels import Memory, Update, strips
from sparsync.kernels.precondition import came_in, precondition, reference
from sparsync.kernels.precondition.launch import PreconditionBuffers
from sparsync.workspace import Workspace
from tests.methods import gradient
from tests.pairs import DEVICE, MARKS, within_bounds  # noqa: F401
from tests.tensors import TENSORS, Shapes, moved, numel_of, sketched, tables_of

pytestmark = MARKS


def assert_same(shapes: Shapes, dtype=torch.float32, limit=2.5, odd=None, undoable=False, steps=2):
    """Some steps of both; the second goes on from the velocity of the first."""
    tensors, workspace, tables = sketched(shapes), Workspace(), tables_of(sketched(shapes), limit)
    numel, ours = numel_of(tensors), moved(tables, DEVICE)
    velocities = [torch.zeros(numel), torch.zeros(numel, device=DEVICE)]
    for step in range(steps):
        grad = gradient("heavy", numel, dtype, step)
        if odd is not None:
            grad[::7] = odd
        mine, outs = grad.to(DEVICE, copy=True), [torch.zeros(numel), torch.zeros(numel, device=DEVICE)]
        if dtype == torch.float32:
            outs = [grad, mine]  # in its own place
        after = [torch.full_like(v, 5.0) if undoable else v for v in velocities]
        reference.precondition(grad, Update(velocities[0], after[0], tensors, tables), outs[0])
        precondition(mine, Update(velocities[1], after[1], tensors, ours), outs[1], workspace)
        for a, b in (after, outs):
            torch.testing.assert_close(b.cpu(), a, rtol=0, atol=0, equal_nan=True)
        velocities = after
    space = workspace.find(PreconditionBuffers)
    assert space is not None, "no kernel was launched"
    return space, outs[1].cpu(), velocities[1].cpu()


@pytest.mark.each_value
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("shapes", TENSORS.values(), ids=TENSORS)
def test_the_updates_of_the_specification(shapes, blocks, monkeypatch):
    monkeypatch.setattr(strips, "SMALL", 0 if blocks > 1 else 1 << 30)
    space, _, _ = assert_same(shapes)
    assert space.blocks == blocks


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype):
    assert_same([(1, 70, 43), 500], dtype)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 3e38])
def test_what_is_not_finite_moves_no_velocity(odd):
    _, out, velocity = assert_same([(1, 70, 43), 500], odd=odd)
    assert torch.isfinite(velocity).all()
    assert out.isnan().any() == (not math.isfinite(odd))


def test_an_update_that_is_not_finite():
    """Nothing to divide by, and no limit."""
    tensors, tables = sketched([100]), tables_of(sketched([100]), math.inf)
    tables.sizes[:] = 0
    tables.eps[:] = 0
    before, after, out = (
        torch.ones(106, device=DEVICE),
        torch.zeros(106, device=DEVICE),
        torch.zeros(106, device=DEVICE),
    )
    update = Update(before, after, tensors, moved(tables, DEVICE))
    precondition(torch.ones(106, device=DEVICE), update, out, Workspace())
    assert out[3:103].isnan().all()
    assert torch.equal(after[3:103], before[3:103])


@pytest.mark.parametrize("limit", [0.01, math.inf])
def test_within_its_limit(limit):
    _, out, _ = assert_same([(1, 70, 43), 500], limit=limit)
    assert math.isinf(limit) or out[3 : 3 + 70 * 43].abs().max() <= limit  # rates are below 1


def test_a_step_that_can_be_undone_leaves_the_velocity_alone():
    assert_same([(2, 32, 48), 129], undoable=True)


def test_other_tensors_in_the_same_workspace():
    workspace = Workspace()
    for shapes in ([(1, 70, 43)], [(1, 43, 70)]):
        tensors = sketched(shapes)
        tables, grad = tables_of(tensors), gradient("normal", numel_of(tensors), torch.float32, 0)
        out, zeros = grad.clone(), torch.zeros_like(grad)
        reference.precondition(grad, Update(zeros, torch.zeros_like(grad), tensors, tables), out)
        mine = grad.to(DEVICE, copy=True)
        update = Update(zeros.to(DEVICE), zeros.to(DEVICE), tensors, moved(tables, DEVICE))
        precondition(mine, update, mine, workspace)
        assert torch.equal(mine.cpu(), out)


@pytest.mark.parametrize("shrinks", [False, True])
@pytest.mark.parametrize("undoable", [False, True])
def test_residuals_shrink_before_an_update_comes_in(shrinks, undoable):
    """In place the device decides; what can be undone is multiplied into the place that the step writes."""
    tensors, workspace = sketched([(1, 70, 43), 500, 60]), Workspace()
    numel, tables = numel_of(tensors), tables_of(tensors, shrinks=shrinks)
    residual, grad = gradient("normal", numel, torch.float32, 1), gradient("normal", numel, torch.float32, 0)
    before = residual.to(DEVICE, copy=True)
    after = torch.full_like(before, 5.0) if undoable else before
    velocity = torch.zeros(numel, device=DEVICE)
    memory = Memory(before, after, update=Update(velocity, velocity, tensors, moved(tables, DEVICE)))
    came_in(grad.to(DEVICE), memory, workspace)
    assert memory.update is None
    assert torch.equal(before.cpu(), residual) == (undoable or not shrinks)
    for tensor in tensors:
        own = slice(tensor.start, tensor.start + tensor.numel)
        assert torch.equal(memory.before[own].cpu(), residual[own] * tables.kept[tensor.number])
