"""Messages made and read by kernels, against those of ``wire``: the same bits."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync.collectives.base import shape_of
from sparsync.collectives.comm.device_status import DeviceStatus
from sparsync.kernels.checksum import launch, reference
from sparsync.kernels.message.header import ENTRIES, FLAGS
from sparsync.layout import Layout, Span
from sparsync.sparse import SparseGrad, give_norm, write_mean
from sparsync.wire import CODECS, HEADER, MAGIC, VERSION, Wire, seal
from sparsync.wire.device import TILE, DeviceMessage, carries
from sparsync.wire.indices import ef_width, ef_words
from sparsync_lab.bench.exchange_kernels import STAGES, measure_exchange
from sparsync_lab.bench.wire import WireBench
from sparsync_lab.bench.wire_kernels import FORMATS, measure_kernels
from tests.fence import fenced
from tests.methods import place
from tests.pairs import DEVICE, INTERPRETED, MARKS, numbered

pytestmark = MARKS
SIZES = {"one": [1], "odd": [1023, 1, 2, 5000], "large": [140_003, 129]}


def some(layout, values, seed, share=1.0, overlap=True):
    """Entries in any order, as they travel, of up to ``share`` of what a message holds."""
    rng = torch.Generator().manual_seed(seed)
    mine = torch.cat([torch.arange(span.start, span.stop) for span in layout.spans])
    count = int(layout.capacity * share)
    pool = mine[: max(count, mine.numel() // (8 if overlap else 1))]
    picked = pool[torch.randperm(pool.numel(), generator=rng)[:count]]
    sizes = torch.randn(picked.numel(), generator=rng)
    round = CODECS[values].round
    sizes = sizes if round is None else round(sizes, layout.segment_of(picked), len(layout.segments))
    sizes = torch.where(sizes == 0, 1.0, sizes) if values not in ("sign", "levels") else sizes
    picked, sizes = picked[sizes != 0], sizes[sizes != 0]
    indices, entries = torch.zeros(layout.capacity, dtype=torch.int64), torch.zeros(layout.capacity)
    indices[: picked.numel()], entries[: picked.numel()] = picked, sizes
    words = torch.tensor([seed % 2, seed % 2 - 1], dtype=torch.int32)
    return SparseGrad(indices, entries, torch.tensor(picked.numel()), layout.numel, words[0], words[1])


def on(sent, device):
    parts = (sent.indices, sent.values, sent.count, sent.flags, sent.where)
    indices, values, count, flags, where = (part.to(device) for part in parts)
    return SparseGrad(indices, values, count, sent.numel, flags, where)


def in_order(sent):
    count = int(sent.count)
    order = sent.indices[:count].sort().indices
    indices, values = sent.indices.clone(), sent.values.clone()
    indices[:count], values[:count] = indices[order], values[order]
    return SparseGrad(indices, values, sent.count, sent.numel, sent.flags, sent.where)


def setting(sizes, scope, values, indices, workers):
    spans, numel = place(sizes, 3)
    density = 0.05 if numel < 20_000 else 0.004
    layout = Layout.cut(spans, numel=numel, scope=scope, density=density, name="all", id=5)
    wire, shape = Wire(values, indices), shape_of(layout, torch.float32)
    return layout, wire, shape, DeviceMessage(wire, layout, shape, workers, torch.device(DEVICE))


def pairwise(values, others):
    """Every pair of values, others and index codecs, in half of their product."""
    for number, value in enumerate(values):
        for turn, other in enumerate(others, number):
            yield *value, ("int", "ef")[turn % 2], other


SCOPES = [
    ("fp16", "layer"),
    ("fp32", "global"),
    ("bf16", "layer"),
    ("sign", "layer"),
    ("sign", "global"),
    ("levels", "layer"),
]


@pytest.mark.parametrize(("values", "scope", "indices", "sizes"), pairwise(SCOPES, SIZES))
def test_the_message_is_that_of_the_wire(values, scope, indices, sizes):
    layout, wire, shape, device = setting(SIZES[sizes], scope, values, indices, 1)
    for seed, share in enumerate((1.0, 0.4, 0.0, 1.0)):  # a message leaves nothing behind in the next
        sent = some(layout, values, seed, share)
        header = wire.header(sent, 7 + seed, layout.id, layout.digest)
        expected = wire.encode(in_order(sent), layout.segment_of, shape, header)
        assert carries(wire, on(sent, DEVICE))
        assert torch.equal(device.pack(on(sent, DEVICE), numbered(7 + seed)).cpu(), expected)
        assert not device.bitmap.any()


RESULTS = [
    ("fp32", torch.float32),
    ("fp16", torch.float16),
    ("bf16", torch.bfloat16),
    ("sign", torch.float32),
    ("levels", torch.float32),
]


@pytest.mark.parametrize(("values", "dtype", "indices", "workers"), pairwise(RESULTS, (1, 2, 3, 5)), ids=str)
def test_the_mean_is_that_of_the_wire(values, dtype, indices, workers):
    layout, wire, shape, device = setting([3 * TILE + 17, 900], "layer", values, indices, workers)
    sents = [
        some(layout, values, seed, share)
        for seed, share in zip(range(workers), (1.0, 0.5, 0.0, 1.0, 1.0), strict=False)
    ]
    headers = [wire.header(sent, 1, layout.id, layout.digest) for sent in sents]
    rows = torch.stack(
        [wire.encode(in_order(s), layout.segment_of, shape, h) for s, h in zip(sents, headers, strict=True)]
    )
    whole = torch.empty(layout.numel, dtype=dtype)
    write_mean(whole, [in_order(s) for s in sents], workers)
    out = torch.full((layout.numel,), 9.0, dtype=dtype, device=DEVICE)
    fine, overflow = (torch.zeros((), dtype=torch.int32, device=DEVICE) for _ in range(2))
    device.write_mean(rows.to(DEVICE), fine, out, overflow, numbered(1))
    assert torch.equal(out.cpu(), whole)
    assert int(overflow) == 0
    norm = torch.tensor([1.0, 2.0, 2.0])  # of parts: 3 of all
    factor = device.give_norm(rows.to(DEVICE), out, norm.to(DEVICE), 2.0)
    expected = give_norm(whole, norm, 2.0)
    torch.testing.assert_close(factor.cpu(), expected, rtol=1e-6 if dtype == torch.float32 else 1e-3, atol=0)
    torch.testing.assert_close(out.cpu(), whole, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0)
    device.write_mean(rows.to(DEVICE), fine + 1, out, overflow, numbered(1))
    assert not out.any()
    assert device.give_norm(rows.to(DEVICE), out, norm.to(DEVICE), 2.0) == 2
    assert not out.any()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("indices", ["int", "ef"])
def test_the_mean_of_more_ranks_than_are_read_at_once(indices, first):
    """Sixteen with few entries in a tile, and one with many: read together and alone, in the order of ranks."""
    layout, wire, shape, device = setting([19_000], "layer", "fp32", indices, 17)
    shares = [1.0, *[0.1] * 16] if first else [*[0.1] * 16, 1.0]
    sents = [in_order(some(layout, "fp32", seed, share)) for seed, share in enumerate(shares)]
    assert 0.1 * layout.capacity < device.lanes < layout.capacity / device.tiles
    headers = [wire.header(sent, 1, layout.id, layout.digest) for sent in sents]
    rows = torch.stack([wire.encode(s, layout.segment_of, shape, h) for s, h in zip(sents, headers, strict=True)])
    whole = torch.empty(layout.numel)
    write_mean(whole, sents, 17)
    out, fine = torch.full((layout.numel,), 9.0, device=DEVICE), torch.zeros((), dtype=torch.int32, device=DEVICE)
    device.write_mean(rows.to(DEVICE), fine, out, None, numbered(1))
    assert torch.equal(out.cpu(), whole)
    assert not fine
    assert not device.scratch.any()


def test_a_mean_that_is_poisoned_is_not_multiplied():
    """Its norm is unknown; and the ranks' own entries are where they were."""
    layout, wire, shape, device = setting([900], "layer", "fp32", "int", 2)
    sents = [in_order(some(layout, "fp32", seed)) for seed in (0, 2)]
    rows = torch.stack(
        [wire.encode(s, layout.segment_of, shape, wire.header(s, 1, layout.id, layout.digest)) for s in sents]
    )
    out, fine = torch.zeros(layout.numel, device=DEVICE), torch.zeros((), dtype=torch.int32, device=DEVICE)
    device.write_mean(rows.to(DEVICE), fine, out, None, numbered(1))
    out[int(sents[0].indices[3])] = torch.nan
    before = out.clone()
    assert device.give_norm(rows.to(DEVICE), out, torch.tensor([3.0], device=DEVICE), 1.0) == 1
    torch.testing.assert_close(out, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter can be watched")
def test_the_fence_sees_what_lies_outside():
    from triton.runtime.errors import InterpreterError

    from sparsync.kernels.status import triton as kernels

    residual, values, one = torch.zeros(8), torch.ones(1), torch.ones((), dtype=torch.int32)
    for at, fits in ((7, True), (8, False), (-1, False)):
        with fenced():
            arguments = (residual, torch.tensor([at]), values, torch.tensor(1), one, one - 1, 1)
            with (
                nullcontext() if fits else pytest.raises(InterpreterError, match="restore reads 1 of 1 entries outside")
            ):
                kernels.restore[(1,)](*arguments, BLOCK=16)


# ---- damage ---------------------------------------------------------------------------------------------------------


def small_message(values, indices):
    """A message about a dozen entries, and what reads it."""
    layout, wire, shape, device = setting([200, 43], "layer", values, indices, 1)
    sent = in_order(some(layout, values, 2))
    return wire.encode(sent, layout.segment_of, shape, wire.header(sent, 0, layout.id, layout.digest)), layout, device


def flipped(message):
    """Every message that differs from it in one bit, a row each."""
    places = torch.arange(32 * message.numel())
    rows = message.repeat(places.numel(), 1)
    rows[places, places // 32] ^= (1 << places % 32).to(torch.int32)
    return rows


def outcome_of(status):
    """Close a step, and return what came of it once the device has said so."""
    report = status.close_step()
    if report.arrived is not None:
        report.arrived.synchronize()
    return status.read(report)


formats = pytest.mark.parametrize(("values", "indices"), [(v, i) for v in CODECS for i in ("int", "ef")])


@pytest.mark.each_value
@formats
def test_a_device_finds_every_flipped_bit(values, indices):
    message, _, _ = small_message(values, indices)
    rows = torch.cat([message.unsqueeze(0), flipped(message)]).to(DEVICE)
    status = DeviceStatus(len(rows), rows.device)
    with fenced() if INTERPRETED else nullcontext():
        status.check_messages(rows, 5)
        outcome = outcome_of(status)
        (headers,) = outcome.exchanges
        assert outcome.failed_exchange == 5
        assert [header.damaged for header in headers] == [False, *[True] * 32 * message.numel()]
        again = DeviceStatus(1, rows.device)
        again.check_messages(rows[:1], 5)
        assert outcome_of(again).failed_exchange == 0
        again.check_messages(rows[1:2], 6)
        assert outcome_of(again).failed_exchange == 6


@pytest.mark.parametrize("words", [10, 11, 1000, 1024, 5000])
def test_the_checksum_is_that_of_the_reference(words):
    rows = torch.randint(-(2**31), 2**31, (3, words), dtype=torch.int32, device=DEVICE)
    with fenced() if INTERPRETED else nullcontext():
        assert torch.equal(launch.checksum(rows), reference.checksum(rows))
        assert torch.equal(launch.checksum(rows[:, :10]), reference.checksum(rows[:, :10]))


def test_a_header_that_travels_alone_is_sealed():
    layout, wire, _, _ = setting([200, 43], "layer", "fp32", "int", 1)
    sent = some(layout, "fp32", 3)
    expected = seal(wire.header(sent, 9, layout.id, layout.digest))
    header = torch.zeros(HEADER, dtype=torch.int32, device=DEVICE)
    assert torch.equal(DeviceStatus(1, header.device).write_header(on(sent, DEVICE), header, 9, layout).cpu(), expected)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 5), st.sampled_from([HEADER, 11, 500, 9000]), st.integers(0, 99), st.data())
def test_a_device_finds_any_single_flip(workers, words, seed, data):
    """In whatever message it is, and however long they are; and says in which."""
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randint(-(2**31), 2**31, (workers, words), dtype=torch.int32, generator=rng)
    rows[:, :ENTRIES] = torch.tensor([MAGIC << 16 | VERSION, 3, 4, 5], dtype=torch.int32)
    rows[:, FLAGS] = 0
    whole, rank = seal(rows.clone()).to(DEVICE), data.draw(st.integers(0, workers - 1))
    place = data.draw(st.integers(0, 32 * words - 1))
    rows = whole.clone()
    rows[rank, place // 32] ^= torch.tensor(1 << place % 32).to(torch.int32).to(DEVICE)
    status = DeviceStatus(workers, rows.device)
    for number, message in enumerate((whole, rows, whole), 1):
        status.check_messages(message, number)
    outcome = outcome_of(status)
    assert outcome.failed_exchange == 2
    clean = [False] * workers
    found = [[header.damaged for header in headers] for headers in outcome.exchanges]
    assert found == [clean, [other == rank for other in range(workers)], clean]


@pytest.mark.each_value
@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter can be watched")
@pytest.mark.parametrize("workers", [16, 17])  # read at once, and one after another
@pytest.mark.parametrize("indices", ["int", "ef"])
@pytest.mark.parametrize("values", ["bf16", pytest.param("levels", marks=pytest.mark.slow)])
def test_no_flipped_bit_makes_a_kernel_leave_its_tensors(values, indices, workers):
    """Even if nobody had looked at the checksum: such entries are left out, and the exchange fails."""
    message, layout, _ = small_message(values, indices)
    device = setting([200, 43], "layer", values, indices, workers)[-1]
    count, first = torch.arange(32 * ENTRIES, 32 * ENTRIES + 32), 32 * HEADER + workers % 5
    bits = torch.cat([count, torch.arange(first, 32 * device.values_at, 5)])
    whole, norm, refused = message.repeat(workers, 1), torch.tensor(3.0), 0
    plain, fine = torch.zeros(layout.numel), torch.zeros((), dtype=torch.int32)
    device.write_mean(whole, fine, plain, None, numbered(1))
    with fenced():
        for some_bits in bits.split(workers):
            rows = whole.clone()
            rows[: some_bits.numel()] = flipped(message)[some_bits]
            failed, out = torch.zeros((), dtype=torch.int32), torch.zeros(layout.numel)
            device.write_mean(rows, failed, out, None, numbered(4))
            device.give_norm(rows, out, norm, 1.0)
            assert int(failed) in (0, 4)
            refused += int(failed) == 4
            assert not device.scratch.any()
    assert refused > 1
    out = torch.zeros(layout.numel)
    device.write_mean(whole, fine, out, None, numbered(1))
    assert torch.equal(out, plain)  # nothing was left behind
    assert not fine


WRONG = [-1, 243 + 6, 243 + 5, 2**31 - 1, -(2**31)]  # the gradient has 249 entries, with holes


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("where", [0, 2, -1])
@pytest.mark.parametrize("number", WRONG)
def test_an_index_outside_the_gradient_fails_the_exchange(workers, where, number):
    """In a message that has the checksum of what it holds: wherever the entry stands, though messages are sorted."""
    rows, layout, device, counts = messages("int", workers)
    rows[-1, HEADER + where % counts[-1]] = number
    assert failed_by(device, seal(rows), layout) == (0 if 0 <= number < layout.numel else 4)


@pytest.mark.parametrize("workers", [1, 3])
def test_entries_that_are_not_in_order_fail_the_exchange(workers):
    """Then one lies in no tile, or in two; within a tile no order is needed."""
    rows, layout, device, counts = messages("int", workers, [3 * TILE])
    last = HEADER + counts[-1] - 1
    rows[-1, [HEADER, last]] = rows[-1, [last, HEADER]]
    assert failed_by(device, seal(rows), layout) == 4


@pytest.mark.parametrize("indices", ["int", "ef"])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("number", WRONG)
def test_a_count_that_does_not_fit_fails_the_exchange(indices, workers, number):
    rows, layout, device, _ = messages(indices, workers)
    rows[-1, ENTRIES] = number
    assert failed_by(device, seal(rows), layout) == 4


@pytest.mark.parametrize("workers", [1, 3])
def test_a_value_that_a_count_makes_an_index_fails_the_exchange(workers):
    rows, layout, device, _ = messages("int", workers)
    rows[-1, ENTRIES] = layout.capacity + 1
    rows[-1, HEADER + layout.capacity] = layout.numel - 1  # the first value: as an index it would fit
    assert failed_by(device, seal(rows), layout) == 4


@pytest.mark.parametrize("numel", [2**31 - 2**18, 2**20])
def test_a_coded_index_that_is_too_large_fails_the_exchange(numel):
    """Even if it is the 32 bits of a number that would fit."""
    layout = Layout.cut([Span("all", 0, numel)], numel=numel, scope="global", density=1e-12, name="all", id=5)
    wire, shape = Wire("fp32", "ef"), shape_of(layout, torch.float32)
    width, (low, high) = ef_width(numel, shape.capacity), ef_words(numel, shape.capacity)
    rows, indices = torch.zeros(1, wire.bytes(shape) // 4, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    rows[0, HEADER + low + high - 1] = -(2**31)  # the last bit of all
    failed, sums = torch.zeros((), dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    rows[0, ENTRIES] = 1
    from sparsync.kernels.message.decode_triton import expand

    args = rows.to(DEVICE), rows.shape[1], HEADER + low, high, sums.to(DEVICE), 1
    found, failed = indices.to(DEVICE), failed.to(DEVICE)
    expand[(1, 1)](*args, found, 1, failed, numbered(4), BLOCK=256, BLOCKS=2, WIDTH=width)
    assert int(failed) == 0
    assert int(found) >= numel


def messages(indices, workers, sizes=(200, 43)):
    """Messages of several ranks, what reads them, and how many entries each has."""
    layout, wire, shape, device = setting(list(sizes), "layer", "fp32", indices, workers)
    sents = [in_order(some(layout, "fp32", seed, overlap=False)) for seed in range(workers)]
    headers = [wire.header(sent, 0, layout.id, layout.digest) for sent in sents]
    rows = torch.stack([wire.encode(s, layout.segment_of, shape, h) for s, h in zip(sents, headers, strict=True)])
    return rows, layout, device, [int(sent.count) for sent in sents]


def failed_by(device, rows, layout):
    """The exchange that failed, if the messages ``rows`` are those of exchange 4."""
    failed, out = torch.zeros((), dtype=torch.int32, device=DEVICE), torch.zeros(layout.numel, device=DEVICE)
    with fenced() if INTERPRETED else nullcontext():
        device.write_mean(rows.to(DEVICE), failed, out, None, numbered(4))
    assert not device.scratch.any()
    return int(failed)


def test_bench_wire_times_what_kernels_do():
    rows = measure_kernels(WireBench(5000, 0.01, 1), 2, torch.device(DEVICE))
    assert [(row.indices, row.values) for row in rows] == list(FORMATS)
    for row in rows:
        assert min(row.pack_ms, row.headers_ms, row.check_ms, row.decode_ms) > 0


def test_bench_exchange_times_every_stage_of_both_collectives():
    gathered, balanced = measure_exchange(5000, 3, torch.device(DEVICE), 1)
    assert tuple(gathered.stages) == ("pack", "mean")
    assert tuple(balanced.stages) == STAGES
    assert all(ms > 0 for row in (gathered, balanced) for ms in row.stages.values())
    assert min(balanced.sent, gathered.sent) > 0
