"""Balanced sums by kernels, against the specification: the same messages, the same result, the same left over."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparsync.collectives import Balanced, Channel
from sparsync.collectives.balanced import BalancedBuffers, BalancedMessages
from sparsync.collectives.comm.device_status import DeviceStatus
from sparsync.collectives.comm.header_checks import DeviceChecks
from sparsync.collectives.partition import IndexPartition
from sparsync.compressors import ThresholdK
from sparsync.kernels.message.header import ENTRIES, FLAGS, HEADER
from sparsync.layout import Layout
from sparsync.sparse import FAILED, SparseGrad, give_norm
from sparsync.wire import CODECS, Wire, seal
from sparsync.wire.device_parts import carries_parts
from sparsync.workspace import Workspace
from tests.methods import Worker, gradient, place
from tests.pairs import DEVICE, INTERPRETED, MARKS, nothing_waited_for_nor_allocated, numbered, within_bounds  # noqa: F401

pytestmark = MARKS
KINDS = ("normal", "integers", "heavy", "mostly zero", "zero")
FORMATS = [(values, ("int", "ef")[i % 2], ("layer", "global")[i % 3 == 0]) for i, values in enumerate(CODECS)]


def layout_of(sizes, scope="layer", density=0.05, **options):
    spans, numel = place(sizes, 2)
    return Layout.cut(spans, numel=numel, scope=scope, density=density, name="all", id=5, **options)


def sent_by(rank, layout, values, kind=None):
    """Entries in any order, as they travel; some of all ranks are the same."""
    u = gradient(kind or KINDS[rank % 5], layout.numel, torch.float32, rank)
    u += gradient("heavy", layout.numel, torch.float32, 99)
    mine = torch.cat([torch.arange(span.start, span.stop) for span in layout.spans])
    picked = mine[torch.topk(u[mine].abs(), layout.capacity).indices]
    picked = picked[torch.randperm(picked.numel(), generator=torch.Generator().manual_seed(rank))]
    round = CODECS[values].round
    sizes = u[picked] if round is None else round(u[picked], layout.segment_of(picked), len(layout.segments))
    indices, entries = torch.zeros(layout.capacity, dtype=torch.int64), torch.zeros(layout.capacity)
    count = int(sizes.count_nonzero())
    indices[:count], entries[:count] = picked[sizes != 0], sizes[sizes != 0]
    words = torch.tensor([rank % 2, rank % 2 - 1], dtype=torch.int32)
    return SparseGrad(indices, entries, torch.tensor(count), layout.numel, words[0], words[1])


def on_device(sent):
    own = [tensor.to(DEVICE) for tensor in (sent.indices, sent.values, sent.count, sent.flags, sent.where)]
    return SparseGrad(*own[:3], sent.numel, *own[3:])


class Ranks:
    """All ranks in this process, each with its own buffers; what a rank gets can be changed on its way."""

    def __init__(self, layout, workers, wire, share=1.0):
        self.partition, self.wire = IndexPartition(layout, workers, share), wire
        channel = Channel(None, wire)
        channel.divisor = workers
        self.failed = channel.checks.failed_exchange(torch.device(DEVICE))
        self.own = [BalancedBuffers(self.partition, channel, torch.device(DEVICE)) for _ in range(workers)]

    def scatter(self, sents, sequence=4):
        made = [
            one.scatter.pack_parts(on_device(s), numbered(sequence), one.stays)
            for one, s in zip(self.own, sents, strict=True)
        ]
        return torch.stack(made)

    def answer(self, rank, rows, sent, sequence=5):
        one = self.own[rank]
        one.scatter.add_up(rows.contiguous(), rank, self.failed, numbered(1), one.sums.values, one.sums.rows)
        one.sums.choose(rank, *one.left, self.failed, numbered(1))
        return one.gather.pack_sums(
            one.sums.rows, one.sums.values, one.sums.count, on_device(sent), rank, numbered(sequence)
        )

    def rejected(self, rank, sent):
        one = self.own[rank]
        return replace(on_device(sent), indices=one.indices, values=one.values, count=one.count)


def expected_messages(partition, sents, wire):
    """What the specification sends in both rounds, entries in ascending order."""
    parts, _ = partition.split(sents)
    ranks = [BalancedMessages(partition, sent, wire) for sent in sents]
    scattered = torch.stack([own.scatter_messages(part, 4) for own, part in zip(ranks, parts, strict=True)])
    largest = []
    for rank, own in enumerate(ranks):
        sums = torch.zeros(1, partition.rows)
        for part in parts:
            sums[0].index_add_(0, part.indices[rank], part.values[rank])
        (rows, values), _ = partition.largest(sums, own.owners[rank : rank + 1], wire)
        count = int((values != 0).sum())
        order = rows[0, :count].sort().indices
        rows[0, :count], values[0, :count] = rows[0, order], values[0, order]
        part = replace(sents[rank], indices=rows[0], values=values[0], count=torch.tensor(count), numel=partition.rows)
        largest.append(own._encode(part, rank, own.back, 5))
    return scattered, torch.stack(largest)


@pytest.mark.parametrize(
    ("values", "indices", "scope", "workers", "sizes"),
    [
        *[(*FORMATS[i], workers, [63, 1, 500]) for i, workers in enumerate((1, 2, 3, 2, 3))],
        ("sign", "ef", "layer", 5, [63, 1, 500]),
        ("fp32", "ef", "layer", 3, [1]),
    ],
    ids=str,
)
def test_messages_and_results_are_those_of_the_specification(values, indices, scope, workers, sizes):
    wire, layout = Wire(values, indices), layout_of(sizes, scope)
    sents = [sent_by(rank, layout, values) for rank in range(workers)]
    assert carries_parts(wire, on_device(sents[0]), workers)
    ranks = Ranks(layout, workers, wire)
    scattered, largest = expected_messages(ranks.partition, sents, wire)
    for _ in range(2 if workers < 4 else 1):  # an exchange leaves nothing behind in the next
        made = ranks.scatter(sents)
        assert torch.equal(made.cpu(), scattered)
        answers = torch.stack([ranks.answer(rank, made[:, rank], sents[rank]).clone() for rank in range(workers)])
        assert torch.equal(answers.cpu(), largest)
    for rank, one in enumerate(Balanced().reduce_local(sents, layout, wire)):
        wanted, out = torch.empty(layout.numel), torch.full((layout.numel,), 9.0, device=DEVICE)
        one.mean.write(wanted)
        overflow = torch.zeros((), dtype=torch.int32, device=DEVICE)
        ranks.own[rank].gather.write_mean(answers, ranks.failed, out, overflow, numbered(2))
        assert torch.equal(out.cpu(), wanted)
        assert int(overflow) == int(ranks.failed) == 0
        residual = torch.randn(layout.numel, generator=torch.Generator().manual_seed(rank))
        ours = ranks.rejected(rank, sents[rank]).add_to(residual.clone().to(DEVICE))
        assert torch.equal(ours.cpu(), one.rejected.add_to(residual.clone()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_mean_in_other_dtypes_and_its_norm(dtype):
    layout, wire = layout_of([900, 77], dtype=dtype), Wire("sign", "ef")
    sents = [sent_by(rank, layout, "sign", "normal") for rank in range(3)]
    ranks = Ranks(layout, 3, wire, share=0.5)
    made = ranks.scatter(sents)
    answers = torch.stack([ranks.answer(rank, made[:, rank], sents[rank]).clone() for rank in range(3)])
    wanted, out = (torch.empty(layout.numel, dtype=dtype, device=device) for device in ("cpu", DEVICE))
    Balanced(0.5).reduce_local(sents, layout, wire)[0].mean.write(wanted)
    ranks.own[0].gather.write_mean(answers, ranks.failed, out, None, numbered(2))
    assert torch.equal(out.cpu(), wanted)
    norms = torch.tensor([1.0, 2.0, 2.0])
    factor, theirs = ranks.own[0].gather.give_norm(answers, out, norms.to(DEVICE), 2.0), give_norm(wanted, norms, 2.0)
    torch.testing.assert_close(factor.cpu(), theirs, rtol=1e-6 if dtype == torch.float32 else 1e-3, atol=0)
    torch.testing.assert_close(out.cpu(), wanted, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0)


def test_a_part_longer_than_a_piece_of_the_bitmap():
    layout, wire = layout_of([300_007, 129], density=0.001), Wire("levels", "ef")
    sents = [sent_by(rank, layout, "levels", "normal") for rank in range(2)]
    ranks = Ranks(layout, 2, wire, share=0.7)
    scattered, largest = expected_messages(ranks.partition, sents, wire)
    made = ranks.scatter(sents)
    assert ranks.own[0].scatter.pieces == 2
    assert torch.equal(made.cpu(), scattered)
    for rank in range(2):
        assert torch.equal(ranks.answer(rank, made[:, rank], sents[rank]).cpu(), largest[rank])


def test_entries_without_room_stay():
    layout, wire = layout_of([400]), Wire()
    ranks = Ranks(layout, 3, wire)
    own = ranks.partition.place(torch.arange(layout.k), 1)  # all of one owner
    sents = [sent_by(rank, layout, "fp32") for rank in range(3)]
    for rank in (0, 1):
        sents[rank] = replace(
            sents[rank], indices=own, count=torch.tensor(layout.k), values=torch.ones(layout.k) + rank
        )
    scattered, _ = expected_messages(ranks.partition, sents, wire)
    made = ranks.scatter(sents)
    assert torch.equal(made.cpu(), scattered)
    ranks.answer(1, made[:, 1], sents[1])
    stays, expected = ranks.partition.split(sents)[1], Balanced().reduce_local(sents, layout, wire)
    assert [int(stay.values.count_nonzero()) for stay in stays[:2]] == 2 * [layout.k - ranks.partition.room]
    for rank in (0, 1):
        one = ranks.own[rank]
        kept = torch.zeros(layout.numel).index_add_(0, one.stays[0].cpu(), one.stays[1].cpu())
        assert torch.equal(kept, stays[rank].densify())
    # What rank 1 had no room for, it also owns.
    residual = torch.randn(layout.numel, generator=torch.Generator().manual_seed(5))
    ours = ranks.rejected(1, sents[1]).add_to(residual.clone().to(DEVICE))
    assert torch.equal(ours.cpu(), expected[1].rejected.add_to(residual.clone()))


@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "sign"])
def test_a_sum_that_overflows_goes_as_it_is_and_leaves_nothing_behind(values):
    layout, wire = layout_of([60], density=4 / 62), Wire(values)
    sents, numbers = [], torch.tensor([3e38, 3e38, 2e38, -2e38])
    if wire.codec.round is not None:
        numbers = wire.codec.round(numbers, torch.zeros(4, dtype=torch.int64), 1)
    if values == "fp16":
        numbers[:] = 65504.0  # which sums leave, and are cut to
    for rank in range(3):
        words = torch.tensor([0, -1], dtype=torch.int32)
        picked = torch.tensor([5, 7, 20 + rank, 30 + rank])
        sents.append(SparseGrad(picked, numbers.clone(), torch.tensor(4), layout.numel, words[0], words[1]))
    ranks = Ranks(layout, 3, wire, share=3.0)
    made = ranks.scatter(sents)
    answers = torch.stack([ranks.answer(rank, made[:, rank], sents[rank]).clone() for rank in range(3)])
    out, overflow = torch.zeros(layout.numel, device=DEVICE), torch.zeros((), dtype=torch.int32, device=DEVICE)
    ranks.own[0].gather.write_mean(answers, ranks.failed, out, overflow, numbered(2))
    assert int(overflow) == (values != "fp16")
    assert all(torch.isfinite(one.values).all() for one in ranks.own)
    if values == "fp16":
        wanted = torch.empty(layout.numel)
        results = Balanced(3.0).reduce_local(sents, layout, wire)
        results[0].mean.write(wanted)
        assert torch.equal(out.cpu(), wanted)
        for rank, one in enumerate(results):
            assert torch.equal(ranks.rejected(rank, sents[rank]).densify().cpu(), one.rejected.densify())


# ---- damage ---------------------------------------------------------------------------------------------------------


def small(values, indices):
    layout, wire = layout_of([200, 43]), Wire(values, indices)
    sents = [sent_by(rank, layout, values, "normal") for rank in range(2)]
    ranks = Ranks(layout, 2, wire)
    made = ranks.scatter(sents).clone()
    return ranks, sents, made, torch.stack([ranks.answer(r, made[:, r], sents[r]).clone() for r in range(2)])


@pytest.mark.parametrize(("values", "indices"), [("fp32", "int"), ("sign", "ef"), ("levels", "int")])
def test_no_flipped_bit_makes_a_kernel_leave_its_tensors(values, indices):
    """Even if nobody had looked at the checksum, in either round; the fence looks."""
    ranks, sents, made, answers = small(values, indices)
    out, one = torch.zeros(ranks.partition.layout.numel, device=DEVICE), ranks.own[0]
    for bit in range(32 * ENTRIES, 32 * made.shape[2], 67):
        rows = made[:, 0].clone()
        rows[1, bit // 32] ^= (1 << bit % 32) - (1 << 32 if bit % 32 == 31 else 0)
        ranks.failed.zero_()
        ranks.answer(0, rows, sents[0])
        assert ((one.indices >= 0) & (one.indices < ranks.partition.layout.numel)).all()
    for bit in range(32 * ENTRIES, 32 * answers.shape[1], 43):
        rows = answers.clone()
        rows[1, bit // 32] ^= (1 << bit % 32) - (1 << 32 if bit % 32 == 31 else 0)
        ranks.failed.zero_()
        one.gather.write_mean(rows, ranks.failed, out, None, numbered(2))


@pytest.mark.parametrize("said", [-1, 10_000])
@pytest.mark.parametrize("place", [ENTRIES, HEADER], ids=["count", "index"])
@pytest.mark.parametrize("second", [False, True], ids=["to owners", "from owners"])
def test_what_does_not_exist_fails_the_exchange(second, place, said):
    ranks, sents, made, answers = small("fp32", "int")
    out = torch.zeros(ranks.partition.layout.numel, device=DEVICE)
    rows = answers if second else made[:, 0].clone()
    rows[1, place] = said
    if second:
        ranks.own[0].gather.write_mean(rows, ranks.failed, out, None, numbered(2))
    else:
        ranks.answer(0, rows, sents[0])
    assert int(ranks.failed) == (2 if second else 1)
    ranks.own[0].gather.write_mean(answers, ranks.failed, out, None, numbered(2))
    assert not out.any()  # from then on


def test_an_entry_in_the_last_row_that_is_beyond_the_gradient_fails_the_exchange():
    layout, wire = layout_of([9], density=1.0), Wire()
    assert layout.numel == 11
    partition = IndexPartition(layout, 4, 1.0)
    beyond = next(rank for rank in range(4) if int(partition.place(torch.tensor([2]), rank)) >= 11)
    sents = [sent_by(rank, layout, "fp32", "normal") for rank in range(4)]
    for second in (False, True):
        ranks = Ranks(layout, 4, wire)
        made = ranks.scatter(sents)
        rows = made[:, beyond].clone()
        if not second:
            rows[0, ENTRIES], rows[0, HEADER], rows[0, ranks.own[0].scatter.values_at] = 1, 2, 0x3F800000
        answer = ranks.answer(beyond, rows, sents[beyond]).clone()
        assert int(ranks.failed) == (not second)
        if second:
            answers = torch.stack([ranks.answer(r, made[:, r], sents[r]).clone() for r in range(4)])
            answers[beyond] = answer
            answers[beyond, HEADER + int(answer[ENTRIES]) - 1] = 2
            ranks.own[0].gather.write_mean(answers, ranks.failed, torch.zeros(11, device=DEVICE), None, numbered(2))
            assert int(ranks.failed) == 2


@pytest.mark.parametrize("where", ["none", "first", "second", "both"])
def test_of_two_rounds_the_host_hears_of_the_one_that_failed(where):
    """And otherwise of the first, whose headers tell how many entries were sent."""
    device, words = torch.device(DEVICE), torch.zeros(2, 2, HEADER + 3, dtype=torch.int32)
    status = DeviceStatus(2, device)
    for number, rows in enumerate(words):
        rows[:, 0], rows[:, 1] = 0x53500002, number
        rows[:, ENTRIES] = 10 * number + torch.arange(2)
    seal(words)
    if where in ("first", "both"):
        words[0, 1, -1] ^= 8
    if where in ("second", "both"):
        words[1, 0, FLAGS] = FAILED
        seal(words[1])
    status.begin()
    for number, rows in enumerate(words.to(device)):
        status.check_messages(rows, number + 1, again=number == 1)
    report = status.close_step()
    assert report.there(60)
    outcome = status.read(report)
    assert outcome.failed_exchange == {"none": 0, "second": 2}.get(where, 1)
    assert len(outcome.exchanges) == 1
    assert [header.entries for header in outcome.exchanges[0]] == ([10, 11] if where == "second" else [0, 1])
    assert outcome.exchanges[0][1].damaged == (where in ("first", "both"))
    assert not status._sums.any()


@pytest.mark.skipif(INTERPRETED, reason="on a GPU")
def test_nothing_waits_for_the_host_nor_allocates():
    one = Worker(ThresholdK(0.05), layout_of([300_007, 129], "global"), values="sign", device=DEVICE)
    channel, workspace = Channel(None, Wire("sign", "ef"), device=torch.device(DEVICE)), Workspace()
    channel.checks = checks = DeviceChecks(1)
    out = torch.zeros(one.layout.numel, device=DEVICE)
    status = checks.status(out.device)

    def exchange(seed):
        sent = one.send(gradient("normal", one.layout.numel, torch.float32, seed).to(DEVICE))
        torch.cuda.synchronize()

        def run():
            status.begin()
            reduced = Balanced(2.0).reduce(sent, one.layout, channel, workspace)
            reduced.mean.write(out, status)
            status.put_back(one.residual, reduced.rejected, channel.sequence)

        return run

    for seed in range(3):
        exchange(seed)()
    again = exchange(4)
    with nothing_waited_for_nor_allocated("balanced"):
        again()
    assert out.any()
