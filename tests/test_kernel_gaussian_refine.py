"""Refined Gaussian-k on the device against the specification: the last mask, or exactly the k largest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparsync import GaussianK
from sparsync.feedback.residual import Correction
from sparsync.kernels import strips
from sparsync.kernels.gaussian import launch
from sparsync.kernels.gaussian.launch import GaussianLists
from sparsync.kernels.topk import launch as topk
from tests.methods import gradient
from tests.pairs import INTERPRETED, MARKS, assert_same, assert_told, fading, pair_of, specified

pytestmark = MARKS
SIZES = {"one": [1], "small": [63, 1, 2], "odd": [1023, 2000], "aligned": [2048, 1024], "many": [257] * 4}


def pair(sizes, density, *, two_sided=True, **options):
    return pair_of(GaussianK(density, two_sided, refine=True), sizes, **options)


def refined(fused):
    """How often a segment's k largest went instead of its mask."""
    return int(fused.workspace.find(GaussianLists).search.fallbacks)


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Count the fused launches; a test that never made one proves nothing. Few programs: each takes several turns."""
    launches, real = [], launch._add
    monkeypatch.setattr(launch, "_add", lambda *a: launches.append(1) or real(*a))
    if INTERPRETED:
        monkeypatch.setattr(topk, "PROGRAMS", 2)
        monkeypatch.setattr(topk, "DIGIT_PROGRAMS", 2)
    yield launches
    assert launches


@pytest.mark.parametrize(
    ("sizes", "kind", "scope", "two_sided"),
    [
        ("one", "normal", "layer", False),
        ("small", "zero", "layer", True),
        ("odd", "normal", "layer", True),
        ("odd", "heavy", "global", False),
        ("aligned", "integers", "layer", False),
        ("many", "normal", "global", True),
        ("many", "mostly zero", "layer", True),
    ],
)
def test_the_same_entries_step_after_step(sizes, kind, scope, two_sided, launches):
    fused, plain = pair(SIZES[sizes], 0.02, scope=scope, two_sided=two_sided)
    for step in range(3):
        assert_same(fused, plain, gradient(kind, plain.layout.numel, torch.float32, step))
    assert len(launches) == 3


def halves(numel, seed):
    """A segment whose mask is right, and one whose mask is not: a normal, and a normal with a heavy tail."""
    return torch.cat([gradient(kind, numel, torch.float32, seed) for kind in ("normal", "heavy")])


@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "sign", "levels"])
def test_a_mask_beside_the_largest(values):
    """One segment sends its list and the other its k largest, in one message."""
    fused, plain = pair([3000, 3000], 0.05, values=values, hole=0)
    sent = assert_same(fused, plain, halves(3000, 0))
    assert refined(fused) == 1
    if values == "fp32":
        assert int((sent.indices[: int(sent.count)] < 3000).sum()) != 150
        assert int((sent.indices[: int(sent.count)] >= 3000).sum()) == 150
    for step in (1, 2):
        assert_same(fused, plain, halves(3000, step))


def counted(numel, many):
    """Zeros but for ``many`` entries of about 1, which the first threshold, or a half of it, lets through."""
    grad, rng = torch.zeros(numel), torch.Generator().manual_seed(many)
    place = torch.randperm(numel, generator=rng)[:many]
    grad[place] = torch.where(torch.arange(many) % 2 == 0, 1.0, -1.0) * (1 + 0.01 * torch.rand(many, generator=rng))
    return grad


@pytest.mark.parametrize(("k", "capacity"), [(20, 22), (15, 17)])
def test_at_the_edges_of_what_is_right(k, capacity):
    """A mask of 0.9 k goes, and one that fills the room; one less, or one more, does not."""
    least = -(-9 * k // 10)
    for many, right in ((least - 1, False), (least, True), (capacity, True), (capacity + 1, False)):
        fused, plain = pair([2000], k / 2000, hole=0)
        assert (plain.layout.k, plain.layout.capacity) == (k, capacity)
        sent = assert_same(fused, plain, counted(2000, many))
        assert refined(fused) == (not right)
        assert int(sent.count) == min(many, k if many > capacity else capacity)


def test_a_full_list_is_not_all_there_is():
    """The first strip fills the room, and the second holds one more."""
    fused, plain = pair([2000], 0.01, hole=0)
    grad = torch.zeros(2000)
    grad[[*range(100, 122), 1500]] = 1.0
    sent = assert_same(fused, plain, grad)
    assert refined(fused) == 1
    assert int(sent.count) == 20


@pytest.mark.parametrize(("density", "kind"), [(0.02, "heavy"), (0.1, "normal")])
def test_programs_of_several_blocks(density, kind, monkeypatch):
    """As a large gradient is cut: whole strips and their ends."""
    monkeypatch.setattr(strips, "SMALL", 0)
    fused, plain = pair([17_000, 300], density)
    for step in range(2):
        grad = gradient(kind, plain.layout.numel, torch.float32, step)
        grad[9000 + 7000 * step] = float("nan")
        assert int(assert_same(fused, plain, grad).where) == 0
    assert fused.workspace.find(GaussianLists).blocks > 1


@pytest.mark.skipif(INTERPRETED, reason="as large as a GPU takes it")
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("kind", ["normal", "heavy", "integers", "mostly zero"])
def test_large_gradients(kind, scope):
    fused, plain = pair([3_000_001, 70_000, 2_048_576], 0.01, scope=scope)
    for step in range(3):
        assert_same(fused, plain, gradient(kind, plain.layout.numel, torch.float32, step))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("values", ["fp16", "sign"])
def test_half_precision(dtype, values):
    fused, plain = pair([1500, 200], 0.05, dtype=dtype, values=values)
    for step, kind in enumerate(("normal", "huge")):
        assert_same(fused, plain, gradient(kind, plain.layout.numel, dtype, step))


@pytest.mark.parametrize(
    ("clip", "masking", "undoable"), [(None, False, False), (None, True, True), (0.5, True, False)]
)
def test_momentum_and_clipping(clip, masking, undoable):
    options = {"correction": Correction(0.7, masking), "clip": clip, "transactional": undoable}
    fused, plain = pair([1500, 129], 0.05, **options)
    for grad in fading(plain.layout, 3):
        assert_same(fused, plain, grad)
    assert refined(fused) > 0


@pytest.mark.parametrize("odd", [float("nan"), -float("inf")])
def test_what_is_not_finite_stays_out_and_is_told(odd):
    fused, plain = pair([900, 500], 0.05, correction=Correction(0.5, True))
    for step, grad in enumerate(fading(plain.layout, 3)):
        if step == 1:
            grad[[*range(500), 1000]] = odd
        assert_told(fused, assert_same(fused, plain, grad), (0, 1) if step == 1 else ())


def test_density_1_sends_everything_but_zeros():
    fused, plain = pair([1000, 70], 1.0)
    for kind in ("normal", "mostly zero"):
        assert_same(fused, plain, gradient(kind, plain.layout.numel, torch.float32, 0))
        fused.residual.zero_()
        plain.residual.zero_()
    assert refined(fused) == 0


@pytest.mark.parametrize("constant", [1.0, -3.0, 3e38])
def test_of_equal_entries_the_first_go(constant):
    fused, plain = pair([1500, 40], 0.05)
    for step in range(3):
        sent = assert_same(fused, plain, torch.full((plain.layout.numel,), constant) * (step == 0))
        indices = sent.indices[: int(sent.count)].sort().values.cpu()
        first = torch.cat([torch.arange(75) + 75 * step, torch.arange(2) + 2 * step + 1503])
        assert torch.equal(indices, first)


def test_it_is_turned_on_and_off_on_one_memory():
    fused, plain = pair([4000], 0.02)
    for refine in (True, False, True):
        compressor = GaussianK(0.02, True, refine)
        fused, plain = replace(fused, compressor=compressor), replace(plain, compressor=specified(compressor))
        assert_same(fused, plain, gradient("heavy", plain.layout.numel, torch.float32, int(refine)))
        assert (fused.workspace.find(GaussianLists).search is not None) == refine
