"""Parameters changed by a kernel, against the specification; and a training by all kernels of this feedback."""

from __future__ import annotations

import warnings

import pytest
import torch

from sparsync.kernels import apply_update as room
from sparsync.kernels import learn_clip, path, precondition, second_moment, strips
from sparsync.kernels.apply_update import ParameterChange, apply_update, reference
from sparsync.kernels.apply_update.launch import ParameterTables
from sparsync.simulate import VirtualWorkers
from sparsync.workspace import Workspace
from tests.pairs import DEVICE, MARKS

pytestmark = MARKS
UNDO = torch.tensor(0.3)
SHAPES = [(1,), (63,), (33, 31), (100_003,), (4, 3, 5, 5), (1024,), (0,), (8, 2048)]


def parameters_of(shapes, seed=0, dtype=torch.float32):
    """Parameters, gradients that are views of one buffer as in a bucket, and a factor for every third of them."""
    rng = torch.Generator().manual_seed(seed)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.randn(sum(sizes), generator=rng).to(dtype)
    grads = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
    factors = [torch.rand((), generator=rng) + 0.5 for _ in range(3)]
    kept = (1.0, 0.9, 0.999)
    return [
        ParameterChange(torch.randn(shape, generator=rng).to(dtype), grad, kept[i % 2 + i % 3 // 2], factors[i % 3])
        for i, (shape, grad) in enumerate(zip(shapes, grads, strict=True))
    ]


def moved(changes):
    factors = {id(c.shown): c.shown.to(DEVICE, copy=True) for c in changes}
    flat = torch.cat([c.grad.flatten() for c in changes]).to(DEVICE)
    grads = [g.view(c.grad.shape) for g, c in zip(flat.split([c.grad.numel() for c in changes]), changes, strict=True)]
    return [
        ParameterChange(c.parameter.to(DEVICE, copy=True), grad, c.kept, factors[id(c.shown)])
        for c, grad in zip(changes, grads, strict=True)
    ]


def close(ours, theirs):
    """PyTorch may multiply and add at once."""
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-6, atol=5e-7)


def assert_same(changes, workspace, skip=None):
    ours = moved(changes)
    apply_update(ours, UNDO.to(DEVICE), None if skip is None else skip.to(DEVICE), workspace)
    reference.apply_update(changes, UNDO, skip)
    for a, b in zip(ours, changes, strict=True):
        close(a.parameter, b.parameter)
        assert torch.equal(a.grad.cpu(), b.grad)


@pytest.mark.parametrize("blocks", [1, 4])
def test_the_parameters_of_the_specification(blocks, monkeypatch):
    monkeypatch.setattr(strips, "SMALL", 0 if blocks > 1 else 1 << 30)
    workspace = Workspace()
    for step in range(3):  # in each with other addresses, in the last with other parameters
        assert_same(parameters_of(SHAPES if step < 2 else SHAPES[::2], step), workspace)
    assert workspace.find(ParameterTables).blocks == blocks


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_a_scaler_that_found_infinity_leaves_them_as_they_are(found):
    changes = parameters_of(SHAPES)
    before = [c.parameter.clone() for c in changes]
    assert_same(changes, Workspace(), torch.tensor(found))
    assert all(torch.equal(a, c.parameter) for a, c in zip(before, changes, strict=True)) == bool(found)


def test_nothing_but_the_step_changes_and_the_tables_stay():
    workspace, changes, undo = Workspace(), moved(parameters_of(SHAPES)), UNDO.to(DEVICE)
    expected = [(c.parameter.clone().cpu(), c) for c in changes]
    for _ in range(2):
        apply_update(changes, undo, None, workspace)
    tables = workspace.find(ParameterTables)
    assert tables is not None
    for before, change in expected:
        own = [ParameterChange(before, change.grad.cpu(), change.kept, change.shown.cpu())]
        for _ in range(2):
            reference.apply_update(own, UNDO, None)
        close(change.parameter, before)


@pytest.mark.parametrize("kind", ["half precision", "transposed", "channels last"])
def test_others_are_changed_as_well(kind):
    """By the kernel where memory is laid out alike, else by the specification."""
    changes = parameters_of([(4, 3, 5, 5)], dtype=torch.bfloat16 if kind == "half precision" else torch.float32)
    own, workspace = changes[0], Workspace()
    if kind == "transposed":
        own = own._replace(grad=own.grad.transpose(2, 3))
    if kind == "channels last":
        near = {"memory_format": torch.channels_last}
        own = own._replace(parameter=own.parameter.to(**near), grad=own.grad.to(**near))
    ours = own._replace(
        parameter=own.parameter.to(DEVICE, copy=True), grad=own.grad.to(DEVICE), shown=own.shown.to(DEVICE)
    )
    apply_update([ours], UNDO.to(DEVICE), None, workspace)
    reference.apply_update([own], UNDO, None)
    close(ours.parameter, own.parameter)
    assert (workspace.find(ParameterTables) is not None) == (kind == "channels last")


def trained(steps=3):
    """Weights after some steps of virtual workers that send everything."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.Tanh(), torch.nn.Linear(64, 40)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)

    def loss_fn(own, batch, carried):
        return (own(batch[0]) - batch[0].roll(1, 1)).square().mean(), carried

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        workers = VirtualWorkers(
            model, loss_fn, optimizer, 2, compressor="topk", density=1.0, precondition=True, dense_below=0
        )
    for step in range(steps):
        rng = torch.Generator().manual_seed(step)
        workers.advance([(torch.randn(8, 40, generator=rng).to(DEVICE),) for _ in range(2)])
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_a_training_is_that_without_kernels(monkeypatch):
    """Sketches are summed in another order, so within rounding."""
    ours = trained()
    for module in (path, room, second_moment, learn_clip, precondition):
        monkeypatch.setattr(module, "usable_on", lambda device: False)
    for a, b in zip(ours, trained(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
