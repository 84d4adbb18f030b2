"""Balanced sums on the host by compiled loops, against the specification: the same parts, sums, means and leftovers."""

from __future__ import annotations

import pytest
import torch

from sparsync.collectives import Balanced, balanced, partition
from sparsync.collectives.base import OverflowFlag
from sparsync.collectives.partition import HostPartition, partition_for
from sparsync.errors import Damaged
from sparsync.feedback.residual import Feedback
from sparsync.kernels import cpu
from sparsync.layout import Layout, Parameter, Span
from sparsync.sparse import SparseGrad
from sparsync.wire import CODECS, Wire
from tests.methods import KINDS, gradient

pytest.importorskip("numba")
from sparsync.collectives.compiled_partition import CompiledPartition, MeanOfOwners
from sparsync.kernels.balanced import cpu as loops


def sents_of(layout: Layout, workers: int, values: str, kind: str) -> list[SparseGrad]:
    sents, common = [], gradient("normal", layout.numel, torch.float32, 99)
    for rank in range(workers):
        u = gradient(kind, layout.numel, torch.float32, rank) + (common if kind != "zero" else 0)
        chosen = torch.topk(u.abs(), layout.capacity).indices.sort().values
        sizes = u[chosen]
        if CODECS[values].round is not None:
            sizes = CODECS[values].round(sizes, layout.segment_of(chosen), len(layout.segments))
        words = torch.tensor([0, -1], dtype=torch.int32)
        sents.append(SparseGrad(chosen, sizes, torch.tensor(layout.capacity), layout.numel, words[0], words[1]))
    return sents


def layout_of(numel: int, density: float = 0.05) -> Layout:
    spans = [Span("a", 0, numel // 3), Span("b", numel // 3, numel - numel // 3)]
    return Layout.cut(spans, numel=numel, scope="layer", density=density)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("numel", "workers"), [(2, 1), (63, 2), (1023, 3), (100_003, 7), (100_000, 16), (5000, 300)])
def test_the_same_parts_and_the_same_largest_sums(numel, workers, kind):
    layout = layout_of(numel)
    compiled, plain = (cut(layout, workers, 0.5) for cut in (CompiledPartition, HostPartition))
    ((part,), (stays,)), ((same,), (left,)) = (
        cut.split(sents_of(layout, 1, "fp32", kind)) for cut in (compiled, plain)
    )
    assert torch.equal(part.indices, same.indices)
    assert torch.equal(part.values, same.values)
    assert torch.equal(part.count, same.count)
    assert int(stays.count) == int(left.count)
    assert torch.equal(stays.densify(), left.densify())
    for owner in {0, workers - 1}:
        rows = torch.arange(compiled.rows)
        assert torch.equal(compiled.place(rows, owner), plain.place(rows, owner))
        sums = gradient(kind, compiled.rows, torch.float32, owner).unsqueeze(0)
        sums[0, compiled.rows // 2] = torch.inf
        sums[0, plain.place(rows, owner) >= numel] = 0  # nobody can send these
        number = torch.tensor([[owner]])
        for values in ("fp32", "sign"):
            found = [cut.largest(sums.clone(), number, Wire(values)) for cut in (compiled, plain)]
            for one, two in zip(found[0][0] + found[0][1], found[1][0] + found[1][1], strict=True):
                assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("values", ["fp32", "levels"])
def test_the_same_mean_and_the_same_residual(monkeypatch, values, dtype):
    """And the loops are what a large gradient gets."""
    layout, wire, results = layout_of(100_003), Wire(values, "ef"), []
    sents = sents_of(layout, 3, values, "normal")
    for kind in (CompiledPartition, HostPartition):
        if kind is HostPartition:
            monkeypatch.setattr(cpu, "LEAST", 1 << 40)
        assert type(partition_for(sents[0].values, layout, 3, 0.5)) is kind
        ranks = [balanced.BalancedMessages(partition_for(s.values, layout, 3, 0.5), s, wire) for s in sents]
        parts, _ = ranks[0].partition.split(sents)
        rows = [own.scatter_messages(part, 0) for own, part in zip(ranks, parts, strict=True)]
        made = [own.gather_message(torch.stack([row[i] for row in rows]), i, 0) for i, own in enumerate(ranks)]
        mean = ranks[0].mean(torch.stack([message for message, _ in made]), 3)
        out = torch.full((100_003,), 9.0).to(dtype)
        flag = OverflowFlag(torch.device("cpu"))
        mean.write(out, flag)
        assert isinstance(mean, MeanOfOwners) == (kind is CompiledPartition)
        expected = torch.empty_like(out)
        reduced = Balanced(0.5).reduce_local(sents, layout, wire)
        reduced[0].mean.write(expected)
        assert torch.equal(out, expected)
        if kind is CompiledPartition:  # a row of owners may lie in two parts
            cuts = [torch.full((size,), 9.0).to(dtype) for size in (1, 33_333, 66_669)]
            done = mean.write_parts(list(zip((0, 1, 33_334), cuts, strict=True)), flag)
            assert done == (dtype == torch.float32)
            assert not done or torch.equal(torch.cat(cuts), expected)
        feedback = Feedback([Parameter.of("a", torch.empty(33_334)), Parameter.of("b", torch.empty(66_669))])
        feedback.memory("unit", layout.spans, layout.numel, torch.device("cpu")).after.copy_(
            torch.full((100_003,), 3e38)
        )
        feedback.restore_to_residual("unit", reduced[1].rejected)
        results.append((out, int(flag.bad), feedback.working("unit").clone()))
    assert all(torch.equal(one, two) for one, two in zip(results[0][::2], results[1][::2], strict=True))
    assert results[0][1] == results[1][1] == 0


def test_what_lies_outside_is_an_error_and_what_is_not_in_order_is_written():
    layout = layout_of(200_001)
    cut = CompiledPartition(layout, 4, 1.0)
    beyond = next(rank for rank in range(4) if int(HostPartition.place(cut, torch.tensor([50_000]), rank)) >= 200_001)
    rows, values = torch.arange(4 * 9).view(4, 9).flip(1) * 1300, torch.ones(4, 9)
    words = torch.tensor([0, -1], dtype=torch.int32)
    parts = SparseGrad(rows, values, torch.full((4,), 9), cut.rows, words[0], words[1])
    owners = torch.arange(4).unsqueeze(1)
    ours, theirs = torch.empty(200_001), torch.empty(200_001)
    cut.mean(parts, owners, 4).write(ours)
    HostPartition(layout, 4, 1.0).mean(parts, owners, 4).write(theirs)
    assert torch.equal(ours, theirs)
    assert ours.count_nonzero() == 36
    assert not cut.mean(parts, owners, 4).write_parts([(0, ours[:9]), (9, ours[9:])])  # entries of the first come last
    rows[beyond, 3] = 50_000
    with pytest.raises(Damaged, match="outside"):
        cut.mean(parts, owners, 4).write(ours)


def test_sums_saturate_when_entries_come_home():
    residual, big = torch.zeros(70_000), 3e38
    loops.put_back(residual, torch.tensor([5, 5, 7, 9]), torch.tensor([big, big, -big, 1.0]))
    assert residual[[5, 7, 9]].tolist() == [torch.finfo(torch.float32).max, residual[7].item(), 1.0]
    assert partition.cpu is cpu  # what decides


def test_a_sum_behind_the_gradients_end_is_an_error_before_anything_is_kept():
    """Its row exists, and its place does not: whoever sums it must not put it back into a residual."""
    layout = layout_of(65_537)
    cut = CompiledPartition(layout, 4, 0.1)
    beyond = next(r for r in range(4) if int(HostPartition.place(cut, torch.tensor([cut.rows - 1]), r)) >= 65_537)
    sums = torch.zeros(1, cut.rows)
    sums[0, -1] = 1.0
    with pytest.raises(Damaged, match="outside"):
        cut.largest(sums, torch.tensor([[beyond]]), Wire("sign", "ef"))
