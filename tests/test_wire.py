"""Messages: what is encoded comes back bit for bit, in the size that was promised."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync.collectives.base import shape_of
from sparsync.wire import CODECS, HEADER, MAGIC, VERSION, Header, Wire
from tests.methods import KINDS, SIZES, gradient, worker


@pytest.mark.parametrize("values", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@given(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3), st.sampled_from(KINDS), st.integers(0, 99))
def test_round_trip(values, dtype, sizes, kind, seed):
    one = worker("threshold", sizes, density=0.03, dtype=dtype, values=values)
    sent = one.send(gradient(kind, one.layout.numel, dtype, seed))
    wire, shape = Wire(values), shape_of(one.layout, sent.values.dtype)
    header = wire.header(sent, sequence=7, unit=one.layout.id, digest=one.layout.digest)
    message = wire.encode(sent, one.layout.segment_of, shape, header)
    assert message.dtype == torch.int32
    assert message.nbytes == wire.bytes(shape)
    back = wire.decode(message, one.layout.segment_of, shape)
    assert torch.equal(back.indices, sent.indices)
    assert torch.equal(back.values, sent.values)
    assert torch.equal(back.count, sent.count)
    told = Header(*message[:HEADER].tolist())
    assert told == (MAGIC << 16 | VERSION, 7, one.layout.id, one.layout.digest, int(sent.count), 0, -1, 0)


@pytest.mark.parametrize(("values", "bits"), [("fp32", 64), ("fp16", 48), ("bf16", 48), ("sign", 33)])
def test_bits_per_entry(values, bits):
    one = worker("topk", [100_003], density=0.01)
    size = Wire(values).bytes(shape_of(one.layout, torch.float32)) - 4 * HEADER
    assert bits <= 8 * size / one.layout.k < bits + 0.1


@given(st.sampled_from(KINDS), st.integers(0, 99))
def test_sign_sends_one_magnitude_per_segment(kind, seed):
    one = worker("topk", [1023, 63], density=0.1, values="sign")
    grad = gradient(kind, one.layout.numel, torch.float32, seed)
    sent = one.send(grad)
    segment = one.layout.segment_of(sent.indices)
    for i in range(2):
        mine = sent.values[(segment == i) & (sent.values != 0)]
        assert mine.abs().unique().numel() <= 1
    there = sent.values != 0
    assert (torch.sign(sent.values[there]) == torch.sign(grad[sent.indices[there]])).all()


def test_unknown_values_are_refused():
    with pytest.raises(ValueError, match="values must be one of fp32, fp16, bf16, sign, got 'int8'"):
        Wire("int8")
