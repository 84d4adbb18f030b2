"""The kernels of threshold-k against the specification: the same entries, residuals, velocities and thresholds."""

from __future__ import annotations

import pytest
import torch

from sparsync import ThresholdK
from sparsync.feedback.residual import Correction
from sparsync.kernels import strips
from sparsync.kernels.candidates.launch import CandidateLists
from sparsync.kernels.threshold import launch
from sparsync.kernels.threshold import reference as threshold
from sparsync.kernels.topk import reference
from sparsync.wire import CODECS
from tests.methods import gradient
from tests.pairs import DEVICE, MARKS, assert_nothing_is_lost, assert_told, compare, entries, fading, pair_of

pytestmark = MARKS
SIZES = {
    "one": [1],
    "small": [63],
    "odd": [1023, 1, 2, 5000],
    "aligned": [4096, 1024],
    "many": [257] * 9,
    "large": [12_003, 129],
}


def pair(sizes, density, **options):
    return pair_of(ThresholdK(density), sizes, **options)


CUTS: list[torch.Tensor] = []  # entries that share a bin, where not all of them could go


def assert_same(fused, plain, grad):
    CUTS.clear()
    one, two = fused.send(grad.to(DEVICE)), plain.send(grad)
    if CUTS:  # which of them go is left open, how many is not
        ours, theirs = set(entries(one)[0].tolist()), set(entries(two)[0].tolist())
        # Their mean is the scale of signs, so that decides which of the others go, too.
        assert fused.values in ("sign", "levels") or ours ^ theirs <= set(torch.cat(CUTS).tolist())
        assert len(ours) == len(theirs) or fused.values != "fp32"  # some may have no exact rounding
        plain.residual.copy_(fused.residual.cpu())
        plain.velocity.copy_(fused.velocity.cpu())
        return one
    compare(fused, plain, one, two)
    assert {n: {f: int(t) for f, t in bag.items()} for n, bag in fused.state.items()} == {
        n: {f: int(t) for f, t in bag.items()} for n, bag in plain.state.items()
    }
    return one


@pytest.fixture(autouse=True)
def only_fused(monkeypatch):
    """Count the fused launches; a test that never made one proves nothing."""
    launches = []

    def cut(found, capacity, step):
        CUTS.extend([found] * (found.numel() > capacity))
        return reference.limit(found, capacity, step)

    monkeypatch.setattr(threshold, "limit", cut)
    real = launch.collect
    monkeypatch.setattr(launch, "collect", lambda *a: launches.append(1) or real(*a))
    yield
    assert launches


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("kind", "scope"), [("normal", "layer"), ("heavy", "global"), ("mostly zero", "layer"), ("zero", "global")]
)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_same_entries_step_after_step(sizes, kind, scope):
    fused, plain = pair(sizes, 0.02, scope=scope)
    for step in range(3):  # the first tells where magnitudes are: before that, which of many go is left open
        assert_same(
            fused,
            plain,
            gradient(kind if step or kind == "heavy" else "normal", plain.layout.numel, torch.float32, step),
        )


@pytest.mark.parametrize(("scope", "kind"), [("layer", "normal"), ("global", "heavy")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_programs_of_several_blocks(scope, kind, dtype, monkeypatch):
    """As a large gradient is cut: whole strips and their ends, and a thread that finds several entries."""
    monkeypatch.setattr(strips, "SMALL", 0)
    fused, plain = pair([17_000, 300], 0.2, scope=scope, dtype=dtype)
    for step in range(3):
        grad = gradient(kind, plain.layout.numel, dtype, step)
        grad[[9000 + 3500 * step, 16_999]] = float("nan")
        sent = assert_same(fused, plain, grad)
        assert int(sent.where) == 0
    assert fused.workspace.find(CandidateLists).blocks > 1
    assert int(sent.count) > 2000


@pytest.mark.each_value
@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "sign", "levels"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_half_precision(dtype, values):
    for kind in ("heavy", "huge"):
        fused, plain = pair([3000, 700], 0.01, dtype=dtype, values=values)
        for step in range(2):
            assert_same(fused, plain, gradient(kind, plain.layout.numel, dtype, step) * 0.5**step)


@pytest.mark.parametrize(  # every pair
    ("clip", "masking", "undoable"), [(None, False, False), (None, True, True), (0.5, False, True), (0.5, True, False)]
)
def test_momentum_and_clipping(clip, masking, undoable):
    options = {"correction": Correction(0.7, masking), "clip": clip, "transactional": undoable}
    fused, plain = pair([3000, 129], 0.02, **options)
    for grad in fading(plain.layout, 4):
        assert_same(fused, plain, grad)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_out_and_is_told(odd):
    fused, plain = pair([2000, 500, 900], 0.02, correction=Correction(0.5, True))
    for step, grad in enumerate(fading(plain.layout, 3)):
        if step == 1:
            grad[[2100, 2600]] = odd
        assert_told(fused, assert_same(fused, plain, grad), (1, 2) if step == 1 else ())


def test_density_1_sends_everything():
    fused, plain = pair([1000, 70], 1.0)
    for grad in fading(plain.layout, 3):
        assert_same(fused, plain, grad)


@pytest.mark.parametrize("kind", ["integers", "equal", "jump"])
def test_law_1_when_candidates_overflow(kind):
    """Ties and jumps: which entries go is left open; how many at most, and that none is lost, is not."""
    fused, plain = pair([30_000, 5000], 0.001)
    for step in range(5):
        grad = gradient("integers" if kind == "integers" else "normal", plain.layout.numel, torch.float32, step)
        grad = torch.ones_like(grad) if kind == "equal" else grad
        grad = grad * 1e4**step if kind == "jump" else grad
        assert_nothing_is_lost(fused, grad)


def test_state_that_was_replaced_is_taken_over():
    """A checkpoint, or a step that was undone, puts other tensors in the state's place."""
    fused, plain = pair([5000, 700], 0.02)
    for grad in fading(plain.layout, 3):
        assert_same(fused, plain, grad)
    fused.state = {name: {key: t.clone() for key, t in bag.items()} for name, bag in fused.state.items()}
    for step in range(3, 6):
        assert_same(fused, plain, gradient("normal", plain.layout.numel, torch.float32, step) * 0.5**step)


def test_the_codecs_of_the_kernels_round_as_those_of_the_wire():
    """Entries at the ends of half precision's range."""
    edge = torch.tensor([65504.0, 65505.0, 7e4, -1e6, 3.38e38, -3.4e38, 1e-8, 6e-8, 1.0, 1.0009765625])
    for values in ("fp16", "bf16"):
        fused, plain = pair([edge.numel()], 1.0, values=values, hole=0)
        assert_same(fused, plain, edge)
        assert CODECS[values].round is not None
