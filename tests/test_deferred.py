"""A whole step decided on the device, against the same step decided by the host: the same results and residuals.

On the CPU the kernels are run by Triton's interpreter, in a run of its own (``TRITON_INTERPRET=1``); on a GPU as they
are. A single worker: on one GPU, NCCL cannot have more.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch

from sparsync import DGCK, AllGather, DenseAllReduce, GaussianK, Mismatch, NoCompression, ThresholdK, TopK
from sparsync.collectives import Channel
from sparsync.errors import PeerFailed
from sparsync.feedback import Correction, Feedback
from sparsync.layout import Parameter
from sparsync.reducer import Reducer
from sparsync.schedule import Constant
from sparsync.units import Bucket
from sparsync.wire import Wire
from tests.fence import fenced
from tests.methods import Dropping

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs TRITON_INTERPRET=1 or a GPU"),
]
SIZES = {"a": 2000, "small": 40, "b": 300, "c": 700}
BUCKETS = (("b", "c"), ("a", "small"))
CHOOSERS = ("kernels.workspace", "kernels.whole", "wire.post", "collectives.channel")


@pytest.fixture(autouse=True)
def within_bounds():
    """Whatever a kernel reads or writes lies within its tensors."""
    if not INTERPRETED:
        yield
        return
    with fenced() as fence:
        yield
    assert fence.looks


def plain():
    """The plain PyTorch path, whatever the device."""
    stack = ExitStack()
    for module in CHOOSERS:
        stack.enter_context(patch(f"sparsync.{module}.usable_on", lambda device: False))
    return stack


def reducer(device, compressor, *, wire=None, dtype=torch.float32, **options):
    parameters = [Parameter.of(name, torch.zeros(size, dtype=dtype)) for name, size in SIZES.items()]
    collective = options.pop("collective", DenseAllReduce() if compressor.dense else AllGather())
    small = frozenset() if compressor.dense else frozenset({"small"})
    options = {"scope": "layer", "density": Constant(compressor.density), "small": small} | options
    channel = Channel(None, wire or Wire(), 20.0, device)
    return Reducer(parameters, compressor, collective, channel, **options)


def step(one, device, grads):
    """One step; the gradients that come back."""
    buffers = [torch.cat([grads[name] for name in names]).to(device) for names in BUCKETS]
    futures = [
        one.push(Bucket(i, buffer, names, i == len(BUCKETS) - 1))
        for i, (buffer, names) in enumerate(zip(buffers, BUCKETS, strict=True))
    ]
    return torch.cat([future.wait().cpu() for future in futures])


def gradients(number, dtype, odd=None):
    rng = torch.Generator().manual_seed(number)
    grads = {name: (torch.randn(size, generator=rng) * 0.7**number).to(dtype) for name, size in SIZES.items()}
    if odd is not None:
        grads[odd[0]][7] = odd[1]
    return grads


def kept(one):
    found = {name: [one.residual(name), one.velocity(name)] for name in SIZES}
    return {name: [None if t is None else t.cpu().clone() for t in pair] for name, pair in found.items()}


def assert_same(ours, theirs):
    assert torch.equal(torch.isnan(ours), torch.isnan(theirs))
    assert torch.equal(ours.nan_to_num(0.0), theirs.nan_to_num(0.0))


METHODS = {
    "gaussian": (GaussianK(0.02), {}),
    "plain": (TopK(0.02), {}),
    "default": (TopK(0.02), {"wire": Wire("sign", "ef"), "scope": "global"}),
    "undoable": (TopK(0.02), {"transactional": True, "wire": Wire("fp16", "ef")}),
    "corrected": (TopK(0.02), {"correction": Correction(0.5, True)}),
    "dense": (NoCompression(), {"scope": "bucket"}),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("odd", [None, ("a", float("nan")), ("small", float("inf"))], ids=str)
def test_the_same_steps(name, odd, caplog):
    compressor, options = METHODS[name]
    dtype = torch.bfloat16 if name in ("default", "undoable") else torch.float32
    with plain():
        known = reducer(torch.device("cpu"), compressor, dtype=dtype, **options)
        assert not known.channel.deferred
    ours = reducer(DEVICE, compressor, dtype=dtype, **options)
    assert ours.channel.deferred
    for number in range(3):
        grads = gradients(number, dtype, odd if number == 1 else None)
        with plain():
            expected = step(known, torch.device("cpu"), grads)
        assert_same(step(ours, DEVICE, grads), expected)
    before, after = known.stats, ours.newest_stats()
    assert (after.total.entries, after.total.numel) == (before.total.entries, before.total.numel)
    assert after.step.entries == before.step.entries
    with plain():
        mine, theirs = kept(ours), kept(known)
    for name in SIZES:
        for one, other in zip(mine[name], theirs[name], strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)
    with caplog.at_level(logging.WARNING, "sparsync"):
        ours.catch_up()
    assert after.total.skipped == before.total.skipped
    for one in (ours, known):
        one.close()


def test_a_rank_that_failed_applies_nothing_and_is_heard_of_two_steps_later():
    ours = reducer(DEVICE, TopK(0.02))
    step(ours, DEVICE, gradients(0, torch.float32))
    with patch.object(TopK, "compress", side_effect=ValueError("no memory")):
        assert not step(ours, DEVICE, gradients(1, torch.float32))[: SIZES["b"] + SIZES["c"]].any()
    step(ours, DEVICE, gradients(2, torch.float32))
    with pytest.raises((PeerFailed, RuntimeError), match="no memory"):
        step(ours, DEVICE, gradients(3, torch.float32))
    ours.close()


def test_a_foreign_message_applies_nothing():
    ours = reducer(DEVICE, TopK(0.02))
    step(ours, DEVICE, gradients(0, torch.float32))
    with patch("sparsync.wire.post.MAGIC", 77):
        result = step(ours, DEVICE, gradients(1, torch.float32))
    assert not result[: SIZES["b"] + SIZES["c"]].any()
    with pytest.raises(Mismatch, match="not a message of format"):
        ours.check()
    ours.close()


def test_what_is_sent_comes_home_when_a_gradient_is_not_finite():
    ours = reducer(DEVICE, TopK(0.02))
    grads = gradients(0, torch.float32, ("c", float("nan")))
    result = step(ours, DEVICE, grads)
    assert torch.isnan(result).any()
    for name in ("a", "b"):
        assert torch.equal(ours.residual(name).cpu(), grads[name])
    ours.close()


def test_a_floor_is_looked_for_again_after_steps_that_were_undone():
    """Which of nearly equal entries go is left open, so all but a few are the same."""
    with plain():
        known = reducer(torch.device("cpu"), ThresholdK(0.02), transactional=True)
    ours = reducer(DEVICE, ThresholdK(0.02), transactional=True)
    for number in range(3):
        grads = gradients(number, torch.float32, ("b", float("inf")) if number < 2 else None)
        with plain():
            expected = step(known, torch.device("cpu"), grads)
        result = step(ours, DEVICE, grads)
    assert ours.stats.total.skipped == 2
    large = slice(SIZES["b"] + SIZES["c"], -SIZES["small"])
    assert ((result != 0) & (expected != 0))[large].sum() >= 0.9 * (expected != 0)[large].sum()
    for one in (ours, known):
        one.close()


@pytest.mark.parametrize("compressor", [ThresholdK(0.02), DGCK(0.02), TopK(0.02)], ids=str)
def test_all_is_sent_once_the_density_rises_to_1(compressor):
    ours = reducer(DEVICE, compressor, density=lambda step: 0.02 if step < 2 else 1.0)
    for number in range(3):
        step(ours, DEVICE, gradients(number, torch.float32))
    assert all(ours.residual(name).any() == 0 for name in ("a", "b", "c"))
    ours.close()


def test_what_was_applied_before_an_error_does_not_come_home():
    ours, applied = reducer(DEVICE, TopK(0.02)), 0
    for number in range(3):
        with patch.object(TopK, "compress", side_effect=ValueError("no memory")) if number == 1 else ExitStack():
            applied += step(ours, DEVICE, gradients(number, torch.float32))[: SIZES["b"]]
    with pytest.raises((PeerFailed, RuntimeError), match="no memory"):
        step(ours, DEVICE, gradients(3, torch.float32))
    came = gradients(0, torch.float32)["b"] + gradients(2, torch.float32)["b"]
    assert torch.allclose(applied + ours.residual("b").cpu(), came, atol=1e-6)
    ours.close()


def test_a_rank_without_memory_for_a_residual_says_so():
    ours = reducer(DEVICE, TopK(0.02))
    with patch.object(Feedback, "memory", side_effect=ValueError("no memory")):
        assert not step(ours, DEVICE, gradients(0, torch.float32))[: SIZES["b"] + SIZES["c"]].any()
    with pytest.raises(PeerFailed, match="no memory"):
        ours.check()
    ours.close()


def test_a_failed_rank_sends_the_dtype_that_the_others_sum():
    ours = reducer(DEVICE, NoCompression(), dtype=torch.bfloat16, scope="bucket")
    with (
        patch.object(NoCompression, "compress", side_effect=ValueError("no memory")),
        patch.object(
            Channel, "all_reduce", autospec=True, side_effect=lambda channel, tensor: summed.append(tensor) or tensor
        ),
    ):
        summed = []
        step(ours, DEVICE, gradients(0, torch.bfloat16))
    assert [tensor.dtype for tensor in summed] == [torch.bfloat16] * len(BUCKETS)
    with pytest.raises(PeerFailed, match="no memory"):
        ours.check()
    ours.close()


def test_what_a_collective_rejects_comes_home():
    ours = reducer(DEVICE, TopK(0.1), collective=Dropping())
    assert ours.channel.deferred
    grads = gradients(0, torch.float32)
    result = step(ours, DEVICE, grads)[: SIZES["b"]]
    assert result.any()
    assert torch.equal(result + ours.residual("b").cpu(), grads["b"])
    ours.close()
