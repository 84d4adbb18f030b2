"""The kernels of top-k and DGC against the specification: the same entries, residuals and velocities, whatever their
thresholds."""

from __future__ import annotations

import pytest
import torch

from sparsync import DGCK, TopK, TrimmedK
from sparsync.feedback.residual import Correction
from sparsync.kernels.candidates.launch import CandidateLists
from sparsync.kernels.dgc.reference import dgc_sample, seed_of
from sparsync.kernels.topk import launch
from sparsync.layout import Layout
from tests.methods import Worker, gradient
from tests.pairs import DEVICE, INTERPRETED, MARKS, assert_same, assert_told, fading, layout_of, pair_of, specified

pytestmark = MARKS
METHODS = {"topk": TopK, "trimmed": TrimmedK, "dgc": DGCK}
SIZES = {
    "one": [1],
    "small": [63, 1, 2],
    "odd": [1023, 3000],
    "aligned": [2048, 1024],
    "many": [257] * 4,
    "regions": [20_000],
    "large": [3_000_001, 70_000, 1_048_576],
}


def pair(name, sizes, density, **options):
    return pair_of(METHODS[name](density), sizes, **options)


def fallbacks(fused):
    return int(fused.workspace.find(launch.TopKSearch).fallbacks)


@pytest.fixture(autouse=True)
def only_kernels(monkeypatch, request):
    """Count the launches: a test that never made one proves nothing. Few programs, so that each takes several turns."""
    launches, real = [], launch.collect
    monkeypatch.setattr(launch, "collect", lambda *a: launches.append(1) or real(*a))
    if INTERPRETED:
        monkeypatch.setattr(launch, "PROGRAMS", 2)
        monkeypatch.setattr(launch, "DIGIT_PROGRAMS", 2)
    yield
    assert launches or "no_launch" in request.node.name


@pytest.mark.parametrize(
    ("name", "sizes", "kind", "scope"),
    [
        ("topk", "one", "normal", "layer"),
        ("topk", "small", "zero", "layer"),
        ("topk", "odd", "normal", "layer"),
        ("topk", "odd", "integers", "global"),
        ("topk", "aligned", "heavy", "global"),
        ("topk", "many", "mostly zero", "layer"),
        ("trimmed", "odd", "heavy", "global"),
        ("dgc", "one", "zero", "layer"),
        ("dgc", "odd", "normal", "layer"),
        ("dgc", "odd", "integers", "global"),
        ("dgc", "small", "mostly zero", "layer"),
        *([(name, "large", kind, scope) for name in METHODS for kind in ("normal", "heavy", "integers", "mostly zero")
           for scope in ("layer", "global")] if not INTERPRETED else []),
    ],
)  # fmt: skip
def test_the_same_entries_step_after_step(name, sizes, kind, scope):
    fused, plain = pair(name, SIZES[sizes], 0.02, scope=scope)
    for step in range(3):
        assert_same(fused, plain, gradient(kind, plain.layout.numel, torch.float32, step))


def test_candidates_in_several_regions():
    fused, plain = pair("topk", SIZES["regions"], 0.04)
    for step in range(2):
        assert_same(fused, plain, gradient("normal", plain.layout.numel, torch.float32, step))
    assert fused.workspace.find(CandidateLists).regions > 1
    assert fallbacks(fused) == 1


@pytest.mark.parametrize(
    ("name", "dtype", "values"),
    [
        ("topk", torch.float16, "fp32"),
        ("topk", torch.bfloat16, "sign"),
        ("topk", torch.float32, "levels"),
        ("topk", torch.float32, "fp16"),
        ("topk", torch.bfloat16, "bf16"),
        ("trimmed", torch.float16, "fp16"),
        ("dgc", torch.float32, "sign"),
    ],
    ids=str,
)
def test_half_precision(name, dtype, values):
    fused, plain = pair(name, [1500], 0.01, dtype=dtype, values=values)
    for step, kind in enumerate(("normal", "normal", "heavy", "huge")):  # the first and the last fall back
        assert_same(fused, plain, gradient(kind, plain.layout.numel, dtype, step) * 0.5**step)


@pytest.mark.parametrize("size", [2.0**-99, 2.0**-101])
def test_levels_of_hardly_anything(size):
    fused, plain = pair("topk", [1500], 0.01, values="levels")
    assert_same(fused, plain, torch.full((plain.layout.numel,), size))


@pytest.mark.parametrize(
    ("name", "clip", "masking", "undoable"),
    [("topk", None, True, False), ("topk", 0.5, False, True), ("dgc", 0.5, True, True)],
)
def test_momentum_and_clipping(name, clip, masking, undoable):
    options = {"correction": Correction(0.7, masking), "clip": clip, "transactional": undoable}
    fused, plain = pair(name, [1500, 129], 0.02, **options)
    for grad in fading(plain.layout, 3):
        assert_same(fused, plain, grad)


@pytest.mark.parametrize(("name", "odd"), [("topk", float("nan")), ("dgc", -float("inf"))])
def test_what_is_not_finite_stays_out_and_is_told(name, odd):
    fused, plain = pair(name, [900, 500], 0.02, correction=Correction(0.5, True))
    for step, grad in enumerate(fading(plain.layout, 3)):
        if step == 1:
            grad[[*range(500), 1000]] = odd  # so many that too few candidates may be left
        assert_told(fused, assert_same(fused, plain, grad), (0, 1) if step == 1 else ())


@pytest.mark.parametrize("name", METHODS)
def test_density_1_sends_everything(name):
    fused, plain = pair(name, [1000, 70], 1.0)
    for grad in fading(plain.layout, 2):
        assert_same(fused, plain, grad)
    assert fallbacks(fused) == 0


@pytest.mark.parametrize("name", ["topk", "dgc"])
def test_equal_entries_are_too_many_candidates(name):
    """Only their indices tell them apart: the lowest go first, and the residual is searched in every step."""
    fused, plain = pair(name, [4000], 0.01)
    for size in (1.0, 1.0, -5.0):
        assert_same(fused, plain, torch.full((plain.layout.numel,), size))
    assert fallbacks(fused) == 3


@pytest.mark.parametrize("name", ["topk", "dgc"])
def test_jumps_fall_back_and_settled_runs_do_not(name):
    fused, plain = pair(name, [3000], 0.02)
    numel, counted = plain.layout.numel, []
    for step, size in enumerate([1.0, 1.0, 1.0, 1e3, 1.0]):
        assert_same(fused, plain, gradient("normal", numel, torch.float32, step) * size)
        counted.append(fallbacks(fused))
    assert counted[:4] == [1, 1, 1, 2]  # at first no threshold is known; at last nearly all are above it
    fused.residual.zero_()
    plain.residual.zero_()
    assert_same(fused, plain, gradient("normal", numel, torch.float32, 9))  # none is
    assert fallbacks(fused) == counted[-1] + 1


@pytest.mark.parametrize("name", ["topk", "dgc"])
def test_state_that_was_replaced_is_taken_over(name):
    """A checkpoint, or a step that was undone, puts other tensors in the state's place; and k may change."""
    fused, plain = pair(name, [1500, 70], 0.02)
    grads = [gradient("normal", plain.layout.numel, torch.float32, step) for step in range(5)]
    for grad in grads[:2]:
        assert_same(fused, plain, grad)
    fused.state = {key: {field: t.clone() for field, t in bag.items()} for key, bag in fused.state.items()}
    assert_same(fused, plain, grads[2])
    assert fallbacks(fused) == 2  # one a segment, in the first step
    denser = METHODS[name](0.05)
    fused.layout, plain.layout = (layout_of([1500, 70], denser) for _ in range(2))
    fused.compressor, plain.compressor = denser, specified(denser)
    for grad in grads[3:]:
        assert_same(fused, plain, grad)
    assert fallbacks(fused) == 4  # counted on


@pytest.mark.parametrize("name", ["topk", "dgc"])
def test_entries_close_together_settle(name):
    """All within an eighth of a factor of two: the threshold after a fallback must tell them apart."""
    fused, plain = pair(name, [3000], 0.02)
    for step in range(4):
        fused.residual.zero_()
        plain.residual.zero_()
        assert_same(fused, plain, 1 + 0.1 * gradient("normal", plain.layout.numel, torch.float32, step).cos())
    assert fallbacks(fused) == 1


@pytest.mark.parametrize("name", METHODS)
def test_nothing_to_send_from_no_launch(name):
    """A gradient that belongs to nobody."""
    layout = Layout.cut([], numel=5, scope="layer", density=0.5)
    sent = Worker(METHODS[name](0.5), layout, device=DEVICE).send(torch.ones(5, device=DEVICE))
    assert sent.indices.numel() == int(sent.count) == 0


def test_a_rescale_takes_the_threshold_along():
    fused, plain = pair("topk", [3000], 0.02)
    for step, size in enumerate([1.0, 1.0, 1024.0, 1024.0]):
        if step == 2:
            fused.compressor.rescale(fused.state, 1024.0)
            fused.residual *= 1024
            plain.residual *= 1024
        assert_same(fused, plain, gradient("normal", plain.layout.numel, torch.float32, step) * size)
    assert fallbacks(fused) == 1


def test_the_sample_is_even_and_new_in_every_step_no_launch():
    first, later, other = (
        dgc_sample(seed_of(3, name), step, 1000, 100_000, torch.device(DEVICE))
        for name, step in (("a", 0), ("a", 1), ("b", 0))
    )
    for one in (first, later, other):
        counts = torch.bincount(one, minlength=1000)
        assert counts.numel() == 1000
        assert 50 < counts.min() < counts.max() < 160  # 100 on average, ten their deviation
    for one, two in ((first, later), (first, other)):
        assert (one == two).double().mean() < 0.005
    assert torch.equal(dgc_sample(7, 1, 50, 50, torch.device("cpu")), torch.arange(50))
