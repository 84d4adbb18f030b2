"""A bit of a message is flipped: every rank gets an error, and no index outside the gradient is followed."""

from __future__ import annotations

import contextlib
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import HashStore

from sparsync import (
    AllGather,
    Balanced,
    Damaged,
    DenseAllReduce,
    GTopK,
    Mismatch,
    NoCompression,
    RandomK,
    SharedIndexAllReduce,
    TopK,
)
from sparsync.collectives import Channel
from sparsync.collectives.base import shape_of
from sparsync.collectives.comm.header_checks import HostChecks, check_fits
from sparsync.collectives.comm.store_monitor import StoreMonitor
from sparsync.collectives.partition import HostPartition, IndexPartition
from sparsync.kernels import cpu
from sparsync.kernels.checksum import checksum, reference
from sparsync.kernels.message.header import ENTRIES, FLAGS, SEQUENCE, SUM
from sparsync.layout import Layout, Span
from sparsync.sparse import SparseGrad
from sparsync.wire import HEADER, Shape, Wire, read_headers, seal
from tests.failures.reducers import error_of, make_reducer, push_all
from tests.methods import gradient, worker
from tests.world import World

FORMATS = [
    *[(indices, values) for indices in ("int", "ef") for values in ("fp32", "fp16", "bf16", "sign", "levels")],
    *[("block", values) for values in ("fp32", "fp16", "bf16")],
]
formats = pytest.mark.parametrize(("indices", "values"), FORMATS)


def small_message(indices: str, values: str) -> tuple[Tensor, Layout, Shape, Wire]:
    """A message about seven entries, or two blocks of them, of a gradient of 123."""
    message, *others = message_of(indices, values, [100, 23], 0.05, 3)
    assert int(message[ENTRIES]) > 2
    return message, *others


def message_of(
    indices: str, values: str, sizes: list[int], density: float, seed: int
) -> tuple[Tensor, Layout, Shape, Wire]:
    method = "block" if indices == "block" else "threshold"
    one = worker(method, sizes, density=density, values=values, whole=indices == "block")
    sent = one.send(gradient("normal", one.layout.numel, torch.float32, seed))
    wire, shape = Wire(values, indices), shape_of(one.layout, torch.float32)
    header = wire.header(sent, 7, one.layout.id, one.layout.digest)
    return wire.encode(sent, one.layout.segment_of, shape, header), one.layout, shape, wire


def flipped(message: Tensor, places: Tensor) -> Tensor:
    """Copies of a message, a row each, with the bits at ``places``, ``(copies, bits)``, flipped."""
    copies = message.repeat(len(places), 1)
    rows = torch.arange(len(places))
    for place in places.T:
        copies[rows, place // 32] ^= (1 << place % 32).to(torch.int32)
    return copies


@formats
def test_every_flipped_bit_is_an_error(indices, values):
    message, *_ = small_message(indices, values)
    checks = HostChecks(StoreMonitor(HashStore(), 0, 1, 20.0))
    assert not checks.check(message.unsqueeze(0), 1)[0].damaged
    for place, row in enumerate(flipped(message, torch.arange(32 * message.numel()).unsqueeze(1))):
        checks.monitor = StoreMonitor(HashStore(), 0, 1, 20.0)
        with pytest.raises(Mismatch if place < 32 else Damaged, match="rank 0"):
            checks.check(row.unsqueeze(0), 1)


@pytest.mark.each_value
@formats
def test_two_flipped_bits_are_found_wherever_they_are(indices, values):
    message, *_ = small_message(indices, values)
    pairs = torch.combinations(torch.arange(32 * message.numel()))
    for some in pairs.split(50_000):
        assert all(header.damaged for header in read_headers(flipped(message, some)))


def test_two_words_that_changed_places_are_found():
    message, *_ = small_message("int", "fp32")
    for a, b in torch.combinations(torch.arange(message.numel())).tolist():
        other = message.clone()
        other[[a, b]] = message[[b, a]]
        assert read_headers(other.unsqueeze(0))[0].damaged == (not torch.equal(other, message))


@formats
@pytest.mark.parametrize("way", ["host", "device"])
def test_no_flipped_bit_leads_outside_the_gradient(monkeypatch, indices, values, way):
    """Even if nobody had looked at the checksum: on a device, where nobody waits, such an entry is NaN."""
    message, layout, shape, wire = small_message(indices, values)
    refused = 0
    if way == "device":
        monkeypatch.setattr("sparsync.wire.bits.on_host", lambda tensor: False)
    for place, row in enumerate(flipped(message, torch.arange(32 * message.numel()).unsqueeze(1))):
        try:
            got = wire.decode(row, layout.segment_of, shape)
        except Damaged:
            refused += 1
            continue
        assert 0 <= int(got.count) <= shape.capacity
        assert ((got.indices >= 0) & (got.indices < shape.numel)).all()
        values_at = HEADER + wire.index_codec.words(shape)
        refused += place < 32 * values_at and bool(got.values.isnan().any())
        got.densify()
    assert refused >= 28  # a count that is negative or too large, at least


def test_a_count_or_index_that_does_not_fit_is_named():
    message, layout, shape, wire = small_message("int", "fp32")
    for word, said in ((ENTRIES, "entries"), (HEADER, "index")):
        for number in (-1, 2**31 - 1, shape.numel):
            row = message.clone()
            row[word] = number
            with pytest.raises(Damaged, match=f"an {said} outside 0 to"):
                wire.decode(seal(row), layout.segment_of, shape)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("words", [HEADER, 11, 64, 1000, 100_003])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 2)], ids=str)
def test_every_version_of_the_checksum_is_the_same(monkeypatch, words, shape, compiled):
    if compiled and not cpu.available():
        pytest.skip("needs numba")
    monkeypatch.setattr("sparsync.kernels.checksum.loaded", lambda: compiled)
    monkeypatch.setattr("sparsync.kernels.checksum.available", lambda: compiled)
    messages = torch.randint(-(2**31), 2**31, (*shape, words), dtype=torch.int32)
    sums = reference.checksum(messages)
    assert torch.equal(checksum(messages), sums)
    assert torch.equal(checksum(messages[..., :HEADER]), reference.checksum(messages[..., :HEADER]))
    row = messages.view(-1, words)[0].tolist()
    by_hand = sum((2 * i + 3) * (word % 2**32) for i, word in enumerate(row) if i not in (SUM, SUM + 1)) % 2**64
    assert int(sums.view(-1)[0]) % 2**64 == by_hand


CODED = st.sampled_from(FORMATS)


@given(
    CODED, st.lists(st.integers(1, 3000), min_size=1, max_size=4), st.floats(0.001, 0.3), st.integers(0, 99), st.data()
)
def test_any_single_flip_is_found(coded, sizes, density, seed, data):
    """Whatever the message, and wherever the bit; even two messages of which one has it."""
    message, layout, shape, wire = message_of(*coded, sizes, density, seed)
    place = data.draw(st.integers(0, 32 * message.numel() - 1))
    rows = torch.cat([message.unsqueeze(0), flipped(message, torch.tensor([[place]]))])
    assert [header.damaged for header in read_headers(rows)] == [False, True]
    with contextlib.suppress(Damaged):
        got = wire.decode(rows[1], layout.segment_of, shape)
        assert 0 <= int(got.count) <= shape.capacity
        assert ((got.indices >= 0) & (got.indices < shape.numel)).all()
    whole = wire.decode(rows[0], layout.segment_of, shape)
    assert torch.equal(wire.decode(message, layout.segment_of, shape).values, whole.values)


@pytest.mark.parametrize("kind", [HostPartition, IndexPartition])
def test_a_sum_behind_the_gradients_end_is_not_written(monkeypatch, kind):
    """Of 4 owners' rows of 10 entries the last are longer than the gradient: 2 of their places do not exist."""
    if kind is IndexPartition:
        monkeypatch.setattr("sparsync.wire.bits.on_host", lambda tensor: False)
    layout = Layout.cut([Span("all", 0, 10)], numel=10, scope="layer", density=1.0)
    partition, owners = kind(layout, 4, 1.0), torch.arange(4).unsqueeze(1)
    rows, none = torch.full((4, 1), 2), torch.zeros((), dtype=torch.int32)
    part = SparseGrad(rows, torch.ones(4, 1), torch.ones(4, dtype=torch.int64), partition.rows, none, none)
    assert int((partition.place(rows, owners) >= 10).sum()) == 2
    if kind is HostPartition:
        with pytest.raises(Damaged, match="an index outside 0 to 9"):
            partition.placed(part, owners)
        return
    result = partition.placed(part, owners)
    assert ((result.indices >= 0) & (result.indices < 10)).all()
    assert int(result.values.isnan().sum()) == 2


VALUE = HEADER + 31  # behind 30 indices
METHODS = {
    "allgather": (TopK(0.1), AllGather()),
    "balanced": (TopK(0.1), Balanced()),
    "gtopk": (TopK(0.1), GTopK()),
    "dense": (NoCompression(), DenseAllReduce()),
    "shared": (RandomK(0.1), SharedIndexAllReduce()),
}


def case_flipped(rank: int, size: int, method: str, word: int, sealed: bool = False) -> tuple[tuple[str, str], float]:
    """A bit of what rank 1 gets from rank 0 is flipped on the way, in the third step; ``sealed``: its checksum fits."""
    compressor, collective = METHODS[method]
    reducer = make_reducer({"a": torch.zeros(300, 1)}, compressor, collective, deadline=20.0)
    step = 0

    def damage(rows: Tensor) -> Tensor:
        if rank == 1 and step == 2 and rows.dtype == torch.int32:
            rows.view(-1)[word] ^= 1 << 20
            if sealed:
                seal(rows)
        return rows

    def damaging(way: str) -> Any:
        whole = getattr(Channel, way)
        return patch.object(Channel, way, lambda channel, *args: damage(whole(channel, *args)))

    start = time.monotonic()
    with damaging("all_gather"), damaging("all_to_all"), damaging("receive"):
        for step in range(6):
            start = time.monotonic() if step == 2 else start
            error_of(push_all, reducer, [("a", torch.randn(300))])
            if error_of(reducer.check)[0] != "none":
                break
    answer = error_of(reducer.check), time.monotonic() - start
    reducer.close()
    return answer


@pytest.mark.parametrize(
    ("method", "word"),
    [
        *[("allgather", word) for word in (ENTRIES, HEADER, VALUE)],
        *[pytest.param("allgather", word, marks=pytest.mark.slow) for word in (SEQUENCE, FLAGS, SUM)],
        ("balanced", HEADER),
        ("gtopk", HEADER),
        ("dense", FLAGS),
        ("shared", FLAGS),
    ],
)
def test_a_message_that_is_damaged_on_its_way_ends_all_ranks(method, word):
    """Whatever bit it is: one rank got it, and both raise the same, long before the deadline."""
    answers = World.once(2, case_flipped, method=method, word=word)
    assert all(finished for finished, _ in answers), answers
    ((kind, text), _), ((kind_1, text_1), _) = (answer for _, answer in answers)
    assert kind == kind_1 == Damaged.__name__
    assert text == text_1
    assert "the message of rank 0" in text
    assert "at rank 1" in text
    assert all(seconds < 10 for _, (_, seconds) in answers)


@pytest.mark.parametrize("method", ["allgather", "balanced", "gtopk"])
def test_an_entry_that_one_rank_alone_finds_outside_ends_all_ranks(method):
    answers = World.once(2, case_flipped, method=method, word=HEADER, sealed=True)
    assert all(finished for finished, _ in answers), answers
    ((kind, text), _), ((kind_1, text_1), _) = (answer for _, answer in answers)
    assert kind == kind_1 == Damaged.__name__
    assert text == text_1
    assert "a message was not read" in text
    assert all(seconds < 10 for _, (_, seconds) in answers)


def test_entries_outside_a_gradient_are_told_of_where_no_header_does() -> None:
    monitor = StoreMonitor(HashStore(), 0, 1, 2.0)
    check_fits(0, monitor)
    with pytest.raises(Damaged, match="exchange 4: a message that rank 0 got has entries outside its gradient"):
        check_fits(5, monitor)
