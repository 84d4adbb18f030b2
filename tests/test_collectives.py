"""Collectives on real processes: what every rank gets is what ``reduce_local`` says, and costs what is promised."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from sparsync.collectives import AllGather, Balanced, Channel, ReduceByParts, balanced
from sparsync.collectives.base import Collective, OverflowFlag, Reduced, shape_of
from sparsync.collectives.comm.device_status import Report
from sparsync.collectives.partition import HostPartition, IndexPartition
from sparsync.compressors.base import flag
from sparsync.errors import PeerLost, SparsyncError
from sparsync.layout import Layout, Span
from sparsync.sparse import SparseGrad
from sparsync.wire import CODECS, HEADER, Wire
from sparsync.workspace import Workspace
from tests.methods import COLLECTIVES, PAIRS_AND_WORLDS, WORLD_IDS, gradient, worker
from tests.world import World


def result(reduced: Reduced, numel: int) -> torch.Tensor:
    out = torch.full((numel,), float("nan"))
    reduced.mean.write(out)
    return out


def case_reduce(rank: int, size: int, name: str, collective: str, codecs: list[str], indices: str = "int") -> None:
    channel = Channel(dist.group.WORLD, Wire(), deadline=30)
    for values in codecs:
        block = name == "block" and COLLECTIVES[collective].blocks and values not in ("sign", "levels")
        channel.wire = Wire(values, "block" if block else indices)
        reduce_thrice(rank, size, name, collective, values, channel)
    channel.close()


def reduce_thrice(rank: int, size: int, name: str, collective: str, values: str, channel: Channel) -> None:
    """Three steps, two where a codec rounds; every rank also plays all the others, so it knows what must come out."""
    method = COLLECTIVES[collective]
    everyone = [
        worker(
            name,
            [1, 63, 1023, 5000],
            density=0.02,
            values=values,
            hole=2,
            shared=method.shared,
            rank=r,
            whole=channel.wire.indices == "block",
        )
        for r in range(size)
    ]
    layout = everyone[0].layout
    for step in range(3 if values == "fp32" else 2):
        kinds = ("zero", "normal", "heavy", "mostly zero", "integers")
        common = 5 * gradient("heavy", layout.numel, torch.float32, step)  # so that all send some of the same entries
        own = [gradient(kinds[(r + step) % 5], layout.numel, torch.float32, 10 * step + r) for r in range(size)]
        grads = [common * (1 + 0.1 * r) + grad for r, grad in enumerate(own)]
        sents = [one.send(grad) for one, grad in zip(everyone, grads, strict=True)]
        expected = method.reduce_local(sents, layout, Wire(values))[rank]
        bound = 4 * size * torch.finfo(torch.float32).eps * sum(sent.densify().abs() for sent in sents)
        wanted = result(expected, layout.numel)
        got_reduced = method.reduce(sents[rank], layout, channel, Workspace())
        got = result(got_reduced, layout.numel)
        if collective in ("dense", "shared"):
            coarse = 2**16 if values == "bf16" else 1  # bf16 has 16 bits less
            assert ((got - wanted).abs() <= coarse * bound / size).all()
        else:
            assert torch.equal(got, wanted)
        everywhere = channel.all_gather(got.view(torch.int32))
        assert all(torch.equal(row, everywhere[0]) for row in everywhere)
        assert (got_reduced.rejected is None) == (expected.rejected is None)


@pytest.mark.parametrize(("name", "collective", "codecs", "size"), PAIRS_AND_WORLDS, ids=WORLD_IDS)
def test_law_2_reduce_is_reduce_local_bit_for_bit(worlds, size, name, collective, codecs):
    some = codecs if size < 4 else codecs[:1] + codecs[size % len(codecs) :][:1]  # every rank plays all of them
    worlds[size].run(case_reduce, name=name, collective=collective, codecs=list(some))


@pytest.mark.parametrize(("collective", "size"), [("allgather", 2), ("allgather", 3), ("balanced", 3)])
def test_law_2_holds_with_coded_indices(worlds, collective, size):
    worlds[size].run(case_reduce, name="topk", collective=collective, codecs=list(CODECS), indices="ef")


def case_bytes(rank: int, size: int, collective: str) -> tuple[int, int]:
    """Bytes handed to torch.distributed: as counted, and as seen by wrappers around its calls."""
    from sparsync.collectives.comm import channel as module

    seen = 0

    def spy(original, which):
        def call(*args, **kwargs):
            nonlocal seen
            seen += args[which].nbytes
            return original(*args, **kwargs)

        return call

    gather, reduce = module._all_gather, dist.all_reduce
    module._all_gather, dist.all_reduce = spy(gather, 1), spy(reduce, 0)
    try:
        channel = Channel(dist.group.WORLD, Wire(), deadline=30)
        one = worker("topk", [5000], density=0.02)
        COLLECTIVES[collective].reduce(one.send(torch.randn(5000)), one.layout, channel, Workspace())
        counted = channel.take_count()
        channel.close()
    finally:
        module._all_gather, dist.all_reduce = gather, reduce
    return counted, seen


def test_bytes_are_what_was_handed_over(worlds):
    one = worker("topk", [5000], density=0.02)
    message = Wire().bytes(shape_of(one.layout, torch.float32))
    assert worlds[3].run(case_bytes, collective="allgather") == [(message, message)] * 3
    assert worlds[3].run(case_bytes, collective="dense") == [(4 * HEADER + 4 * 5000,) * 2] * 3


def test_traffic():
    layout = worker("topk", [5000], density=0.02).layout
    gather = COLLECTIVES["allgather"].traffic(layout, Wire(), 4)
    assert gather.mean_bytes == gather.max_bytes == 3 * (4 * HEADER + 100 * 8)
    assert gather.rounds == 3
    dense = COLLECTIVES["dense"].traffic(layout, Wire(), 4)
    assert dense.mean_bytes == 3 * 4 * HEADER + 2 * 3 / 4 * 5000 * 4
    half = COLLECTIVES["dense"].traffic(layout, Wire("bf16"), 4)
    assert half.mean_bytes == 3 * 4 * HEADER + 2 * 3 / 4 * 5000 * 2
    assert COLLECTIVES["allgather"].traffic(layout, Wire(), 1).mean_bytes == 0


@pytest.mark.parametrize(
    ("collective", "values", "dense", "sentence"),
    [
        ("allgather", "fp32", True, "goes with collective='dense'"),
        ("dense", "sign", False, "carries fp32 or bf16 values, not 'sign'"),
        ("dense", "fp16", False, "carries fp32 or bf16 values, not 'fp16'"),
        ("shared", "fp32", False, "use it with 'random' or 'block'"),
        ("gtopk", "fp32", True, "goes with collective='dense'"),
        ("balanced", "fp32", True, "goes with collective='dense'"),
    ],
)
def test_pairs_that_make_no_sense_are_refused(collective, values, dense, sentence):
    with pytest.raises(ValueError, match=sentence):
        COLLECTIVES[collective].check(Wire(values), dense, random=False)


def test_shared_entries_are_of_few_types_and_a_collective_of_ones_own_takes_chosen_entries():
    with pytest.raises(ValueError, match="'shared' carries fp32 or bf16 values, not 'sign'"):
        COLLECTIVES["shared"].check(Wire("sign"), dense=False, random=True)

    class Own(Collective):
        pass

    Own().check(Wire(), dense=False, random=False)
    with pytest.raises(ValueError, match="goes with collective='dense', not with Own"):
        Own().check(Wire(), dense=True, random=False)


def test_sums_in_parts_carry_whole_vectors():
    ReduceByParts().check(Wire(), dense=True, random=False)
    with pytest.raises(ValueError, match="carry whole vectors, and this compressor chooses entries"):
        ReduceByParts().check(Wire(), dense=False, random=True)


def case_other_entries(rank: int, size: int) -> tuple[str, str]:
    """Rank 1 sends as many entries as the others, from other places."""
    channel, one = Channel(dist.group.WORLD, Wire(), deadline=10), worker("random", [5000], density=0.02, shared=True)
    sent = one.send(torch.randn(5000))
    if rank == 1:
        sent = replace(sent, indices=(sent.indices + 1) % 5000)
    try:
        COLLECTIVES["shared"].reduce(sent, one.layout, channel, Workspace())
        return "", ""
    except SparsyncError as error:
        return type(error).__name__, str(error)
    finally:
        channel.close()


def test_ranks_that_share_no_entries_are_told(worlds):
    for kind, text in worlds[3].run(case_other_entries):
        assert kind == "Mismatch"
        assert text.startswith("rank 1 drew other entries than rank 0")


def case_other_place(rank: int, size: int, collective: str) -> tuple[str, str]:
    """Rank 1 sends a message of the right size about another bucket."""
    channel, one = Channel(dist.group.WORLD, Wire(), deadline=10), worker("topk", [5000], density=0.02)
    layout = replace(one.layout, id=7) if rank == 1 else one.layout
    sent = one.send(torch.randn(5000))
    try:
        COLLECTIVES[collective].reduce(sent, layout, channel, Workspace())
        return "", ""
    except SparsyncError as error:
        return type(error).__name__, str(error)
    finally:
        channel.close()


@pytest.mark.parametrize("collective", ["allgather", "dense", "balanced"])
def test_law_4_ranks_at_different_buckets_all_raise(worlds, collective):
    answers = worlds[3].run(case_other_place, collective=collective)
    text = "the ranks are not at the same exchange, their unit differs (rank 0: 0, rank 1: 7, rank 2: 0)"
    assert answers == [("Mismatch", text)] * 3


def case_late(rank: int, size: int) -> float:
    channel = Channel(dist.group.WORLD, Wire(), 20.0)
    message = torch.zeros(4)
    if rank:
        time.sleep(2.5)
        channel.send(message + 7, 0)
    else:
        channel.receive(message, 1)
    channel.close()
    return float(message.sum())


def test_a_message_that_is_late_still_comes(worlds):
    assert worlds[2].run(case_late) == [28.0, 0.0]


def case_late_exchange(rank: int, size: int, collective: str) -> int:
    channel, one = Channel(dist.group.WORLD, Wire(), 20.0), worker("topk", [5000], density=0.02)
    if rank == 1:
        time.sleep(2.5)
    reduced = COLLECTIVES[collective].reduce(one.send(torch.randn(5000)), one.layout, channel, Workspace())
    mean = torch.empty(5000)
    reduced.mean.write(mean)
    channel.close()
    return int(mean.count_nonzero())


@pytest.mark.parametrize("collective", ["allgather", "balanced"])
def test_an_exchange_waits_for_a_rank_that_is_late(worlds, collective):
    counts = worlds[3].run(case_late_exchange, collective=collective)
    assert len(set(counts)) == 1
    assert counts[0] > 0


def case_failed(rank: int, size: int, collective: str) -> str:
    """Rank 1 has nothing to send but the flag that says so."""
    channel, one = Channel(dist.group.WORLD, Wire(), deadline=10), worker("topk", [5000], density=0.02)
    sent = one.send(torch.randn(5000))
    if rank == 1:
        channel.monitor.tell("rank 1: no memory")
        sent = SparseGrad.failed(one.layout.capacity, 5000, torch.float32, torch.device("cpu"))
    try:
        COLLECTIVES[collective].reduce(sent, one.layout, channel, Workspace())
        return ""
    except SparsyncError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        channel.close()


@pytest.mark.parametrize("collective", ["allgather", "gtopk", "balanced"])
def test_law_4_a_rank_that_failed_is_heard_of_everywhere(worlds, collective):
    assert worlds[3].run(case_failed, collective=collective) == ["PeerFailed: rank 1: no memory"] * 3


def case_close(rank: int, size: int) -> float:
    """Rank 1 raises the alarm instead of taking part, and stays; return how long rank 0 takes to close."""
    channel = Channel(dist.group.WORLD, Wire(), deadline=20)
    if rank:
        time.sleep(0.5)
        channel.monitor.broadcast_error(SparsyncError("rank 1 stops"))
    else:
        with pytest.raises(SparsyncError, match="rank 1 stops"):
            channel.all_gather(torch.ones(4))
        began = time.monotonic()
        channel.close()
        took = time.monotonic() - began
    dist.barrier()
    channel.close()
    return 0.0 if rank else took


def test_law_4_closing_after_an_alarm_waits_for_no_exchange():
    for finished, took in World.once(2, case_close):
        assert finished, took
        assert took < 10


class Never:
    """An event on a device whose exchange a lost rank holds up."""

    def query(self) -> bool:
        return False


def test_law_4_a_report_that_never_comes_ends_at_the_deadline():
    channel = Channel(None, Wire(), 1.0)
    with pytest.raises(PeerLost, match="no answer within 1 s"):
        channel.await_report(Report(torch.zeros(8), Never()))


@pytest.mark.parametrize(("numel", "workers"), [(1, 3), (7, 3), (100, 5), (4096, 16), (100_003, 7)])
def test_balanced_every_entry_has_one_owner(numel, workers):
    layout = Layout.cut([Span("a", 0, numel)], numel=numel, scope="global", density=0.1)
    cut, indices = IndexPartition(layout, workers, 1.0), torch.arange(numel)
    owner = cut.owner(indices)
    assert 0 <= int(owner.min()) <= int(owner.max()) < workers
    places = torch.cat([cut.place(indices[owner == rank] // workers, rank) for rank in range(workers)])
    assert torch.equal(places.sort().values, indices)


@pytest.mark.parametrize("workers", [1, 2, 3, 16, 200, 300])
@pytest.mark.parametrize("numel", [7, 100_003, 5_000_000_000])
def test_balanced_the_host_cuts_as_a_device_does(numel, workers):
    layout = Layout.cut([Span("a", 0, numel)], numel=numel, scope="global", density=min(0.3, 4000 / numel))
    picked = torch.randint(numel, (layout.capacity,), generator=torch.Generator().manual_seed(workers)).unique()
    indices, values = torch.zeros(layout.capacity, dtype=torch.int64), torch.zeros(layout.capacity)
    indices[: len(picked)], values[: len(picked)] = picked, torch.randn(len(picked))
    words = flag(-1, layout, torch.device("cpu"))
    sent = SparseGrad(indices, values, torch.tensor(len(picked)), numel, *words)
    (part,), (stays,) = HostPartition(layout, workers, 2.0).split([sent])
    (same,), (left,) = IndexPartition(layout, workers, 2.0).split([sent])
    for name in ("indices", "values", "count"):
        assert torch.equal(getattr(part, name), getattr(same, name)), name
    for a, b in ((stays.indices, left.indices), (stays.values, left.values)):
        assert torch.equal(a, b[left.values != 0])
    owners = torch.arange(workers).unsqueeze(1)
    place = IndexPartition(layout, workers, 2.0).place(part.indices, owners)
    assert torch.equal(HostPartition(layout, workers, 2.0).place(part.indices, owners), place)
    whole = HostPartition(layout, workers, 2.0).placed(part, owners)
    assert torch.equal(whole.indices, place[part.values != 0])
    assert torch.equal(torch.cat([whole.indices, stays.indices]).sort().values, picked)


@pytest.mark.parametrize("kind", [IndexPartition, HostPartition])
@pytest.mark.parametrize("step", [1, 2, 16, 64, 576])
def test_balanced_messages_are_of_one_size_whatever_the_order_of_the_tensors(step, kind):
    """The large entries may be one channel, or one layer: no owner is sent much more than the others."""
    numel, workers = 200_000, 16
    layout = Layout.cut([Span("a", 0, numel)], numel=numel, scope="global", density=0.01)
    indices = torch.arange(0, step * layout.k, step)[: layout.k] % numel
    sent = SparseGrad(
        indices, torch.ones(layout.k), torch.tensor(layout.k), numel, *flag(-1, layout, torch.device("cpu"))
    )
    (part,), (left,) = kind(layout, workers, 1.0).split([sent])
    assert int(part.count.sum()) + int(left.values.count_nonzero()) == layout.k
    assert int(part.values.count_nonzero()) == int(part.count.sum())
    assert int(left.values.count_nonzero()) < 0.02 * layout.k


def test_balanced_traffic_does_not_grow_with_the_workers():
    numel = 10_000_000
    layout = Layout.cut([Span("a", 0, numel)], numel=numel, scope="global", density=0.001)
    entry = 8 * layout.k
    for workers in (4, 16, 64, 256):
        cost = Balanced().traffic(layout, Wire(), workers)
        assert 1.5 * entry < cost.mean_bytes == cost.max_bytes < 2.5 * entry + workers * 2 * 4 * HEADER
        assert Balanced(3.0).traffic(layout, Wire(), workers).mean_bytes < 4.5 * entry + workers * 2 * 4 * HEADER
    assert AllGather().traffic(layout, Wire(), 256).mean_bytes > 100 * entry
    with pytest.raises(ValueError, match="share must be above 0, got 0"):
        Balanced(0)


def test_balanced_sends_the_largest_sums_and_keeps_the_rest():
    """Two workers agree on entry 5, which wins though each has larger ones of its own."""
    numel = 60
    layout = Layout.cut([Span("a", 0, numel)], numel=numel, scope="global", density=4 / numel)
    grads = [torch.zeros(numel), torch.zeros(numel)]
    for grad, own in zip(grads, (10, 30), strict=True):
        grad[own : own + 3], grad[5] = torch.tensor([4.0, -3.0, 2.0]), 2.5
    words = flag(-1, layout, torch.device("cpu"))
    sents = [SparseGrad(g.nonzero().view(-1), g[g != 0], torch.tensor(4), numel, *words) for g in grads]
    results = Balanced().reduce_local(sents, layout, Wire())
    total = torch.stack([part.densify() for part in results[0].mean.terms]).sum(0)
    home = torch.stack([result.rejected.densify() for result in results]).sum(0)
    assert torch.equal(total + home, grads[0] + grads[1])
    assert total[5] == 5.0
    assert int(total.count_nonzero()) <= 4


def test_balanced_does_not_go_by_the_order_of_entries():
    """A GPU gives entries in any order, and some have no room."""
    numel, workers = 20_000, 8
    layout = Layout.cut([Span("a", 0, numel)], numel=numel, scope="global", density=0.05)
    u = torch.randn(numel, generator=torch.Generator().manual_seed(3))
    chosen, words = torch.topk(u.abs(), layout.capacity).indices, flag(-1, layout, torch.device("cpu"))
    cut, found = IndexPartition(layout, workers, 1.0), []
    for seed in range(4):
        order = chosen[torch.randperm(chosen.numel(), generator=torch.Generator().manual_seed(seed))]
        (part,), (stays,) = cut.split([SparseGrad(order, u[order], torch.tensor(layout.capacity), numel, *words)])
        found.append((part.indices, part.values, stays.densify()))
    assert found[0][2].count_nonzero() > 0  # else nothing is shown
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("values", ["fp32", "fp16", "sign", "levels"])
def test_balanced_finds_the_same_without_looking_for_zeros(monkeypatch, values):
    """As on a GPU, where all owners and all rows are gone through at once."""
    numel, workers, wire = 3000, 4, Wire(values)
    layout = Layout.cut([Span("a", 0, 1000), Span("b", 1000, 2000)], numel=numel, scope="layer", density=0.02)
    words, sents = flag(-1, layout, torch.device("cpu")), []
    for rank in range(workers):
        u = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        chosen = torch.topk(u.abs(), layout.capacity).indices.sort().values
        rounded = u[chosen] if wire.codec.round is None else wire.codec.round(u[chosen], layout.segment_of(chosen), 2)
        sents.append(SparseGrad(chosen, rounded, torch.tensor(layout.capacity), numel, *words))
    given = []
    for looks in (True, False):
        if not looks:
            monkeypatch.setattr(balanced, "partition_for", lambda tensor, *about: IndexPartition(*about))
        results = Balanced().reduce_local(sents, layout, wire)
        total = torch.stack([part.densify() for part in results[0].mean.terms]).sum(0)
        home = torch.stack([result.rejected.densify() for result in results]).sum(0)
        assert torch.allclose(total + home, sum(sent.densify() for sent in sents), atol=1e-6)
        assert all(int(part.count) == int(part.values.count_nonzero()) for part in results[0].mean.terms)
        given.append(total)
    assert torch.equal(*given)  # also where signs make many sums equal
    assert given[0].count_nonzero() > 0


@pytest.mark.parametrize("kind", [IndexPartition, HostPartition])
def test_balanced_what_comes_home_twice_does_so_in_one_order(monkeypatch, kind):
    """A rank has no room for entries that it owns, and sums are left of them: a GPU adds each of both in one call."""
    monkeypatch.setattr(balanced, "partition_for", lambda tensor, *about: kind(*about))
    numel, workers = 4000, 4
    layout = Layout.cut([Span("a", 0, numel)], numel=numel, scope="global", density=0.05)
    cut, words = kind(layout, workers, 0.2), flag(-1, layout, torch.device("cpu"))
    own = cut.place(torch.arange(layout.k), 1)  # rank 1 has no room for the last of them, which the others send it
    sents = []
    for rank in range(workers):
        values = torch.randn(layout.k, generator=torch.Generator().manual_seed(rank)) + 5
        if rank != 1:
            values[: layout.k - 40] = 0
        sents.append(SparseGrad(own, values, torch.tensor(layout.k), numel, *words))
    results = Balanced(0.2).reduce_local(sents, layout, Wire())
    home = results[1].rejected
    real = home.indices[home.values != 0]
    assert len(real) - len(real.unique()) > 20
    if kind is IndexPartition:
        for indices, values in zip(home.indices, home.values, strict=True):
            real = indices[values != 0]
            assert len(real) == len(real.unique())
        assert torch.equal(home.indices[0][home.values[0] != 0].sort().values, own[cut.room :].sort().values)
    residual = torch.randn(numel, generator=torch.Generator().manual_seed(9))
    _, stays = cut.split(sents)
    expected = stays[1].add_to(residual.clone())
    sums = sum(sent.densify() - stay.densify() for sent, stay in zip(sents, stays, strict=True))
    left = sums - torch.stack([part.densify() for part in results[0].mean.terms]).sum(0)
    assert torch.equal(home.add_to(residual.clone()), expected + left)


@pytest.mark.parametrize(
    ("collective", "values"),
    [(name, values) for name in ("allgather", "gtopk", "balanced") for values in ("fp32", "bf16", "sign", "levels")],
)
def test_a_sum_that_overflows_is_seen_and_leaves_nothing_behind_that_is_not_finite(collective, values):
    """The step is then given up, and what was sent comes home."""
    numel, workers, wire = 60, 3, Wire(values)
    layout = Layout.cut([Span("a", 0, numel)], numel=numel, scope="global", density=4 / numel)
    words = flag(-1, layout, torch.device("cpu"))
    sents = []
    for rank in range(workers):
        indices, numbers = torch.tensor([5, 7, 20 + rank, 30 + rank]), torch.tensor([3e38, 3e38, 2e38, -2e38])
        if wire.codec.round is not None:
            numbers = wire.codec.round(numbers, torch.zeros_like(indices), 1)
        sents.append(SparseGrad(indices, numbers, torch.tensor(4), numel, *words))
    results = COLLECTIVES[collective].reduce_local(sents, layout, wire)
    for reduced in results:
        overflow = OverflowFlag(torch.device("cpu"))
        reduced.mean.write(torch.zeros(numel), overflow)
        assert overflow.bad == 1
        assert reduced.rejected is None or reduced.rejected.values.isfinite().all()
