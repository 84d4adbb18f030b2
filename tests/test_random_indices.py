"""What the random kinds draw: distinct entries, all equally likely, from the key alone; and how they draw it."""

from __future__ import annotations

import zlib
from collections import Counter
from itertools import combinations
from math import comb, isqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sparsync import BlockRandomK, RandomK
from sparsync.compressors import Context
from sparsync.compressors.base import flag
from sparsync.compressors.random import SpanTable, key_of
from sparsync.compressors.selecting import send_chosen
from sparsync.kernels import Memory, Velocity
from sparsync.kernels.accumulate import accumulate, accumulate_flat
from sparsync.kernels.random_indices.reference import TURNS, RandomIndices
from sparsync.kernels.rng import MASK_32, STRIDE, scramble
from sparsync.layout import Layout, Segment, Span
from sparsync.wire import CODECS
from sparsync.workspace import Workspace
from tests.methods import gradient, place, worker

CPU = torch.device("cpu")
NOBODY = frozenset()
keys = st.integers(0, MASK_32)
kinds = pytest.mark.parametrize("kind", [RandomK, BlockRandomK], ids=["random", "block"])
# What asks the device how much there is, or what it holds.
WAITS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "equal", "index.Tensor")


class Calls(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[str(func).removeprefix("aten.")] += 1
        return func(*args, **kwargs or {})

    @property
    def waits(self):
        return [name for name in self.names if any(name.startswith(wait) for wait in WAITS)]


def equal_segments(size, k, many):
    """``many`` segments of ``size`` entries, that want ``k`` each."""
    spans = [Span(f"{i}", i * size, size) for i in range(many)]
    return Layout(0, many * size, tuple(Segment(span.name, (span,), k, k) for span in spans))


def plainly(name, size, k, key, scattered):
    """One segment's positions, one after another, by Python's integers, which have no largest."""
    base = zlib.crc32(name.encode())

    def word(number):
        salt = scramble((scramble((number * STRIDE + base) & MASK_32) + base + 1) & MASK_32)
        return scramble(salt ^ key)

    start, width = (word(0) << 30 | word(1) >> 2) % size, isqrt(size - 1) + 1
    height = -(-size // width)
    last, found = size - (height - 1) * width, []
    for number in range(k):
        row, column = divmod((start + number) % size, width)
        for turn in range(TURNS if scattered else 0):
            words = 2 + turn * (height + width)
            length = height - (column >= last)
            row = (row + (word(words + height + column) * length >> 32)) % length
            length = width if row < height - 1 else last
            column = (column + (word(words + row) * length >> 32)) % length
        found.append(row * width + column)
    return found


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.data())
def test_entries_are_distinct_and_of_their_segment(sizes, data):
    spans, numel = place(sizes, hole=data.draw(st.sampled_from([0, 3])))
    groups, rest = [], list(spans)
    while rest:  # several parameters share a segment
        many = data.draw(st.integers(1, len(rest)))
        groups.append(tuple(rest[:many]))
        rest = rest[many:]
    budgets = [data.draw(st.integers(1, sum(span.numel for span in group))) for group in groups]
    segments = [Segment(f"s{i}", g, k, k) for i, (g, k) in enumerate(zip(groups, budgets, strict=True))]
    layout = Layout(0, numel, tuple(segments))
    unused = frozenset(data.draw(st.sets(st.sampled_from([span.name for span in spans]))))
    key, scattered = data.draw(keys), data.draw(st.booleans())
    indices, owner = RandomIndices(layout, unused, scattered, CPU).draw(key)
    for i, segment in enumerate(segments):
        used = [at for start, stop in segment.runs(unused) for at in range(start, stop)]
        own = indices[owner == i].tolist()
        expected = plainly(segment.name, len(used), min(segment.k, len(used)), key, scattered) if used else []
        assert own == [used[at] for at in expected]
        assert len(set(own)) == len(own) == min(segment.k, len(used))
    assert owner.tolist() == sorted(owner.tolist())


@given(keys, st.booleans())
def test_a_key_on_the_device_draws_the_same(key, scattered):
    layout = Layout.cut(place([300, 1, 70], hole=2)[0], numel=377, scope="layer", density=0.1)
    tables = RandomIndices(layout, NOBODY, scattered, CPU)
    for ours, theirs in zip(tables.draw(torch.tensor(key)), tables.draw(key), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 1023, 1024, 1025, 99_856, 100_003])
def test_all_are_drawn_if_all_are_wanted(size):
    layout = equal_segments(size, size, 1)
    drawn, _ = RandomIndices(layout, NOBODY, True, CPU).draw(size)
    assert torch.equal(drawn.sort().values, torch.arange(size))


def test_nothing_is_drawn_from_nothing():
    for layout, unused in ((Layout(0, 0, ()), NOBODY), (equal_segments(5, 2, 1), frozenset({"0"}))):
        for scattered in (True, False):
            drawn, owner = RandomIndices(layout, unused, scattered, CPU).draw(1)
            assert drawn.numel() == owner.numel() == 0


def test_entries_beyond_32_bits():
    size, k = 2**34 + 12_345, 2000
    layout = Layout(0, 2 * size, (Segment("one", (Span("one", size, size),), k, k),))
    drawn, _ = RandomIndices(layout, NOBODY, True, CPU).draw(7)
    assert drawn.tolist() == [size + at for at in plainly("one", size, k, 7, True)]
    assert drawn.unique().numel() == k
    assert torch.histc((drawn - size).double(), 10, 0, size).min() > 0.7 * k / 10


def unlikely(counts, expected):
    """How many standard deviations chi-square is above what chance makes of it."""
    freedom = counts.numel() - 1
    return float(((counts - expected).square() / expected).sum() - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize(("size", "k"), [(2, 1), (4, 2), (5, 2), (7, 3), (8, 4), (10, 2), (10, 5), (17, 2), (26, 2)])
def test_every_set_of_a_few_is_drawn_equally_often(size, k):
    """Over steps and segments."""
    many, steps = 500, 100
    tables = RandomIndices(equal_segments(size, k, many), NOBODY, True, CPU)
    base = torch.arange(many).unsqueeze(1) * size
    sets = torch.stack([tables.draw(scramble(step))[0].view(many, k) - base for step in range(steps)])
    codes = (1 << sets).sum(-1).flatten()
    every = torch.tensor([sum(1 << i for i in chosen) for chosen in combinations(range(size), k)]).sort().values
    counts = torch.bincount(torch.searchsorted(every, codes), minlength=every.numel()).double()
    assert unlikely(counts, many * steps / comb(size, k)) < 5


def test_draws_do_not_follow_from_each_other():
    """Entries of a step and of the next, of neighbouring segments and of two ranks: each pair equally often."""
    size, many, steps = 12, 500, 100
    tables = RandomIndices(equal_segments(size, 1, many), NOBODY, True, CPU)
    base = torch.arange(many) * size
    first, other = (
        torch.stack([tables.draw(step << 16 | rank)[0] - base for step in range(steps)]) for rank in range(2)
    )
    pairs = {
        "steps": (first[:-1], first[1:]),
        "segments": (first[:, :-1], first[:, 1:]),
        "ranks": (first, other),
    }
    for name, (one, two) in pairs.items():
        counts = torch.bincount((one * size + two).flatten(), minlength=size * size).double()
        assert unlikely(counts, one.numel() / size**2) < 5, name


@pytest.mark.parametrize("apart", [1, 64, 1000])
def test_neighbours_go_their_own_ways(apart):
    """In a large segment, whether an entry is drawn says nothing of one that is a step, a row or several apart."""
    size, k, steps = 4096, 410, 400
    tables = RandomIndices(equal_segments(size, k, 1), NOBODY, True, CPU)
    drawn = torch.zeros(steps, size)
    for step in range(steps):
        drawn[step, tables.draw(scramble(step))[0]] = 1
    both, expected = (drawn * drawn.roll(apart, 1)).sum(1), k * (k - 1) / (size - 1)
    assert abs(both.mean() - expected) < 5 * (expected / steps) ** 0.5
    assert 0.8 * expected < both.var() < 1.25 * expected  # no step has many more of them than another
    each = drawn.sum(0).double()
    assert unlikely(each, steps * k / size) < 5


def test_of_a_block_each_start_is_equally_likely():
    size, many, steps = 11, 500, 50
    tables = RandomIndices(equal_segments(size, 1, many), NOBODY, False, CPU)
    starts = torch.cat([tables.draw(scramble(step))[0] - torch.arange(many) * size for step in range(steps)])
    assert unlikely(torch.bincount(starts).double(), many * steps / size) < 5


@kinds
def test_only_what_is_shared_is_drawn_alike(kind):
    layout = Layout.cut(place([5000, 700])[0], numel=5700, scope="layer", density=0.01)

    def drawn(**moment):
        residual, ctx = torch.ones(5700), Context(**moment)
        return kind(0.01).compress(torch.ones(5700), Memory(residual, residual), layout, ctx, {}).indices

    once = drawn(rank=1, step=3, seed=5)
    assert torch.equal(once, drawn(rank=1, step=3, seed=5))
    for other in ({"rank": 2}, {"step": 4}, {"seed": 6}):
        assert not torch.equal(once, drawn(**{"rank": 1, "step": 3, "seed": 5} | other)), other
    assert torch.equal(once, drawn(key=torch.tensor(key_of(Context(rank=1, step=3, seed=5)))))
    alike = [drawn(rank=rank, step=3, seed=5, shared=True, whole=True) for rank in range(3)]
    assert all(torch.equal(alike[0], one) for one in alike)


def test_names_and_not_places_make_the_difference():
    """Buckets are regrouped: what is drawn of a segment does not depend on the others beside it."""
    one, two = (
        Layout.cut([Span(name, start, 5000) for name, start in spans], numel=10_000, scope="layer", density=0.01)
        for spans in ([("a", 0), ("b", 5000)], [("b", 0), ("c", 5000)])
    )
    a, b, again, c = (
        RandomIndices(layout, NOBODY, True, CPU).draw(9)[0][50 * i : 50 * i + 50] - 5000 * i
        for layout in (one, two)
        for i in range(2)
    )
    assert torch.equal(b, again)
    assert not torch.equal(a, b)
    assert not torch.equal(b, c)


@kinds
@pytest.mark.parametrize("values", ["fp32", "fp16", "sign"])
def test_many_segments_take_no_more_calls_than_few(kind, values):
    calls = []
    for many in (3, 60):
        numel, compressor, ctx = many * 200, kind(0.05), Context(rounding=CODECS[values].round, values=values)
        layout = Layout.cut(place([200] * many)[0], numel=numel, scope="layer", density=0.05)
        memory = Memory(torch.zeros(numel), torch.zeros(numel))
        grad = gradient("normal", numel, torch.float32, 1)
        compressor.compress(grad, memory, layout, ctx, {})  # makes the tables
        with Calls() as counted:
            sent = compressor.compress(grad, memory, layout, ctx, {})
        assert sent.count > 2 * many
        calls.append(counted.names)
    assert calls[0] == calls[1]


@pytest.mark.parametrize("key", [1, torch.tensor(1)], ids=["number", "tensor"])
@pytest.mark.parametrize("whole", [False, True])
def test_neither_adding_nor_drawing_nor_taking_out_waits_for_the_host(whole, key):
    """On a GPU these three are all there is."""
    layout = Layout.cut(place([300, 1, 70], hole=2)[0], numel=377, scope="layer", density=0.1)
    before, after = torch.zeros(377), torch.zeros(377)
    memory = Memory(before, after, Velocity(before, torch.zeros(377), 0.5, True))
    tables, places, ctx = RandomIndices(layout, NOBODY, True, CPU), SpanTable(layout, CPU), Context(whole=whole)
    with Calls() as counted:
        flags = places.flag(accumulate_flat(gradient("normal", 377, torch.float32, 1), memory, places.mine))
        sent = send_chosen(memory, *tables.draw(key), layout, ctx, *flags)
    assert not counted.waits
    assert int(sent.count) == layout.k
    with Calls() as counted:  # this sees what there is to see
        torch.arange(3)[torch.arange(3) > 1].sum().item()
    assert len(counted.waits) == 2


@given(
    st.sampled_from([0, 3]),
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    st.sampled_from([None, 0.9]),
    st.booleans(),
    st.sets(st.integers(0, 99), max_size=4),
    st.sampled_from([float("nan"), float("inf")]),
)
def test_a_pass_that_waits_for_nothing_is_the_same_pass(hole, dtype, beta, undoable, bad, odd):
    spans, numel = place([50, 1, 300], hole)
    layout = Layout.cut(spans, numel=numel, scope="layer", density=0.1)
    grad, kept = gradient("heavy", numel, dtype, 1), torch.float64 if dtype == torch.float64 else torch.float32
    grad[list(bad)] = odd
    if hole:
        grad[50] = float("nan")  # belongs to nobody
    found = []
    for at_once in (True, False):
        before, speed = (gradient("normal", numel, kept, seed) for seed in (2, 3))
        after, faster = (t.clone() if undoable else t for t in (before, speed))
        velocity = Velocity(speed, faster, beta, False) if beta else None
        memory, places = Memory(before, after, velocity), SpanTable(layout, CPU)
        if at_once:
            flags = places.flag(accumulate_flat(grad, memory, places.mine))
        else:
            flags = flag(accumulate(grad, memory, layout.runs)[1], layout, CPU)
        found.append((after, faster, *flags))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_another_unused_parameter_makes_other_tables():
    """Tables are kept from step to step, yet what sleeps is another set in each."""
    one, workspace = worker("random", [40, 60], scope="global", density=0.5), Workspace()
    for step, unused in enumerate(({"p0"}, {"p1"}, set(), {"p0", "p1"}, {"p0"})):
        memory = Memory(torch.ones(100), torch.ones(100))
        ctx = Context(step, unused=frozenset(unused), workspace=workspace)
        sent = one.compressor.compress(torch.zeros(100), memory, one.layout, ctx, {})
        used = torch.tensor(["p0" not in unused] * 40 + ["p1" not in unused] * 60)
        assert int(sent.count) == min(50, int(used.sum()))
        assert used[sent.indices[: int(sent.count)]].all()
