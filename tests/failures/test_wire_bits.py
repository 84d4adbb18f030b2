"""Indices and values reach the other ranks bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sparsync import AllGather
from sparsync.collectives import Channel
from sparsync.layout import Layout, Span
from sparsync.sparse import SparseGrad
from sparsync.wire import HEADER, Header, Shape, Wire
from tests.failures.checked_training import bits


def sparse(indices: Sequence[int] | Tensor, values: Tensor, numel: int, count: int | None = None) -> SparseGrad:
    words = torch.tensor([0, -1], dtype=torch.int32)
    count = values.numel() if count is None else count
    return SparseGrad(torch.as_tensor(indices), values, torch.tensor(count), numel, words[0], words[1])


def message_of(sent: SparseGrad, wire: Wire, sequence: int = 0) -> tuple[Tensor, Shape]:
    shape = Shape(sent.numel, sent.values.numel(), 1, sent.values.dtype)
    message = wire.encode(sent, torch.zeros_like, shape, wire.header(sent, sequence, 3, 7))
    assert message.nbytes == wire.bytes(shape)
    return message, shape


@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "sign", "levels"])
@pytest.mark.parametrize("numel", [2**31 - 1, 2**31, 2**31 + 10, 2**33])
def test_indices_beyond_2_31_survive_a_message(values, numel):
    indices = [0, 2**24 + 1, 2**31 - 2, numel - 3, numel - 1]
    sent = sparse(indices, torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0]), numel)
    message, shape = message_of(sent, Wire(values))
    got = Wire(values).decode(message, torch.zeros_like, shape)
    assert got.indices.tolist() == indices
    assert torch.equal(got.values, sent.values)
    assert got.numel == numel


def test_a_layout_of_more_than_2_31_entries():
    spans = [Span("a", 0, 2**31 + 10), Span("b", 2**31 + 10, 2**31)]
    layout = Layout.cut(spans, numel=2**32 + 10, scope="layer", density=1e-9)
    assert [segment.k for segment in layout.segments] == [2, 2]
    assert layout.sendable == 2**32 + 10
    assert layout.segment_of(torch.tensor([0, 2**31 + 9, 2**31 + 10, 2**32 + 9])).tolist() == [0, 0, 1, 1]
    whole = Layout.cut(spans, numel=2**32 + 10, scope="global", density=0.001)
    assert whole.k == round(0.001 * (2**32 + 10))
    assert whole.segments[0].runs() == [(0, 2**32 + 10)]
    assert AllGather().traffic(whole, Wire(), workers=2).mean_bytes == 4 * HEADER + whole.k * (8 + 4)


def test_the_sequence_number_wraps_after_2_31_exchanges():
    message, _ = message_of(sparse([1], torch.ones(1), 10), Wire(), sequence=2**31 + 5)
    assert Header(*message[:HEADER].tolist()).sequence == 5


@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "sign", "levels"])
def test_indices_beyond_2_24_are_not_rounded(values):
    indices = torch.arange(2**24 - 2, 2**24 + 6)
    sent = sparse(indices, torch.ones(8), 2**24 + 6)
    message, shape = message_of(sent, Wire(values))
    assert torch.equal(Wire(values).decode(message, torch.zeros_like, shape).indices, indices)


# Seen as fp32: signalling and quiet NaN with payloads, both infinities, -0, the smallest denormals.
ODD_WORDS = [0x7F800001, 0x7FC12345, 0x7FFFFFFF, 0x7F800000, 0x7FABCDEF, 0x00000001, 0x7FC00000, 0x00400000]


def case_odd_bits(rank: int, size: int, values: str, dtype: torch.dtype) -> None:
    indices = torch.tensor([word - 1 - rank for word in ODD_WORDS[:4]] * 2)
    wire = Wire(values)
    words = torch.tensor(ODD_WORDS, dtype=torch.int32) ^ (-0x80000000 if rank else 0)
    if values in ("sign", "levels"):  # eight times 32 signs: the packed word is the pattern itself
        lanes = torch.arange(32, dtype=torch.int32)
        content = torch.where((words.unsqueeze(1) >> lanes & 1).bool(), -1.0, 1.0).flatten()
        indices = indices.repeat(32)
    else:
        content = words.view(dtype)
    indices = indices[: content.numel()]
    sent = sparse(indices, content, 2**31 - 1)
    message, shape = message_of(sent, wire)
    channel = Channel(dist.group.WORLD, wire, 20.0)
    rows = channel.all_gather(message)
    said: list[Any] = [None] * size
    dist.all_gather_object(said, bits([message]))  # as pickled bytes: another way to the same message
    channel.close()
    own = wire.decode(rows[rank], torch.zeros_like, shape)
    assert torch.equal(own.indices, indices)
    assert bits([own.values]) == bits([content])
    assert said == [bits([row]) for row in rows]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ("fp32", torch.float32),
        ("fp32", torch.float64),
        ("sign", torch.float32),
        ("levels", torch.float32),
    ],
)
def test_bit_patterns_that_look_like_nan_are_unchanged(worlds, values, dtype):
    worlds[2].run(case_odd_bits, values=values, dtype=dtype)
