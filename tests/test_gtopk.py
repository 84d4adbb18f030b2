"""gTop-k's tree: a merge is the plain sum of two messages cut to size, and never looks at what it merges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsync.collectives import GTopK
from sparsync.collectives.gtopk import merge
from sparsync.compressors.base import flag
from sparsync.layout import Layout, Segment, Span
from sparsync.sparse import NONFINITE, SparseGrad
from sparsync.wire import Wire
from tests.methods import worker

Entries = dict[int, float]

# Two entries before, between and behind the parameters belong to nobody; the first and the third share a budget.
SPANS = [Span(name, start, 12) for name, start in (("a", 2), ("b", 16), ("c", 30))]
NUMEL = 44
LAYOUTS = {
    "one segment": Layout.cut(SPANS, numel=NUMEL, scope="global", density=0.1),
    "layers": Layout.cut(SPANS[::-1], numel=NUMEL, scope="layer", density=0.2, capacity=lambda k, n: 3 * k),
    "interleaved": Layout(0, NUMEL, (Segment("ac", (SPANS[0], SPANS[2]), 3, 6), Segment("b", (SPANS[1],), 12, 12))),
}
OURS = [index for span in SPANS for index in range(span.start, span.stop)]
# Small integers make ties and sums of 0; two of the largest overflow; the last has no exact fp16 or bf16.
NUMBERS = [-2.0, -1.0, 1.0, 2.0, 3e38, -3e38, math.inf, math.nan, 1 / 3, 1e-9]


@st.composite
def messages(draw, layout: Layout) -> SparseGrad:
    """Up to as many entries as there is room for, with padding anywhere."""
    indices = draw(st.lists(st.sampled_from(OURS), unique=True, max_size=layout.capacity))
    entries = [(index, draw(st.sampled_from(NUMBERS))) for index in indices]
    padded = draw(st.permutations(entries + [(0, 0.0)] * (layout.capacity - len(entries))))
    where = draw(st.integers(-1, 2))
    words = torch.tensor([NONFINITE if where >= 0 else 0, where], dtype=torch.int32)
    return SparseGrad(
        torch.tensor([index for index, _ in padded]),
        torch.tensor([value for _, value in padded], dtype=torch.float32),
        torch.tensor(len(entries)),
        NUMEL,
        words[0],
        words[1],
    )


def single(number: float) -> float:
    """In single precision."""
    return torch.tensor(number, dtype=torch.float32).item()


def slow_merge(ours: SparseGrad, theirs: SparseGrad, layout: Layout, wire: Wire) -> tuple[Entries, Entries]:
    """What goes on and what is left, entry by entry."""
    sums: Entries = {}
    for grad in (ours, theirs):
        for index, value in zip(grad.indices.tolist(), grad.values.tolist(), strict=True):
            if value != 0:
                sums[index] = single(sums.get(index, 0.0) + value)
    goes: Entries = {}
    for segment in layout.segments:
        own = [index for span in segment.spans for index in range(span.start, span.stop) if index in sums]
        size = {index: math.inf if math.isnan(sums[index]) else abs(sums[index]) for index in own}
        own.sort(key=lambda index: (not math.isnan(sums[index]), -size[index], index))
        own = sorted(own[: segment.k])
        own = [index for index in own if sums[index] != 0]  # a mean of magnitudes shall not count them
        travel = torch.tensor([sums[index] for index in own])
        if wire.codec.round is not None and own:  # signs have a scale for all of them
            finite = torch.where(travel.isfinite(), travel, 0)
            rounded = wire.codec.round(finite, torch.zeros(len(own), dtype=torch.int64), 1)
            travel = torch.where(travel.isfinite(), rounded, travel)
        goes |= {index: value for index, value in zip(own, travel.tolist(), strict=True) if value != 0}
    left = {i: single(value - goes.get(i, 0.0)) if math.isfinite(value) else 0.0 for i, value in sums.items()}
    return goes, left


def dense(entries: Entries) -> Tensor:
    out = torch.zeros(NUMEL)
    for index, value in entries.items():
        out[index] = value
    return out


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "sign", "levels"])
@pytest.mark.parametrize("name", LAYOUTS)
@given(data=st.data())
def test_a_merge_is_the_slow_one(name, values, data):
    layout, wire = LAYOUTS[name], Wire(values)
    pairs = data.draw(st.lists(st.tuples(messages(layout), messages(layout)), min_size=1, max_size=3))
    for (ours, theirs), (total, lost) in zip(pairs, merge(pairs, layout, wire), strict=True):
        goes, left = slow_merge(ours, theirs, layout, wire)
        number = int(total.count)
        assert total.indices.shape == total.values.shape == (layout.capacity,)
        assert total.indices[:number].tolist() == sorted(goes)
        assert same(total.values[:number], dense(goes)[total.indices[:number]])
        assert not total.indices[number:].any()
        assert not total.values[number:].any()
        assert lost.indices.shape == lost.values.shape == (2 * layout.capacity,)
        assert same(lost.densify(), dense(left))
        assert int(total.flags) == int(ours.flags) | int(theirs.flags)
        assert int(total.where) == (int(ours.where) if int(ours.where) >= 0 else int(theirs.where))


@pytest.mark.parametrize("values", ["fp32", "bf16", "sign", "levels"])
def test_sums_that_cancel_neither_travel_nor_make_the_others_smaller(values):
    layout, words = LAYOUTS["interleaved"], flag(-1, LAYOUTS["interleaved"], torch.device("cpu"))
    indices = torch.arange(16, 16 + 12)
    own = torch.cat([indices, torch.zeros(layout.capacity - 12, dtype=torch.int64)])
    ours, theirs = (torch.zeros(layout.capacity).index_fill_(0, torch.arange(12), sign) for sign in (1.0, -1.0))
    theirs[3] = 1.0
    sents = [SparseGrad(own, sent, torch.tensor(12), NUMEL, *words) for sent in (ours, theirs)]
    ((total, lost),) = merge([(sents[0], sents[1])], layout, Wire(values))
    assert (int(total.count), int(total.indices[0]), float(total.values[0])) == (1, 19, 2.0)
    assert not lost.values.any()


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 9])
@given(data=st.data())
def test_a_tree_is_one_merge_after_another(workers, data):
    layout, wire = LAYOUTS["layers"], Wire("bf16")
    sents = [data.draw(messages(layout)) for _ in range(workers)]
    results = GTopK().reduce_local(sents, layout, wire)
    partial, left = list(sents), [torch.zeros(NUMEL) for _ in sents]
    reach = 1
    while reach < workers:
        for rank in range(0, workers - reach, 2 * reach):
            ((partial[rank], lost),) = merge([(partial[rank], partial[rank + reach])], layout, wire)
            lost.add_to(left[rank])
        reach *= 2
    for rank, result in enumerate(results):
        (total,) = result.mean.terms
        assert torch.equal(total.indices, partial[0].indices)
        assert same(total.values, partial[0].values)
        home = torch.zeros(NUMEL) if result.rejected is None else result.rejected.densify()
        assert same(home, left[rank])


@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "sign", "levels"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tree_waits_for_nothing(name, values):
    """A tensor without data can be neither read by the host nor decide over shapes."""
    layout, words = LAYOUTS[name], flag(-1, LAYOUTS[name], torch.device("cpu"))
    indices = torch.zeros(layout.capacity, dtype=torch.int64, device="meta")
    sent = SparseGrad(indices, indices.float(), indices.sum(), NUMEL, *words)
    results = GTopK().reduce_local([sent] * 5, layout, Wire(values))
    assert [0 if result.rejected is None else len(result.rejected.values) for result in results] == [3, 0, 1, 0, 0]


@pytest.mark.parametrize("workers", range(1, 17))
def test_messages_are_as_many_bytes_as_traffic_says(workers: int) -> None:
    """Mean and maximum over the workers, exactly: virtual workers compare them."""
    for k in (1, 2, 3, 7, 50):
        layout = Layout.cut([Span("a", 0, 100)], numel=100, scope="layer", density=k / 100)
        sent = worker("topk", [100], density=k / 100).send(torch.randn(100))
        sizes = GTopK().encoded_bytes([sent] * workers, layout, Wire())
        traffic = GTopK().traffic(layout, Wire(), workers)
        assert (sum(sizes) / workers, max(sizes)) == (traffic.mean_bytes, traffic.max_bytes)
