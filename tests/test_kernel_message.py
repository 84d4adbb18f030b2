"""Messages made and read by kernels, against those of ``wire``: the same bits."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from sparsync.collectives.base import shape_of
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad, give_norm, write_mean
from sparsync.wire import CODECS, Wire
from sparsync.wire.device import TILE, DeviceMessage, carries
from tests.fence import fenced
from tests.methods import place
from tests.pairs import DEVICE, INTERPRETED, MARKS

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
        assert torch.equal(device.pack(on(sent, DEVICE), 7 + seed).cpu(), expected)
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
    device.write_mean(rows.to(DEVICE), fine, out, overflow)
    assert torch.equal(out.cpu(), whole)
    assert int(overflow) == 0
    norm = torch.tensor([1.0, 2.0, 2.0])  # of parts: 3 of all
    factor = device.give_norm(rows.to(DEVICE), out, norm.to(DEVICE), 2.0)
    expected = give_norm(whole, norm, 2.0)
    torch.testing.assert_close(factor.cpu(), expected, rtol=1e-6 if dtype == torch.float32 else 1e-3, atol=0)
    torch.testing.assert_close(out.cpu(), whole, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0)
    device.write_mean(rows.to(DEVICE), fine + 1, out, overflow)
    assert not out.any()
    assert device.give_norm(rows.to(DEVICE), out, norm.to(DEVICE), 2.0) == 2
    assert not out.any()


def test_a_mean_that_is_poisoned_is_not_multiplied():
    """Its norm is unknown; and the ranks' own entries are where they were."""
    layout, wire, shape, device = setting([900], "layer", "fp32", "int", 2)
    sents = [in_order(some(layout, "fp32", seed)) for seed in (0, 2)]
    rows = torch.stack(
        [wire.encode(s, layout.segment_of, shape, wire.header(s, 1, layout.id, layout.digest)) for s in sents]
    )
    out, fine = torch.zeros(layout.numel, device=DEVICE), torch.zeros((), dtype=torch.int32, device=DEVICE)
    device.write_mean(rows.to(DEVICE), fine, out, None)
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
