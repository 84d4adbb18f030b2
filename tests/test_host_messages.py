"""Messages made, read and summed by compiled loops, against ``Wire`` and ``write_mean`` alone: the same bits."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from sparsync import AllGather, Damaged
from sparsync.collectives import Channel
from sparsync.collectives.allgather import MeanOfRows
from sparsync.collectives.base import OverflowFlag, shape_of
from sparsync.kernels import cpu
from sparsync.kernels.message.header import ENTRIES
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad, _add_quotients
from sparsync.wire import CODECS, HEADER, Shape, Wire, host, seal
from sparsync.workspace import Workspace
from tests.failures.reducers import error_of, make_reducer, push_all
from tests.methods import place

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = ([1], [63], [1023, 1, 63], [40_000, 129], [100_003])
formats = pytest.mark.parametrize(("values", "indices"), [(v, i) for v in CODECS for i in ("int", "ef")])


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    """Once the loops are there, messages of any size are theirs."""
    pytest.importorskip("numba")
    assert cpu.available()


def plain(act: Callable[..., Any], *args: Any) -> Any:
    """Do it without the loops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "carries", lambda *_: False)
        return act(*args)


def entries(layout: Layout, values: str, seed: int, share: float = 1.0, ascending: bool = True) -> SparseGrad:
    """Entries as they travel, of up to ``share`` of what a message holds, many of them those of other seeds, too."""
    rng = torch.Generator().manual_seed(seed)
    mine = torch.cat([torch.arange(span.start, span.stop) for span in layout.spans])
    count = math.ceil(layout.capacity * share)
    pool = mine[: max(count, mine.numel() // 8)]
    picked = pool[torch.randperm(pool.numel(), generator=rng)[:count]]
    sizes = torch.randn(picked.numel(), generator=rng) * 2.0 ** torch.randint(-20, 5, picked.shape, generator=rng)
    round = CODECS[values].round
    sizes = sizes if round is None else round(sizes, layout.segment_of(picked), len(layout.segments))
    picked, sizes = picked[sizes != 0], sizes[sizes != 0]
    if ascending:
        picked, order = picked.sort()
        sizes = sizes[order]
    indices, numbers = torch.zeros(layout.capacity, dtype=torch.int64), torch.zeros(layout.capacity)
    indices[: picked.numel()], numbers[: picked.numel()] = picked, sizes
    words = torch.tensor([seed % 2, seed % 2 - 1], dtype=torch.int32)
    return SparseGrad(indices, numbers, torch.tensor(picked.numel()), layout.numel, words[0], words[1])


def layout_of(sizes: list[int], density: float, scope: str = "layer") -> Layout:
    spans, numel = place(sizes, 3)
    return Layout.cut(spans, numel=numel, scope=scope, density=density, name="all", id=5)


def message_of(wire: Wire, sent: SparseGrad, layout: Layout, shape: Shape) -> Tensor:
    return wire.encode(sent, layout.segment_of, shape, wire.header(sent, 1, layout.id, layout.digest))


def mean_of(wire: Wire, rows: Tensor, layout: Layout, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """Return the mean's bits, and whether it is finite. What lies beside it stays as it is."""
    around = torch.full((layout.numel + 64,), 9.0, dtype=dtype)
    out, flag = around[32 : layout.numel + 32], OverflowFlag(around.device)
    try:
        MeanOfRows(rows, wire, layout, shape, len(rows)).write(out, flag)
    finally:
        assert (around[:32] == 9).all()
        assert (around[-32:] == 9).all()
    return out.view(torch.int32 if dtype == torch.float32 else torch.int16), not flag.bad


def assert_same(one: SparseGrad, two: SparseGrad) -> None:
    for name in ("indices", "values", "count"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name


@formats
@given(
    st.sampled_from(SIZES),
    st.sampled_from([0.001, 0.03, 1.0]),
    st.sampled_from(["layer", "global"]),
    st.integers(1, 9),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
@example([40_000, 129], 0.001, "layer", 1, torch.float16, 0)  # of which one is -0 in fp16
def test_messages_and_their_mean_are_the_same(values, indices, sizes, density, scope, workers, dtype, seed):
    layout = layout_of(sizes, density, scope)
    wire, shape = Wire(values, indices), shape_of(layout, torch.float32)
    shares = (1.0, 0.0, 0.4)
    sents = [entries(layout, values, seed + i, shares[(seed + i) % 3], ascending=i != 2) for i in range(workers)]
    rows = torch.stack([message_of(wire, sent, layout, shape) for sent in sents])
    assert torch.equal(rows, torch.stack([plain(message_of, wire, sent, layout, shape) for sent in sents]))
    for row in rows:
        assert_same(wire.decode(row, layout.segment_of, shape), plain(wire.decode, row, layout.segment_of, shape))
    mean, finite = mean_of(wire, rows, layout, shape, dtype)
    expected, _ = plain(mean_of, wire, rows, layout, shape, dtype)
    assert torch.equal(mean, expected)
    assert finite
    local = torch.empty(layout.numel, dtype=dtype)
    AllGather().reduce_local(sents, layout, wire)[0].mean.write(local)
    assert torch.equal(mean, local.view(mean.dtype))
    if workers == 1:  # as on a GPU without kernels, where the sign of a 0 may be another
        _add_quotients(local.zero_(), sents[0], 1)
        assert torch.equal(local, mean.view(dtype))


@formats
def test_several_messages_at_once(values, indices):
    layout = layout_of([1023, 5000], 0.05)
    wire, shape = Wire(values, indices), shape_of(layout, torch.float32)
    for ascending in (True, False):
        rows = [entries(layout, values, seed, share, ascending) for seed, share in enumerate((1.0, 0.0, 0.3, 1.0))]
        stack = [torch.stack([getattr(row, name) for row in rows]).view(2, 2, -1) for name in ("indices", "values")]
        count = torch.stack([row.count for row in rows]).view(2, 2)
        many = SparseGrad(*stack, count, layout.numel, rows[0].flags, rows[0].where)
        messages = message_of(wire, many, layout, shape)
        assert torch.equal(messages, plain(message_of, wire, many, layout, shape))
        own = wire.decode(messages, layout.segment_of, shape)
        assert_same(own, plain(wire.decode, messages, layout.segment_of, shape))


@pytest.mark.parametrize("indices", ["int", "ef"])
@pytest.mark.parametrize("density", [0.004, 0.3])  # tiles in which few entries, or many, are summed
def test_the_loops_sum_what_they_can(monkeypatch, indices, density):
    """All messages in one go, over several tiles."""
    from sparsync.kernels.message import decode_cpu as loops

    layout = layout_of([3 * loops.TILE + 17, 900], density)
    wire, shape = Wire("sign", indices), shape_of(layout, torch.float32)
    rows = torch.stack([message_of(wire, entries(layout, "sign", i), layout, shape) for i in range(5)])
    expected = plain(mean_of, wire, rows, layout, shape, torch.float32)[0]
    monkeypatch.setattr(Wire, "decode", None)
    for _ in range(2):
        assert torch.equal(mean_of(wire, rows, layout, shape, torch.float32)[0], expected)


@given(
    st.lists(st.sampled_from([1.0, 1.9921875, 3e-18, 2.0**60, 2.0**-60, 2.0**-126, 2.0**-149, 3e38, 0.0]), min_size=4),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(0, 99),
)
@example([2.0**-149] * 4, 2, 0)
def test_signs_are_summed_to_the_same_bits_wherever_they_are_divided(scales, workers, seed):
    """By powers of 2 before they are added, unless scales are so small or large that this would not be exact."""
    layout = layout_of([900], 0.5, "global")
    wire, shape = Wire("sign", "ef"), shape_of(layout, torch.float32)
    sents = [entries(layout, "sign", seed + i) for i in range(workers)]
    for sent, scale in zip(sents, scales, strict=False):
        sent.values = torch.sign(sent.values) * torch.tensor(scale)
    rows = torch.stack([message_of(wire, sent, layout, shape) for sent in sents])
    mean, finite = mean_of(wire, rows, layout, shape, torch.float32)
    expected, expected_finite = plain(mean_of, wire, rows, layout, shape, torch.float32)
    torch.testing.assert_close(mean.view(torch.float32), expected.view(torch.float32), rtol=0, atol=0, equal_nan=True)
    assert finite == expected_finite


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [3e38, 65504.0, 65520.0, 1e-7, 3e-8, 2.0**-25, 1.00390625, math.inf, math.nan])
def test_numbers_at_the_ends_of_a_range(size, dtype):
    """As a bucket's dtype holds them, ties and denormal numbers; and whether the flag says that they are not finite."""
    layout = layout_of([40], 0.5)
    wire, shape = Wire(), shape_of(layout, torch.float32)
    sents = [entries(layout, "fp32", seed) for seed in range(2)]
    for sent in sents:
        sent.values[:8] = size * torch.tensor([1, -1, 1, -0.5, 1.5, 1, -1, 1])
    rows = torch.stack([message_of(wire, sent, layout, shape) for sent in sents])
    mean, finite = mean_of(wire, rows, layout, shape, dtype)
    expected, expected_finite = plain(mean_of, wire, rows, layout, shape, dtype)
    torch.testing.assert_close(mean.view(dtype), expected.view(dtype), rtol=0, atol=0, equal_nan=True)
    assert finite == expected_finite


@given(st.integers(0, 0xFFFF))
def test_any_half_is_read_as_it_is(bits):
    layout = layout_of([4], 0.25)
    wire, shape = Wire("fp16"), shape_of(layout, torch.float32)
    message = message_of(wire, entries(layout, "fp16", 0), layout, shape)
    message[ENTRIES], message[HEADER + 1] = 1, bits
    mean, _ = mean_of(wire, message.unsqueeze(0), layout, shape, torch.float32)
    expected, _ = plain(mean_of, wire, message.unsqueeze(0), layout, shape, torch.float32)
    one, two = mean.view(torch.float32), expected.view(torch.float32)
    torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


def test_what_the_loops_do_not_know_is_left_to_the_wire():
    layout = layout_of([40], 0.5)
    shape = shape_of(layout, torch.float32)
    assert host.carries(Wire("sign", "ef"), shape)
    for wire, other in (
        (Wire("fp32", "block"), shape),
        (Wire(), replace(shape, dtype=torch.float64)),
        (Wire(), replace(shape, numel=2**31)),
        (Wire(), replace(shape, capacity=0)),
    ):
        assert not host.carries(wire, other)
    strided = torch.zeros(2 * layout.numel)[::2]
    row = message_of(Wire(), entries(layout, "fp32", 0), layout, shape)
    MeanOfRows(row.unsqueeze(0), Wire(), layout, shape, 1).write(strided)
    assert torch.equal(strided, Wire().decode(row, layout.segment_of, shape).densify())


# ---- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checked() -> Iterator[None]:
    """The loops that sum, compiled so that an access outside their arrays raises."""
    from numba import njit

    from sparsync.kernels.message import decode_cpu as loops

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_add_signs", "_add_entries", "write_mean"):  # the last calls the others
            slow = njit(boundscheck=True, error_model="numpy")(getattr(loops, name).py_func)
            patch.setattr(loops, name, slow)
        yield


def outcome(act: Callable[..., Any], *args: Any) -> Any:
    try:
        return act(*args)
    except Damaged as error:
        return str(error)


@pytest.mark.parametrize(
    ("values", "indices", "sizes"),
    [
        ("fp32", "int", [100, 23]),
        ("fp16", "ef", [100, 23]),
        ("bf16", "int", [100, 23]),
        ("sign", "ef", [100, 23]),
        ("sign", "ef", [123]),
        ("levels", "int", [100, 23]),
    ],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_a_flipped_bit_leads_nowhere_and_means_the_same(checked, values, indices, sizes):
    """Even if nobody had looked at the checksum: the same error as without the loops, or the same numbers."""
    layout = layout_of(sizes, 0.05)
    wire, shape = Wire(values, indices), shape_of(layout, torch.float32)
    whole = torch.stack([message_of(wire, entries(layout, values, seed), layout, shape) for seed in range(3)])
    refused, args = 0, (layout, shape, torch.float32)
    for bit in range(32 * ENTRIES, 32 * whole.shape[1]):
        rows = whole.clone()
        rows[bit % 3, bit // 32] ^= torch.tensor(1 << bit % 32).to(torch.int32)
        got, expected = outcome(mean_of, wire, rows, *args), outcome(plain, mean_of, wire, rows, *args)
        if isinstance(expected, str):
            refused += 1
            assert got == expected
        else:
            one, two = got[0].view(torch.float32), expected[0].view(torch.float32)
            torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
            assert got[1] == expected[1]
    assert refused >= 28  # a count that is negative or too large, at least


@pytest.mark.parametrize("indices", ["int", "ef"])
def test_words_of_any_kind_are_never_followed_outside(checked, indices):
    """Messages of random words with a count that fits."""
    layout = layout_of([100, 23], 0.1)
    wire, shape = Wire("levels", indices), shape_of(layout, torch.float32)
    rng, refused = torch.Generator().manual_seed(0), 0
    for count in [*range(shape.capacity + 1)] * 4:
        rows = torch.randint(-(2**31), 2**31, (2, wire.bytes(shape) // 4), dtype=torch.int32, generator=rng)
        rows[:, ENTRIES] = count
        if count % 2:  # few marks, so that there may be fewer than entries
            rows[:, HEADER:] &= rows[:, HEADER:].roll(1, 1) & rows[:, HEADER:].roll(2, 1) & 0x01010101
        got = outcome(mean_of, wire, rows, layout, shape, torch.float32)
        expected = outcome(plain, mean_of, wire, rows, layout, shape, torch.float32)
        if isinstance(expected, str):
            refused += 1
            assert got == expected
            for row in rows:
                mine = outcome(wire.decode, row, layout.segment_of, shape)
                other = outcome(wire.decode_plain, row, layout.segment_of, shape)
                assert mine == other if isinstance(other, str) else torch.equal(mine.indices, other.indices)
        else:
            one, two = got[0].view(torch.float32), expected[0].view(torch.float32)
            torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
    assert refused > shape.capacity


def test_a_value_that_a_count_makes_an_index_is_refused(checked):
    layout = layout_of([100, 23], 0.05)
    shape = shape_of(layout, torch.float32)
    row = message_of(Wire(), entries(layout, "fp32", 0), layout, shape)
    row[ENTRIES], row[HEADER + layout.capacity] = layout.capacity + 1, layout.numel - 1
    with pytest.raises(Damaged, match="an entries outside"):
        mean_of(Wire(), seal(row).unsqueeze(0), layout, shape, torch.float32)


@pytest.mark.parametrize("workers", [2, 3])
def test_damaged_signs_that_are_summed_in_parts(checked, workers):
    """A loop that goes on in the middle of the gradient gives up what lies before, and what has no mark."""
    layout = layout_of([123], 0.05)
    wire, shape, cut = Wire("sign", "ef"), shape_of(layout, torch.float32), layout.numel // 2
    whole = torch.stack([message_of(wire, entries(layout, "sign", seed), layout, shape) for seed in range(workers)])
    blank = whole.clone()
    blank[0, HEADER:] = 0
    flips = range(32 * HEADER, 32 * (HEADER + wire.index_codec.words(shape)))
    damaged = [blank, *(whole.clone() for _ in flips)]
    for bit, rows in zip(flips, damaged[1:], strict=True):
        rows[bit % workers, bit // 32] ^= torch.tensor(1 << bit % 32).to(torch.int32)
    given_up = 0
    for rows in damaged:
        out = torch.empty(layout.numel)
        parts = [(0, out[:cut]), (cut, out[cut:])]
        if MeanOfRows(rows, wire, layout, shape, workers).write_parts(parts):
            expected = plain(mean_of, wire, rows, layout, shape, torch.float32)[0]
            assert torch.equal(out, expected.view(torch.float32))
        else:
            given_up += 1
    assert 0 < given_up < len(damaged)


@pytest.mark.parametrize("way", ["loops", "plain"])
def test_a_message_without_marks_is_refused(way):
    """Not even its first entry is taken from the low bits alone."""
    layout = layout_of([100, 23], 0.01)
    wire, shape = Wire("fp32", "ef"), shape_of(layout, torch.float32)
    message = message_of(wire, entries(layout, "fp32", 0), layout, shape)
    message[HEADER : HEADER + wire.index_codec.words(shape)] = 0
    message[ENTRIES] = 1
    decode = wire.decode if way == "loops" else wire.decode_plain
    with pytest.raises(Damaged, match="an index outside 0 to 128"):
        decode(seal(message), layout.segment_of, shape)


# ---- ranks with numba and without ------------------------------------------------------------------------------------


def case_mixed(rank: int, size: int, values: str, indices: str) -> Tensor:
    """Even ranks have the loops, odd ones do not."""
    assert cpu.available()
    layout = layout_of([40_000, 129], 0.01)
    channel = Channel(dist.group.WORLD, Wire(values, indices), 20.0)
    sents = [entries(layout, values, seed) for seed in range(size)]
    out = torch.empty(layout.numel)

    def step() -> None:
        AllGather().reduce(sents[rank], layout, channel, Workspace()).mean.write(out)

    plain(step) if rank % 2 else step()
    channel.close()
    expected = torch.empty(layout.numel)
    AllGather().reduce_local(sents, layout, channel.wire)[rank].mean.write(expected)
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))
    return out


@pytest.mark.parametrize(("values", "indices"), [("sign", "ef"), ("fp32", "int")])
def test_ranks_with_and_without_loops_agree(worlds, values, indices):
    for own in worlds[3].run(case_mixed, values=values, indices=indices):
        assert own.any()


def case_outside(rank: int, size: int) -> tuple[str, str]:
    """A message has an index that does not exist, and the checksum that goes with it; rank 1 has no loops."""
    assert cpu.available()
    reducer = make_reducer({"a": torch.zeros(300, 1)}, deadline=20.0)
    whole = Channel.all_gather

    def all_gather(channel: Channel, message: Tensor, room: Tensor | None = None) -> Tensor:
        rows = whole(channel, message, room)
        rows[0, HEADER] = 300
        return seal(rows)

    def step() -> None:
        error_of(push_all, reducer, [("a", torch.randn(300))])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "all_gather", all_gather)
        plain(step) if rank else step()
    answer = error_of(reducer.check)
    reducer.close()
    return answer


def test_an_index_that_does_not_exist_is_an_error_on_all_ranks(worlds):
    expected = "Damaged", "a message was not read: it has an index outside 0 to 299"
    assert worlds[3].run(case_outside) == [expected] * 3


def test_small_halves_arrive_where_denormal_numbers_count_as_zero():
    from sparsync.kernels.message import decode_cpu as loops

    halves = torch.arange(0, 2**15, 7, dtype=torch.int16).view(torch.float16)
    halves = halves[halves.isfinite()]
    found = []

    def read():
        torch.set_flush_denormal(True)
        words = halves.view(torch.int16).numpy().astype(np.uint32)
        found.extend(map(loops._from_half, words))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert torch.equal(torch.tensor(found), halves.float())
