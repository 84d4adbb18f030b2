"""What is beyond the range of the bucket's dtype, or of sums: kernels cut it off as the specification does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sparsync import DGCK, GaussianK, NoCompression, ThresholdK, TopK
from sparsync.collectives.base import shape_of
from sparsync.feedback import Correction
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad, give_norm, write_mean
from sparsync.value_range import HALF, largest_value
from sparsync.wire import Wire
from sparsync.wire.device import DeviceMessage
from tests.methods import Worker, place
from tests.pairs import DEVICE, INTERPRETED, MARKS, compare, layout_of, numbered, pair_of, within_bounds

__all__ = ["within_bounds"]
pytestmark = MARKS
# Ends of ranges, of what can be cut off exactly, and numbers in between; the last is in range.
EDGES = [65504.0, 65505.0, 7e4, -1e6, 4.2e9, -4.3e9, 5.4e11, -6e11, 2.0**104, -(2.0**105), 1e37, -3e38, 3.4e38, 3.0]
RANGES = {"half": torch.float16, "single": torch.float32, "bfloat": torch.bfloat16}


def filled(worker: Worker, top: float = math.inf) -> Worker:
    """Let it keep numbers of all sizes up to ``top``."""
    edges = [edge for edge in EDGES if abs(edge) < top]
    for span in worker.layout.spans:
        for i in range(span.numel):
            worker.residual[span.start + i] = edges[i % len(edges)] * (1 if i % 3 else -1)
    return worker


@pytest.mark.each_pair
@pytest.mark.parametrize("dtype", RANGES.values(), ids=RANGES)
@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "sign", "levels"])
@pytest.mark.parametrize("compressor", [ThresholdK(1.0), TopK(1.0), DGCK(1.0), TopK(0.4)], ids=str)
def test_what_is_out_of_range_stays(compressor, values, dtype):
    """Bit for bit, whatever the codec; and no more than the range has room for travels."""
    fused, plain = pair_of(compressor, [40, 15], values=values, dtype=dtype)
    filled(fused)
    filled(plain)
    for step in range(4):
        before = fused.residual.double().cpu()
        grad = torch.zeros(plain.layout.numel, dtype=dtype)
        one, two = fused.send(grad.to(DEVICE)), plain.send(grad)
        compare(fused, plain, one, two)
        assert one.values.abs().max() <= largest_value(dtype)
        assert torch.equal(one.densify().double().cpu() + fused.residual.double().cpu(), before), step


@pytest.mark.parametrize("dtype", RANGES.values(), ids=RANGES)
def test_what_is_out_of_range_stays_with_gaussian_selection(dtype):
    """Which entries go is left open here; what travels of each is not. Of the largest fp16 can cut off nothing."""
    layout = layout_of([400], GaussianK(0.05), dtype=dtype)
    fused = filled(Worker(GaussianK(0.05), layout, dtype, device=DEVICE), 5e11 if dtype == torch.float16 else math.inf)
    for _ in range(3):
        before = fused.residual.double().cpu()
        sent = fused.send(torch.zeros(layout.numel, dtype=dtype, device=DEVICE))
        assert int(sent.count) > 0
        assert sent.values.abs().max() <= largest_value(dtype)
        assert torch.equal(sent.densify().double().cpu() + fused.residual.double().cpu(), before)


@pytest.mark.parametrize("dtype", RANGES.values(), ids=RANGES)
def test_a_whole_gradient_stays_in_range(dtype):
    """With a velocity it is kept, and may leave the range that each gradient is in."""
    layout = layout_of([100, 33], NoCompression(), "global", 0, dtype)
    correction = Correction(0.5, masking=False)
    fused = filled(Worker(NoCompression(), layout, dtype, device=DEVICE, correction=correction))
    plain = filled(Worker(NoCompression(), replace(layout, _tables={}), dtype, correction=correction))
    top = min(40_000.0, torch.finfo(dtype).max)
    for step in range(4):
        grad = torch.full((layout.numel,), top if step % 2 else -top, dtype=dtype)
        before, moved = plain.residual.clone(), plain.velocity * 0.5 + grad.float()
        one = fused.send(grad.to(DEVICE))
        with specification():
            two = plain.send(grad)
        assert torch.equal(one.values.cpu(), two.values)
        assert torch.equal(fused.residual.cpu(), plain.residual)
        assert one.values.abs().max() <= largest_value(dtype)
        assert torch.equal(two.values.double() + plain.residual.double(), (before + moved).double())


def specification():
    """On the CPU, interpreted kernels would be chosen for a worker of the specification as well."""
    from unittest.mock import patch

    return patch("sparsync.kernels.path.usable_on", lambda device: False)


def messages(dtype: torch.dtype, values: str, numbers: list[float]) -> tuple[DeviceMessage, torch.Tensor, list]:
    """Return messages of as many ranks as there are numbers, each of which sends its own at the same few entries."""
    spans, numel = place([3000], 3)
    layout = Layout.cut(spans, numel=numel, scope="layer", density=0.01, dtype=dtype)
    wire, shape = Wire(values), shape_of(layout, torch.float32)
    sents = []
    for number in numbers:
        indices, entries = torch.zeros(layout.capacity, dtype=torch.int64), torch.zeros(layout.capacity)
        indices[:5], entries[:5] = torch.arange(10, 15), number * torch.tensor([1.0, -1.0, 0.5, 1.0, 0.25])
        words = torch.tensor([0, -1], dtype=torch.int32)
        sents.append(SparseGrad(indices, entries, torch.tensor(5), numel, words[0], words[1]))
    headers = [wire.header(sent, 1, layout.id, layout.digest) for sent in sents]
    rows = [wire.encode(s, layout.segment_of, shape, h) for s, h in zip(sents, headers, strict=True)]
    device = DeviceMessage(wire, layout, shape, len(numbers), torch.device(DEVICE))
    return device, torch.stack(rows).to(DEVICE), sents


@pytest.mark.parametrize("number", [HALF, 65536.0, 65600.0, math.inf, math.nan])
def test_a_mean_that_was_rounded_beyond_its_range_is_finite(number):
    """Sums of other dtypes round to more than fp16 holds; what was not finite before is not afterwards."""
    device, rows, sents = messages(torch.float16, "fp32", [number] * 3)
    whole = torch.empty(device.layout.numel, dtype=torch.float16)
    write_mean(whole, sents, 3)
    out = torch.full_like(whole, 9.0, device=DEVICE)
    fine, overflow = (torch.zeros((), dtype=torch.int32, device=DEVICE) for _ in range(2))
    device.write_mean(rows, fine, out, overflow, numbered(1))
    torch.testing.assert_close(out.cpu(), whole, rtol=0, atol=0, equal_nan=True)
    assert bool(whole.isfinite().all()) == math.isfinite(number)
    assert bool(overflow) != math.isfinite(number)


@pytest.mark.parametrize("norm", [1e4, 1e6, 1e30])
def test_a_norm_that_fp16_has_no_room_for(norm):
    """The mean is given as much of it as there is room for, and the factor says how much that was."""
    device, rows, sents = messages(torch.float16, "fp32", [1.0, 2.0])
    whole = torch.empty(device.layout.numel, dtype=torch.float16)
    write_mean(whole, sents, 2)
    before, fine = whole.clone(), torch.zeros((), dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(whole, device=DEVICE)
    device.write_mean(rows, fine, out, None, numbered(1))
    factor = device.give_norm(rows, out, torch.tensor([norm], device=DEVICE), 1.0)
    expected = give_norm(whole, torch.tensor([norm]), 1.0)
    torch.testing.assert_close(factor.cpu(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(out.cpu(), whole, rtol=2e-3, atol=0)
    assert out.isfinite().all()
    torch.testing.assert_close(out.cpu().float() / factor.cpu(), before.float(), rtol=2e-3, atol=0)
    assert INTERPRETED or out.is_cuda
