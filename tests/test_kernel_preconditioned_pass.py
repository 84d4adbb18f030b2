"""The one pass that makes updates, adds them to the residual and collects candidates, against the specification: as if
the updates had been made before."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sparsync import DGCK, ThresholdK, TopK, TrimmedK
from sparsync.kernels import Memory, Update, strips
from sparsync.kernels.candidates import launch
from sparsync.kernels.precondition import reference
from sparsync.layout import Layout, Span
from tests.methods import Worker, gradient
from tests.pairs import DEVICE, INTERPRETED, MARKS, assert_told, compare, specified, within_bounds  # noqa: F401
from tests.tensors import TENSORS, Shapes, moved, numel_of, sketched, tables_of

pytestmark = MARKS
FEW = ("one entry", "tall", "stacks", "mixed")  # the interpreter is slow
SHAPES = {name: shapes for name, shapes in TENSORS.items() if name in FEW or not INTERPRETED}
METHODS = {"topk": TopK, "trimmed": TrimmedK, "threshold": ThresholdK, "dgc": DGCK}


class Pair:
    """The same worker twice: the kernels, and the specification of updates before that of the compressor."""

    def __init__(
        self, name: str, shapes: Shapes, scope="layer", dtype=torch.float32, limit=2.5, shrinks=False, **options
    ):
        self.tensors, compressor = sketched(shapes), METHODS[name](0.02)
        self.tables = tables_of(self.tensors, limit, shrinks)
        spans = [Span(f"p{i}", tensor.start, tensor.numel) for i, tensor in enumerate(self.tensors)]
        layout = Layout.cut(
            spans, numel=numel_of(self.tensors), scope=scope, density=0.02, capacity=compressor.capacity, name="all"
        )
        moments = self.tensors, moved(self.tables, DEVICE)
        self.fused = Worker(compressor, layout, dtype, device=DEVICE, update=moments, **options)
        self.plain = Worker(specified(compressor), replace(layout, _tables={}), **options)

    def step(self, grad):
        """One step of both; which entries threshold sends is left open where they are nearly equal."""
        plain, out, velocity = self.plain, torch.zeros(grad.numel()), self.plain.velocity.clone()
        update = Update(plain.velocity, velocity, self.tensors, self.tables)
        reference.precondition(grad, update, out)
        reference.shrink(Memory(plain.residual, plain.residual), update)
        sent, expected = self.fused.send(grad.to(DEVICE)), plain.send(out)
        plain.velocity = velocity
        if isinstance(self.fused.compressor, ThresholdK):
            assert torch.equal((sent.densify() + self.fused.residual).cpu(), expected.densify() + plain.residual)
            assert torch.equal(self.fused.velocity.cpu(), plain.velocity)
            assert int(sent.flags) == int(expected.flags)
            plain.residual.copy_(self.fused.residual)
        else:
            compare(self.fused, plain, sent, expected)
        return sent


@pytest.fixture(autouse=True)
def only_one_pass(monkeypatch):
    """Count the passes that make updates: a test without one proves nothing."""
    made, real = [], launch.CandidatePlaces.__init__
    monkeypatch.setattr(launch.CandidatePlaces, "__init__", lambda *a: made.append(1) or real(*a))
    yield
    assert made


@pytest.mark.each_value
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("blocks", [1, 4])
def test_as_if_updates_were_made_before(shapes, blocks, monkeypatch):
    monkeypatch.setattr(strips, "SMALL", 0 if blocks > 1 else 1 << 30)
    pair = Pair("threshold", shapes)
    for step in range(2):  # in the first, thresholds are estimated from updates that were made before
        pair.step(gradient("heavy", numel_of(pair.tensors), torch.float32, step))


@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("name", ["topk", "threshold"])
def test_residuals_shrink_in_the_same_pass(name, transactional):
    pair = Pair(name, [(1, 40, 37), 129], shrinks=True, transactional=transactional)
    for step in range(3):  # in the first, the update is made before the pass
        pair.step(gradient("heavy", numel_of(pair.tensors), torch.float32, step))


@pytest.mark.each_value
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("name", METHODS)
def test_the_same_entries_step_after_step(name, scope):
    pair = Pair(name, [(1, 7, 300), 129, (2, 32, 16)], scope)
    for step in range(3):
        pair.step(gradient("normal", numel_of(pair.tensors), torch.float32, step))


@pytest.mark.parametrize("name", ["topk", "threshold"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(name, dtype):
    pair = Pair(name, [(1, 70, 43), 500], dtype=dtype)
    for step in range(3):
        pair.step(gradient("heavy", numel_of(pair.tensors), dtype, step))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["topk", "threshold"])
def test_what_is_not_finite_stays_out_and_is_told(name, odd):
    pair = Pair(name, [(1, 30, 43), 500])
    for step in range(3):
        grad = gradient("normal", numel_of(pair.tensors), torch.float32, step)
        if step == 1:
            grad[pair.tensors[1].start + 7] = odd
        assert_told(pair.fused, pair.step(grad), (1,) if step == 1 else ())
        assert torch.isfinite(pair.fused.velocity).all()


def test_thresholds_are_estimated_from_updates():
    """Which are a billion times smaller than the gradient: with a threshold of its size, nothing would be sent."""
    pair = Pair("threshold", [(1, 30, 43)])
    for tables in (pair.tables, pair.fused.update[1]):
        tables.rates.mul_(1e-9)
    for step in range(2):
        sent = pair.step(gradient("normal", numel_of(pair.tensors), torch.float32, step))
        assert int(sent.count) > 10


def test_a_residual_that_overflows():
    pair = Pair("topk", [(1, 30, 43)])
    for worker in (pair.fused, pair.plain):
        worker.residual.fill_(3e38)
    pair.tables.rates.fill_(1e38)
    pair.fused.update[1].rates.fill_(1e38)
    sent = pair.step(torch.ones(numel_of(pair.tensors)))
    assert int(sent.flags)


def test_a_step_that_can_be_undone():
    pair = Pair("topk", [(1, 30, 43), 129], transactional=True)
    for step in range(2):
        pair.step(gradient("normal", numel_of(pair.tensors), torch.float32, step))
