"""Second moments made by kernels, against the specification: the same but for the order in which sums are rounded."""

from __future__ import annotations

import math

import pytest
import torch

from sparsync.kernels import second_moment
from sparsync.kernels.second_moment import HYPER, MomentVectors, begin_step, launch, reference, update, write_dense
from sparsync.kernels.second_moment.launch import BLOCK, DenseUpdateBuffers, MomentBuffers
from sparsync.kernels.sketch import Sketched, draw_signs
from sparsync.layout import Matrices
from sparsync.workspace import Workspace
from tests.pairs import DEVICE, MARKS, within_bounds  # noqa: F401
from tests.tensors import TENSORS, Shapes

pytestmark = MARKS
NAMES = ("squares", "means", "powers1", "powers2", "steps", "norms", "summary")
TABLES = ("sizes", "rates", "eps", "betas", "shares")
DENSE: Shapes = [(1, 40, 300), 5, 2 * BLOCK + 3, (2, 33, 70), BLOCK]


def tensors_of(shapes: Shapes) -> list[Sketched]:
    """All tensors of a model, one after another."""
    tensors, start, place = [], 0, 0
    for number, shape in enumerate(shapes):
        matrices = None if isinstance(shape, int) else Matrices(*shape)
        numel = shape if isinstance(shape, int) else shape[0] * shape[1] * shape[2]
        tensors.append(Sketched(number, numel, matrices, place, start))
        start, place = start + numel, place + tensors[-1].size
    return tensors


class Pair:
    """The same moments twice: by kernels, and by the specification."""

    def __init__(self, shapes: Shapes, keeps_means: bool = True, sgd: bool = False) -> None:
        self.tensors = tensors_of(shapes)
        dense = [tensor.number for tensor in self.tensors if keeps_means and tensor.matrices is None]
        devices = torch.device(DEVICE), torch.device("cpu")
        self.fused, self.plain = (MomentVectors(self.tensors, dense, 0.01, 2.5, 0.6, sgd, d) for d in devices)
        count = len(self.tensors)
        self.set(rate=torch.linspace(0.1, 0.2, count), first=torch.linspace(0.5, 0.9, count), second=0.95, eps=1e-3,
                 known=1.0)  # fmt: skip

    def set(self, **hyper: torch.Tensor | float) -> None:
        for name, value in hyper.items():
            for moments in (self.fused, self.plain):
                moments.hyper[HYPER.index(name)] = value if isinstance(value, float) else value.to(moments.device)

    def step(self, sums: torch.Tensor, loss_scale: float = 1.0) -> None:
        for moments in (self.fused, self.plain):
            moments.sums.copy_(sums)
        update(self.fused, loss_scale)
        reference.update(self.plain, loss_scale)
        assert self.fused.workspace.find(MomentBuffers) is not None, "no kernel was launched"
        self.compare()

    def compare(self) -> None:
        pairs = [
            (name, getattr(self.fused, name), getattr(self.plain, name))
            for name in NAMES
            if getattr(self.plain, name).numel()
        ]
        pairs += [(name, getattr(self.fused.tables, name), getattr(self.plain.tables, name)) for name in TABLES]
        for name, ours, theirs in pairs:
            near = 1e-6 * float(theirs.abs().max()) if name == "means" else 1e-30  # where terms nearly cancel
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=near, msg=lambda m, n=name: f"{n}: {m}")

    def sums(self, seed: int, size: float = 1.0) -> torch.Tensor:
        return torch.randn(self.plain.sums.numel(), generator=torch.Generator().manual_seed(seed)) * size


FEW_GROUPS = {name: shapes for name, shapes in TENSORS.items() if name != "stacks"} | {"dense": DENSE}


@pytest.mark.each_value
@pytest.mark.parametrize("shapes", FEW_GROUPS.values(), ids=FEW_GROUPS)
@pytest.mark.parametrize("sgd", [False, True], ids=["adam", "sgd"])
def test_the_moments_of_the_specification(shapes: Shapes, sgd: bool) -> None:
    pair = Pair(shapes, shapes is DENSE, sgd)
    for step in range(3):
        pair.step(pair.sums(step, 10.0**step))


def test_groups_of_many_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "BLOCK", 64)
    pair = Pair([(1, 64 * (launch.LANES + 2), 33)], keeps_means=False)
    pair.step(pair.sums(0))


def test_clipping_and_the_loss_scale() -> None:
    pair = Pair(DENSE)
    pair.step(pair.sums(0))
    for moments in (pair.fused, pair.plain):
        moments.max_norm.fill_(2.0)
    pair.step(pair.sums(1) * 3, loss_scale=3.0)
    assert pair.plain.summary[1] < 1
    pair.step(pair.sums(2, 1e-6) * 1024, loss_scale=1024.0)
    assert pair.plain.summary[1] == 1


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(odd: float) -> None:
    pair = Pair(DENSE)
    pair.step(pair.sums(0))
    before = pair.fused.squares.clone(), pair.fused.means.clone(), pair.fused.steps.clone()
    sums = pair.sums(1)
    sums[-1] = odd
    pair.step(sums)
    assert not pair.fused.summary[2]
    assert not pair.fused.tables.shares.any()
    after = pair.fused.squares, pair.fused.means, pair.fused.steps
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("huge", [1e19, 1e38])
def test_sums_whose_squares_are_not_finite_are_taken_as_the_largest(huge: float) -> None:
    pair = Pair(DENSE)
    for moments in (pair.fused, pair.plain):
        moments.max_norm.fill_(2.0)
    pair.step(pair.sums(0))
    sums = pair.sums(1)
    sums[[0, -1]] = huge
    pair.step(sums)
    assert pair.fused.summary[2]
    assert 0 < pair.fused.summary[1] < 1e-9
    assert all(torch.isfinite(getattr(pair.fused, name)).all() for name in NAMES)
    assert all(torch.isfinite(getattr(pair.fused.tables, name)).all() for name in TABLES)
    pair.step(pair.sums(2))


def test_who_has_no_gradient_or_is_not_trained_rests() -> None:
    pair = Pair(DENSE)
    pair.step(pair.sums(0))
    sums, second = pair.sums(1), pair.tensors[1]
    sums[second.place : second.place + second.size] = 0
    pair.set(known=torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]))
    pair.step(sums)
    assert pair.fused.steps.tolist() == [2, 1, 1, 2, 2]
    assert pair.fused.tables.betas[1] == 1


def test_a_moment_without_memory() -> None:
    pair = Pair(DENSE)
    pair.set(second=0.0, first=0.0)
    for step in range(2):
        pair.step(pair.sums(step))


def test_signs_are_those_of_every_device_and_sums_are_cleared() -> None:
    moments = MomentVectors(tensors_of(DENSE), [1], 0.01, 2.5, 0.6, False, torch.device(DEVICE))
    for step in (1, 2, 77):
        moments.sums.fill_(3)
        begin_step(moments, 5, step)
        assert torch.equal(moments.signs.cpu(), draw_signs(moments.signs.numel(), 5, step, torch.device("cpu")))
        assert not moments.sums.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sgd", [False, True], ids=["adam", "sgd"])
def test_the_dense_updates_of_the_specification(dtype: torch.dtype, sgd: bool) -> None:
    pair, workspace = Pair(DENSE, sgd=sgd), Workspace()
    dense, start = [], 0
    for tensor in (pair.tensors[i] for i in (1, 2, 4)):
        dense.append(Sketched(tensor.number, tensor.numel, None, tensor.place, start))
        start += tensor.numel
    for step, bad in enumerate((False, False, True)):
        sums = pair.sums(step)
        sums[0] = math.nan if bad else sums[0]
        pair.step(sums)
        out, shown = torch.full((start,), 9.0, dtype=dtype), torch.zeros(len(DENSE))
        ours, ours_shown = out.to(DEVICE, copy=True), shown.to(DEVICE, copy=True)
        expected = reference.write_dense(pair.plain, dense, out, 2.0, shown)
        factor = write_dense(pair.fused, dense, ours, 2.0, ours_shown, workspace)
        near = {"rtol": 1e-4, "atol": 1e-6, "equal_nan": True, "check_dtype": False}
        torch.testing.assert_close(factor.cpu(), expected, **near)
        torch.testing.assert_close(ours.cpu(), out, **near)
        torch.testing.assert_close(ours_shown.cpu(), shown, **near)
        assert out.isnan().all() == bad
    assert workspace.find(DenseUpdateBuffers) is not None


def test_without_kernels_it_is_the_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair([(1, 40, 300)], keeps_means=False)
    monkeypatch.setattr(second_moment, "usable_on", lambda device: False)
    pair.fused.sums.copy_(pair.sums(0))
    update(pair.fused, 1.0)
    assert pair.fused.workspace.find(MomentBuffers) is None
    pair.fused.sums.copy_(pair.sums(1))
    monkeypatch.undo()
    pair.plain.sums.copy_(pair.sums(0))
    reference.update(pair.plain, 1.0)
    pair.step(pair.sums(1))
