"""The laws on virtual workers, in one process: every compressor, scope, dtype, value codec and odd size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync.feedback.residual import Correction
from sparsync.kernels.threshold.reference import magnitude, room_for
from sparsync.sparse import NONFINITE
from sparsync.wire import Wire
from tests.methods import COLLECTIVES, DTYPES, KINDS, PAIRS, SIZES, SPARSE, Worker, gradient, worker

seeds = st.integers(0, 2**31)
sizes = st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)
few_sizes = st.lists(st.sampled_from((*SIZES[:-1], 5_003, 9_973, SIZES[-1])), min_size=1, max_size=2)  # of many workers
densities = st.sampled_from([0.001, 0.01, 0.3, 1.0])
kinds = st.lists(st.sampled_from(KINDS), min_size=2, max_size=4)

methods = pytest.mark.parametrize("name", SPARSE)
scopes = st.sampled_from(["layer", "bucket", "global"])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def over(pairs):
    return pytest.mark.parametrize(("name", "collective", "codecs"), pairs, ids=[f"{p[0]}-{p[1]}" for p in pairs])


pairs = over(PAIRS)
whole_pairs = over([pair for pair in PAIRS if pair[1] != "every other"])  # that one never sends everything


def covered(one: Worker) -> torch.Tensor:
    mask = torch.zeros(one.layout.numel, dtype=torch.bool)
    for span in one.layout.spans:
        mask[span.start : span.stop] = True
    return mask


@methods
@pytest.mark.parametrize("values", ["fp16", "bf16", "sign", "levels"])
@pytest.mark.parametrize("size", [1e5, 1e9, 1e13, 1e37])
def test_law_1_beyond_the_range_of_the_wire(name, values, size):
    """No mass comes from nowhere, even where a gradient's last bit is larger than all that fp16 can carry."""
    one = worker(name, [1023], density=0.1, values=values)
    grad = size * gradient("normal", 1023, torch.float32, 1)
    sent = torch.zeros(1023, dtype=torch.float64)
    for _ in range(6):
        before = one.residual.double()
        now = one.send(grad).densify().double()
        sent += now
        assert torch.equal(now + one.residual.double(), before + grad.double())  # without any rounding
        grad = torch.zeros_like(grad)
    if values != "fp16":
        assert sent.any()


@methods
@dtypes
@given(
    scopes, sizes, densities, kinds, st.sampled_from(["fp32", "fp16", "bf16", "sign", "levels"]), st.booleans(), seeds
)
def test_law_1_nothing_is_lost_on_one_worker(name, dtype, scope, sizes, density, kinds, values, undoable, seed):
    one = worker(name, sizes, scope=scope, density=density, dtype=dtype, values=values, hole=3, transactional=undoable)
    mine = covered(one)
    for i, kind in enumerate(kinds):
        grad, before = gradient(kind, one.layout.numel, dtype, seed + i), one.residual.clone()
        sent = one.send(grad)
        count = int(sent.count)
        came_in = torch.where(mine, before + grad, before)
        assert torch.equal(sent.densify() + one.residual, came_in)
        assert count <= one.layout.capacity
        assert sent.indices[:count].unique().numel() == count
        assert mine[sent.indices[:count]].all()
        assert sent.values[:count].all()
        assert not sent.values[count:].any()


@methods
@given(
    scopes,
    sizes,
    kinds,
    st.sampled_from(["fp32", "bf16", "sign", "levels"]),
    st.sampled_from([0.0, 0.5, 0.9]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 0.7]),
    seeds,
)
def test_law_1_under_momentum_correction_and_clipping(
    name, scope, sizes, kinds, values, beta, masking, undoable, clip, seed
):
    one = worker(
        name,
        sizes,
        scope=scope,
        density=0.05,
        values=values,
        hole=3,
        transactional=undoable,
        correction=Correction(beta, masking),
        clip=clip,
    )
    mine = covered(one)
    for i, kind in enumerate(kinds):
        grad = gradient(kind, one.layout.numel, torch.float32, seed + i)
        before, velocity = one.residual.clone(), one.velocity.clone()
        sent = one.send(grad)
        faster = torch.where(mine, velocity, 0)
        for segment in one.layout.segments:
            own = torch.cat([grad[a:b] for a, b in segment.runs()])
            norm = own.double().norm().item()
            scale = clip / norm if clip and norm > clip else 1.0
            for a, b in segment.runs():
                faster[a:b] = velocity[a:b] * beta + grad[a:b] * scale
        close = {"rtol": 1e-6, "atol": 1e-12} if clip else {"rtol": 0, "atol": 0}  # its norm is summed in another order
        torch.testing.assert_close(sent.densify() + one.residual, torch.where(mine, before + faster, before), **close)
        went = sent.densify() != 0
        cleared = went & masking if not one.compressor.dense else torch.zeros_like(went)
        torch.testing.assert_close(one.velocity, torch.where(cleared, 0, faster), **close)


@pairs
@given(st.integers(1, 9), few_sizes, densities, st.sampled_from(KINDS), st.data())
def test_law_1_nothing_is_lost_over_the_workers(name, collective, codecs, workers, sizes, density, kind, data):
    values = data.draw(st.sampled_from(codecs))
    seed = data.draw(seeds)
    shared = COLLECTIVES[collective].shared
    ranks = [
        worker(name, sizes, scope="layer", density=density, values=values, shared=shared, rank=r)
        for r in range(workers)
    ]
    layout = ranks[0].layout
    for step in range(2):
        before = torch.stack([one.residual.double() for one in ranks])
        grads = [gradient(kind, layout.numel, torch.float32, seed + 100 * step + r) for r in range(workers)]
        sents = [one.send(grad) for one, grad in zip(ranks, grads, strict=True)]
        # Read before the exchange, which may overwrite what is sent.
        size = sum(sent.densify().double().abs() for sent in sents)
        results = []
        for one, reduced in zip(ranks, COLLECTIVES[collective].reduce_local(sents, layout, Wire(values)), strict=True):
            out = torch.full((layout.numel,), float("nan"))
            reduced.mean.write(out)
            if reduced.rejected is not None:
                reduced.rejected.add_to(one.residual)
            results.append(out)
        assert all(torch.equal(result, results[0]) for result in results)
        came_in = before.sum(0) + sum(grad.double() for grad in grads)
        kept = torch.stack([one.residual.double() for one in ranks])
        applied = results[0].double() * workers
        # One rounding where the gradient met the residual, then one sum and one division: in fp32, or as the backend
        # sums what travels as bf16.
        eps = torch.finfo(torch.float32).eps
        backend = values == "bf16" and collective in ("dense", "shared")
        coarse, least = (torch.finfo(torch.bfloat16).eps, 2.0**-132) if backend else (eps, 2.0**-140)
        scale = before.abs().sum(0) + sum(grad.double().abs() for grad in grads)
        slack = eps * scale + 2 * workers * coarse * size + workers * least
        assert ((applied + kept.sum(0) - came_in).abs() <= slack).all()


@pairs
@given(sizes, densities, st.sampled_from(KINDS), st.data())
def test_law_1_one_worker_alone_applies_and_keeps_what_came_in(name, collective, codecs, sizes, density, kind, data):
    """Bit for bit, through every collective: nothing is summed, so nothing is rounded that was not kept."""
    values, seed = data.draw(st.sampled_from(codecs)), data.draw(seeds)
    one = worker(name, sizes, density=density, values=values, shared=COLLECTIVES[collective].shared)
    for step in range(3):
        grad, before = gradient(kind, one.layout.numel, torch.float32, seed + step), one.residual.clone()
        (reduced,) = COLLECTIVES[collective].reduce_local([one.send(grad)], one.layout, Wire(values))
        applied = torch.full((one.layout.numel,), float("nan"))
        reduced.mean.write(applied)
        if reduced.rejected is not None:
            reduced.rejected.add_to(one.residual)
        assert torch.equal(applied + one.residual, before + grad)


@whole_pairs
@given(st.integers(1, 9), few_sizes, seeds)
def test_law_3_density_1_is_dense(name, collective, codecs, workers, sizes, seed):
    shared = COLLECTIVES[collective].shared
    ranks = [worker(name, sizes, density=1.0, shared=shared, rank=r) for r in range(workers)]
    grads = [gradient("normal", ranks[0].layout.numel, torch.float32, seed + r) for r in range(workers)]
    sents = [one.send(grad) for one, grad in zip(ranks, grads, strict=True)]
    reduced = COLLECTIVES[collective].reduce_local(sents, ranks[0].layout, Wire())[0]
    out = torch.empty(ranks[0].layout.numel)
    reduced.mean.write(out)
    dense = sum(grad / workers for grad in grads)
    if workers <= 2:
        assert torch.equal(out, dense)
    bound = 4 * workers * torch.finfo(torch.float32).eps * sum(grad.abs() for grad in grads)
    assert ((out - dense).abs() <= bound).all()
    assert not any(one.residual.any() for one in ranks)


@methods
@dtypes
@given(scopes, st.sampled_from([float("nan"), float("inf"), -float("inf")]), st.data())
def test_law_5_a_bad_gradient_never_enters_the_residual(name, dtype, scope, bad, data):
    one = worker(name, [63, 1023], scope=scope, density=0.05, dtype=dtype)
    seed = data.draw(seeds)
    one.send(gradient("normal", one.layout.numel, dtype, seed))
    grad, before = gradient("normal", one.layout.numel, dtype, seed + 1), one.residual.clone()
    where = data.draw(st.sets(st.integers(0, one.layout.numel - 1), min_size=1, max_size=5))
    grad[list(where)] = bad
    sent = one.send(grad)
    assert int(sent.flags) & NONFINITE
    assert int(sent.where) == (0 if min(where) < 63 else 1)
    finite = torch.where(torch.isfinite(before + grad), before + grad, before)
    assert torch.equal(sent.densify() + one.residual, finite)
    assert not int(one.send(gradient("normal", one.layout.numel, dtype, seed + 2)).flags)


@methods
@given(st.data())
def test_what_sleeps_is_not_sent(name, data):
    one = worker(name, [63, 1023, 200], scope=data.draw(st.sampled_from(["layer", "global"])), density=0.05)
    one.send(gradient("normal", one.layout.numel, torch.float32, 1))
    grad, before = gradient("normal", one.layout.numel, torch.float32, 2), one.residual.clone()
    grad[63 : 63 + 1023] = 0
    one.transactional = data.draw(st.booleans())
    sent = one.send(grad, unused=frozenset({"p1"}))
    assert torch.equal(one.residual[63 : 63 + 1023], before[63 : 63 + 1023])
    assert torch.equal(sent.densify() + one.residual, before + grad)
    assert int(sent.count) > 0


@methods
@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "sign", "levels"])
def test_rounding_keeps_hardly_anything_from_being_sent(name, values):
    """What is cut off stays; the entry itself goes."""
    one = worker(name, [100_003], density=0.01, values=values)
    one.send(gradient("normal", 100_003, torch.float32, 0))
    sent = one.send(gradient("normal", 100_003, torch.float32, 1))
    exact = worker(name, [100_003], density=0.01)
    exact.send(gradient("normal", 100_003, torch.float32, 0))
    wanted = exact.send(gradient("normal", 100_003, torch.float32, 1))
    blind = name in ("odd", "random", "block", "round robin")
    least = 0.5 if blind and values in ("sign", "levels") else 0.95  # small entries wait until their sign is worth it
    assert int(sent.count) >= least * int(wanted.count)


@dtypes
@given(scopes, st.sampled_from(KINDS), sizes, seeds, st.sampled_from([0.001, 0.02, 0.5]))
def test_topk_is_torch_topk(dtype, scope, kind, sizes, seed, density):
    one = worker("topk", sizes, scope=scope, density=density, dtype=dtype, hole=2)
    grad = gradient(kind, one.layout.numel, dtype, seed)
    sent = one.send(grad)
    start = 0
    for segment in one.layout.segments:
        size = torch.cat([grad[s.start : s.stop] for s in segment.spans]).abs().to(sent.values.dtype)
        best = torch.topk(size, segment.k).values
        best = best[best > 0]
        ours = sent.values[start : start + best.numel()].abs()
        assert torch.equal(ours.sort().values, best.sort().values)
        start += best.numel()
    assert start == int(sent.count)


@pytest.mark.parametrize("kind", ["normal", "heavy", "same every step", "drifting"])
@pytest.mark.parametrize("density", [0.001, 0.01])
def test_threshold_holds_the_count_near_k(kind, density):
    one = worker("threshold", [100_003], density=density)
    always = gradient("normal", 100_003, torch.float32, 999)
    counts, shares, candidates = [], [], []
    for step in range(120):
        grad = gradient("heavy" if kind == "heavy" else "normal", 100_003, torch.float32, step)
        grad = {"same every step": always, "drifting": 0.3 * always + grad}.get(kind, grad)
        grad = 0.1 * grad if step >= 80 else grad  # it shrinks at once
        size = (one.residual + grad).abs()
        (carried,) = one.state.values()
        candidates.append(int((size >= magnitude(int(carried["floor"]))).sum()))
        sent = one.send(grad)
        counts.append(int(sent.count) / one.layout.k)
        best = torch.topk(size, int(sent.count)).values.square().sum()
        shares.append((sent.values.square().sum() / best).item() if best else 1.0)
    for settled in (counts[20:80], counts[90:]):
        assert 0.9 < sum(settled) / len(settled) < 1.14, settled
        assert min(settled) > 0.5, settled
    for settled in (candidates[20:80], candidates[90:]):  # above the threshold that is carried over
        assert one.layout.k <= min(settled), settled
        assert max(settled) <= room_for(one.layout.k), settled
    assert sum(shares[20:]) / 100 > 0.9, shares  # of the energy that exact selection of as many would have sent


def test_threshold_follows_a_changed_k():
    """Density warm-up: the count is right in the very step in which k changes."""
    one = worker("threshold", [100_003], density=0.05)
    for step in range(30):
        one.send(gradient("normal", 100_003, torch.float32, step))
    later = worker("threshold", [100_003], density=0.01)
    later.residual, later.state = one.residual, one.state
    sent = later.send(gradient("normal", 100_003, torch.float32, 31))
    assert 0.7 < int(sent.count) / later.layout.k < 1.3


def test_threshold_overflow_favours_no_index():
    """The gradient jumps, far more entries pass than fit: over the steps every region gets its share."""
    sent_from = torch.zeros(10)
    for step in range(400):
        one = worker("threshold", [1000], density=0.05)
        one.step = step
        one.send(gradient("normal", 1000, torch.float32, step))
        grad = 1e5 * gradient("normal", 1000, torch.float32, 1000 + step)
        sent = one.send(grad)
        assert int(sent.count) == one.layout.capacity
        assert (one.residual.abs() > 20).sum() > 500  # what did not fit stays
        sent_from += torch.histc(sent.indices.float(), 10, 0, 1000)
    assert sent_from.min() > 0.8 * sent_from.mean()
    assert sent_from.max() < 1.2 * sent_from.mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(st.sampled_from(KINDS), seeds, st.booleans())
def test_laws_1_and_5_without_compression(dtype, kind, seed, undoable):
    """bf16 on the wire: the rounding error is kept, what sleeps or is not finite stays out."""
    one = worker("none", [63, 1023], dtype=dtype, values="bf16", transactional=undoable)
    for step in range(3):
        grad, before = gradient(kind, one.layout.numel, dtype, seed + step), one.residual.clone()
        unused = frozenset({"p1"} if step == 1 else ())
        if unused:
            grad[63:] = 0
        if step == 2:
            grad[5] = float("inf")
        sent = one.send(grad, unused)
        finite = torch.where(torch.isfinite(grad), before + grad, before)
        assert torch.equal(sent.densify() + one.residual, finite)
        assert bool(int(sent.flags) & NONFINITE) == (step == 2)
        if unused:
            assert not sent.values[63:].any()
