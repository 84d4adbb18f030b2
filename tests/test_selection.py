"""What is special to each way of choosing entries; the laws that all share are in ``test_laws``."""

from __future__ import annotations

from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsync import DGCK, BlockRandomK, GaussianK, RandomK, TopK, TrimmedK
from sparsync.compressors import Compressor, Context
from sparsync.config.registry import make_compressor
from sparsync.kernels import KernelPath, Memory
from sparsync.kernels.accumulate import Rows, accumulate
from sparsync.kernels.gaussian.reference import search
from sparsync.layout import Layout, Span
from tests.methods import KINDS, SIZES, Worker, gradient, place

MILLIONS = 8_000_000
seeds = st.integers(0, 2**31)
sizes = st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)


def worker_of(compressor: Compressor, sizes: list[int], scope: str = "global", hole: int = 0) -> Worker:
    spans, numel = place(sizes, hole)
    density, capacity = compressor.density, compressor.capacity
    layout = Layout.cut(spans, numel=numel, scope=scope, density=density, capacity=capacity, name="all")
    return Worker(compressor, layout)


def rows_of(grad: Tensor) -> Rows:
    return accumulate(grad, Memory(torch.zeros_like(grad), torch.empty_like(grad)), [(0, grad.numel())])[0]


def sent_indices(one: Worker, grad: Tensor, **how: frozenset[str]) -> Tensor:
    sent = one.send(grad, **how)
    return sent.indices[: int(sent.count)]


def zero_inflated(numel: int, seed: int) -> Tensor:
    """Normal, but for nine entries in ten that are zero."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=rng) * (torch.rand(numel, generator=rng) < 0.1)


# ---- Gaussian-k -----------------------------------------------------------------------------------------------------


def big(kind: str) -> Tensor:
    rng = torch.Generator().manual_seed(5)
    if kind == "normal":
        return torch.randn(MILLIONS, generator=rng)
    return torch.empty(MILLIONS).exponential_(generator=rng) * (torch.rand(MILLIONS, generator=rng) - 0.5).sign()


@pytest.fixture(scope="module")
def draws() -> dict[str, tuple[Tensor, Rows]]:
    return {kind: (grad, rows_of(grad)) for kind in ("normal", "laplace") for grad in [big(kind)]}


@pytest.mark.parametrize(
    ("kind", "density", "two_sided", "trace"),
    [
        ("normal", 0.001, False, [2.02, 0.004, 20.6, 0.51]),
        ("normal", 0.001, True, [1.0]),
        ("laplace", 0.001, False, [12.6, 1.42, 0.05, 7.3]),
        ("laplace", 0.01, False, [3.7, 0.72]),
    ],
)
def test_gaussian_makes_the_masks_of_the_printed_algorithm(draws, kind, density, two_sided, trace):
    grad, rows = draws[kind]
    k = round(density * MILLIONS)
    found, counts = search(grad, rows, [(0, MILLIONS)], k, two_sided)
    assert len(counts) == len(trace)
    for count, expected in zip(counts, trace, strict=True):
        noise = 4 * (expected * k) ** 0.5  # of the draw; the expected counts are rounded, too
        assert abs(count - expected * k) <= noise + 0.03 * expected * k, (counts, trace)
    assert found.numel() == counts[-1]


@given(st.sampled_from(["normal", "heavy", "integers", "mostly zero"]), st.sampled_from([0.001, 0.02, 0.4]), seeds)
def test_gaussian_sends_the_last_mask(kind, density, seed):
    """Against the algorithm written out plainly, with mean and deviation from torch."""
    grad = gradient(kind, 10_007, torch.float64, seed)
    one = worker_of(GaussianK(density), [10_007])
    one.residual = one.residual.double()
    k = one.layout.k
    normal = torch.distributions.Normal(grad.mean(), grad.std(correction=0))
    threshold = normal.icdf(torch.tensor(1 - k / grad.numel(), dtype=torch.float64))
    for _ in range(4):
        mask = grad.abs() > threshold
        if mask.sum() < 2 * k / 3:
            threshold = 0.5 * threshold
        elif mask.sum() > 4 * k / 3:
            threshold = 1.5 * threshold
        else:
            break
    expected = mask.nonzero().squeeze(1)
    chosen = sent_indices(one, grad)
    if expected.numel() <= one.layout.capacity:
        assert torch.equal(chosen, expected)
    else:
        assert chosen.numel() == one.layout.capacity
        assert torch.isin(chosen, expected).all()


def test_gaussian_is_strict():
    """Entries exactly at the threshold are not above it: equal entries end with an empty mask, as printed."""
    ones = torch.ones(1000)
    _, counts = search(ones, rows_of(ones), [(0, 1000)], 10, False)
    assert counts == [0, 1000, 1000, 0]  # thresholds 1, 1/2, 3/4, 9/8


def test_gaussian_overflow_favours_no_index():
    """More than 8 k pass, of entries that come anew in each step: over the steps every region gets its share."""
    sent_from = torch.zeros(10)
    one = worker_of(GaussianK(0.002), [5000])
    for step in range(300):
        rng = torch.Generator().manual_seed(step)
        grad = torch.where(torch.rand(5000, generator=rng) < 0.04, 1.0, 0.0) * (2 + torch.rand(5000, generator=rng))
        one.residual.zero_()
        chosen = sent_indices(one, grad)
        assert chosen.numel() == one.layout.capacity == 80
        sent_from += torch.histc(chosen.float(), 10, 0, 5000)
    assert sent_from.min() > 0.8 * sent_from.mean()
    assert sent_from.max() < 1.2 * sent_from.mean()


@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.05])
@pytest.mark.parametrize("kind", ["normal", "heavy", "zero-inflated", "equal"])
def test_gaussian_refined_holds_the_count(kind, density, two_sided):
    one = worker_of(GaussianK(density, two_sided=two_sided, refine=True), [100_003])
    k = one.layout.k
    for step in range(8):
        match kind:
            case "zero-inflated":
                grad = zero_inflated(100_003, step)
            case "equal":
                grad = torch.full((100_003,), 0.25)
            case _:
                grad = gradient(kind, 100_003, torch.float32, step)
        u = one.residual + grad
        chosen = sent_indices(one, grad)
        assert 0.9 * k <= chosen.numel() <= ceil(1.1 * k)
        left = u.clone()
        left[chosen] = 0
        assert left.abs().max() <= u[chosen].abs().min()  # the largest, however many


# ---- DGC ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("kind", ["normal", "heavy", "zero-inflated", "integers"])
def test_dgc_holds_the_count(kind, density):
    one = worker_of(DGCK(density), [100_003])
    k, counts = one.layout.k, set()
    for step in range(20):
        grad = zero_inflated(100_003, step) if kind == "zero-inflated" else gradient(kind, 100_003, torch.float32, step)
        u = one.residual + grad
        chosen = sent_indices(one, grad)
        nonzero = int(u.count_nonzero())
        assert min(nonzero, 0.8 * k) <= chosen.numel() <= ceil(1.3 * k)
        left = u.clone()
        left[chosen] = 0
        assert left.abs().max() <= u[chosen].abs().min()
        counts.add(chosen.numel())
    if kind == "normal":
        assert len(counts) > 5  # a sample decides, anew in each step


def test_dgc_favours_no_index():
    """When more than 1.3 k pass, k of them are chosen: over the steps every region gets its share."""
    sent_from, cut = torch.zeros(10), 0
    for step in range(600):
        one = worker_of(DGCK(0.02, sample=0.001), [5000])  # from 100 entries the threshold is a poor guess
        one.step = step
        chosen = sent_indices(one, gradient("normal", 5000, torch.float32, step))
        if chosen.numel() == one.layout.k:
            cut += 1
            sent_from += torch.histc(chosen.float(), 10, 0, 5000)
    assert cut > 100
    assert sent_from.min() > 0.9 * sent_from.mean()
    assert sent_from.max() < 1.1 * sent_from.mean()


def test_dgc_samples_what_is_awake_and_nothing_else():
    """A sleeping parameter with a huge residual, and holes that hold NaN, must not raise the threshold."""
    one = worker_of(DGCK(0.05), [700, 3000, 900], hole=5)
    one.residual[705:3705] = 1e6
    one.residual[[700, 704, 3705, 3709, 4610]] = float("nan")
    for step in range(20):
        grad = gradient("normal", one.layout.numel, torch.float32, step)
        grad[705:3705] = 0
        chosen = sent_indices(one, grad, unused=frozenset({"p1"}))
        assert 0.8 * one.layout.k <= chosen.numel() <= one.layout.capacity


# ---- trimmed top-k --------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(KINDS), sizes, st.sampled_from([0.001, 0.02, 0.5, 0.9]), st.sampled_from(["layer", "global"]), seeds
)
def test_trimmed_is_exact_top_k(kind, sizes, density, scope, seed):
    """The same entries as TopK, among equals too; a zero tensor ends with nothing sent."""
    grad = gradient(kind, sum(sizes) + 2 * len(sizes), torch.float32, seed)
    trimmed, exact = (worker_of(kind(density), sizes, scope, hole=2) for kind in (TrimmedK, TopK))
    for _ in range(3):
        assert torch.equal(sent_indices(trimmed, grad), sent_indices(exact, grad))


@pytest.mark.parametrize("constant", [0.0, 0.1, -3e38])
def test_trimmed_copes_with_constants(constant):
    """All magnitudes equal the mean, or nearly so after rounding; the sum of huge ones is infinite."""
    one = worker_of(TrimmedK(0.01), [10_007])
    chosen = sent_indices(one, torch.full((10_007,), constant))
    assert chosen.numel() == (one.layout.k if constant else 0)


# ---- all of them ----------------------------------------------------------------------------------------------------

METHODS = {
    "gaussian": GaussianK(0.01),
    "gaussian two-sided": GaussianK(0.01, two_sided=True),
    "gaussian refined": GaussianK(0.01, refine=True),
    "dgc": DGCK(0.01),
    "trimmed": TrimmedK(0.01),
    "random": RandomK(0.01),
    "block": BlockRandomK(0.01),
}
methods = pytest.mark.parametrize("compressor", METHODS.values(), ids=METHODS)


@methods
def test_the_global_random_state_is_neither_read_nor_changed(compressor):
    grad = gradient("normal", 10_007, torch.float32, 0)
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        one = worker_of(compressor, [10_007])
        runs.append(torch.cat([sent_indices(one, grad) for _ in range(5)]))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*runs)


@methods
def test_two_models_share_nothing(compressor):
    """Step by step in turns, one compressor for both: each sends what it sends alone."""

    def steps(one: Worker, seed: int):
        for step in range(6):
            yield sent_indices(one, gradient("heavy", 10_007, torch.float32, seed + step))

    alone = [list(steps(worker_of(compressor, [10_007]), seed)) for seed in (0, 100)]
    turns = zip(*(steps(worker_of(compressor, [10_007]), seed) for seed in (0, 100)), strict=True)
    for step, both in enumerate(turns):
        assert all(torch.equal(chosen, alone[model][step]) for model, chosen in enumerate(both))


@methods
@given(st.sampled_from(KINDS), sizes, seeds)
def test_options_lose_nothing(compressor, kind, sizes, seed):
    one = worker_of(compressor, sizes, "layer")
    for step in range(3):
        grad, before = gradient(kind, one.layout.numel, torch.float32, seed + step), one.residual.clone()
        sent = one.send(grad)
        assert torch.equal(sent.densify() + one.residual, before + grad)
        assert int(sent.count) <= one.layout.capacity


@pytest.mark.parametrize(("name", "kind"), [("gaussian", GaussianK), ("dgc", DGCK), ("trimmed", TrimmedK)])
def test_known_by_name(name, kind):
    assert make_compressor(name) == kind()


@pytest.mark.parametrize("kind", [GaussianK, DGCK, TrimmedK])
@pytest.mark.parametrize("density", [0, -0.1, 1.5, float("nan"), "many"])
def test_a_wrong_density_is_named(kind, density):
    with pytest.raises(ValueError, match=rf"density must be above 0 and at most 1, got {density!r}"):
        kind(density)


@pytest.mark.parametrize("sample", [0, -1, 1.01, float("nan"), "1 %"])
def test_a_wrong_sample_is_named(sample):
    with pytest.raises(ValueError, match=rf"sample must be above 0 and at most 1, got {sample!r}"):
        DGCK(0.01, sample)


def test_other_words_for_refine_and_masks_are_refused():
    with pytest.raises(ValueError, match="refine must be False, True or 'carried', got 'once'"):
        GaussianK(0.01, refine="once")
    for masks in (2, 5, "all"):
        with pytest.raises(ValueError, match=rf"masks must be 3 or 4, got {masks!r}"):
            GaussianK(0.01, masks=masks)


def test_kernels_do_not_stand_for_a_choice_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class derived from ours that chooses other entries does so on a GPU, too."""
    monkeypatch.setattr("sparsync.kernels.path.usable_on", lambda device: True)
    layout = Layout.cut([Span("a", 0, 1000)], numel=1000, scope="layer", density=0.01)
    grad, own = torch.randn(1000), type("First", (TopK,), {"choose": lambda *_: torch.arange(10)})
    paths = [kind(0.01).path(grad, Memory(grad, grad), layout, Context()) for kind in (TopK, own)]
    assert paths[0] is KernelPath.TRITON
    assert paths[1] is not KernelPath.TRITON
