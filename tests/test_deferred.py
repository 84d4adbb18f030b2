"""A whole step decided on the device, against the same step decided by the host: the same results and residuals.

A single worker: on one GPU, NCCL cannot have more. Two take part over Gloo, which then is told to go on as NCCL
does.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, nullcontext, suppress
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from examples.every_other import EveryOther

from sparsync import DGCK, AllGather, Balanced, DenseAllReduce, GaussianK, Mismatch, NoCompression, ThresholdK, TopK
from sparsync.collectives import Channel
from sparsync.collectives.comm.device_status import Report
from sparsync.config import resolve
from sparsync.engine.bucketing import Bucket
from sparsync.engine.completion import Deferred, Immediate
from sparsync.engine.reducer import Reducer
from sparsync.errors import PeerFailed, PeerLost, SparsyncError
from sparsync.feedback import AdamRule
from sparsync.feedback.residual import Correction, Feedback
from sparsync.kernels.message.header import ENTRIES, FLAGS, HEADER, SEQUENCE, SUM
from sparsync.layout import Parameter
from sparsync.schedule import Constant
from sparsync.wire import Wire
from sparsync.wire.device import DeviceMessage
from sparsync.wire.device_parts import GatherMessage, ScatterMessages
from tests import pairs
from tests.fence import fenced
from tests.methods import reducer_of
from tests.pairs import INTERPRETED, MARKS
from tests.test_outer_loop import SPARSE as GLOBAL
from tests.test_outer_loop import Training

pytestmark = MARKS
DEVICE = torch.device(pairs.DEVICE)
SIZES = {"a": 2000, "small": 40, "b": 300, "c": 700}
BUCKETS = (("b", "c"), ("a", "small"))
THREE = (("c",), ("b",), ("a", "small"))  # the second is going to fail
KEPT = ("a", "b", "c")
CAUSES = r"no memory|not a message of format|its checksum is another one"
FIELDS = {"sequence": SEQUENCE, "count": ENTRIES, "flags": FLAGS, "checksum": SUM, "index": HEADER, "value": -1}
CHOOSERS = ("kernels.path", "wire.device", "collectives.comm.channel")


class DeferrableHalf(EveryOther):
    """The example's collective, which needs nothing from the host between its rounds."""

    deferrable = True


@pytest.fixture
def two_ranks(request):
    """Runs a case on two ranks: the kernels interpreted, messages over Gloo."""
    if not INTERPRETED:
        pytest.skip("two ranks cannot share a GPU over NCCL")
    return request.getfixturevalue("worlds")[2]  # which a run without this folder's fixtures has not


@pytest.fixture(autouse=True)
def within_bounds(request):
    """Whatever a kernel reads or writes lies within its tensors."""
    if not INTERPRETED or {"two_ranks", "ranks"} & set(request.fixturenames):
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


def reducer(device, compressor, *, wire=None, dtype=torch.float32, defers=True, **options):
    parameters = [Parameter.of(name, torch.zeros(size, dtype=dtype)) for name, size in SIZES.items()]
    collective = options.pop("collective", DenseAllReduce() if compressor.dense else AllGather())
    small = frozenset() if compressor.dense else frozenset({"small"})
    options = {"scope": "layer", "density": Constant(compressor.density), "dense_names": small} | options
    channel = Channel(options.pop("group", None), wire or Wire(), 20.0, device)
    channel.may_defer |= channel.backend == "gloo" and defers
    return reducer_of(parameters, compressor, collective, channel, **options)


def step(one, device, grads, buckets=BUCKETS):
    """One step; the gradients that come back."""
    buffers = [torch.cat([grads[name] for name in names]).to(device) for names in buckets]
    futures = [
        one.push(Bucket(i, buffer, names, i == len(buckets) - 1))
        for i, (buffer, names) in enumerate(zip(buffers, buckets, strict=True))
    ]
    return torch.cat([future.wait().cpu() for future in futures])


def named(result, buckets=THREE):
    """A step's result, by parameter."""
    names = [name for bucket in buckets for name in bucket]
    return dict(zip(names, result.split([SIZES[name] for name in names]), strict=True))


def whole_numbers(number, rank=0, odd=None):
    """Gradients whose sums have no rounding error."""
    rng = torch.Generator().manual_seed(100 * rank + number)
    grads = {name: (8 * torch.randn(size, generator=rng)).round() for name, size in SIZES.items()}
    if odd is not None:
        grads[odd[0]][7] = odd[1]
    return grads


def failing(cause):
    """This rank fails at the second bucket: it cannot compress it, or a bit of its message is flipped."""
    compress, pack = TopK.compress, DeviceMessage.pack

    def no_memory(self, grad, memory, layout, ctx, state):
        if layout.id == 1:
            raise ValueError("no memory")
        return compress(self, grad, memory, layout, ctx, state)

    def flipped(self, sent, sequence):
        message = pack(self, sent, sequence)
        message[FIELDS.get(cause, 0)] ^= 4 * (self.layout.id == 1)
        return message

    if cause == "compress":
        return patch.object(TopK, "compress", no_memory)
    return patch.object(DeviceMessage, "pack", flipped)


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
    "levels": (TopK(0.02), {"wire": Wire("levels", "ef")}),
    "balanced": (TopK(0.02), {"wire": Wire("sign", "ef"), "scope": "global", "collective": Balanced(2.0)}),
    "undoable": (TopK(0.02), {"transactional": True, "wire": Wire("fp16", "ef")}),
    "corrected": (TopK(0.02), {"correction": Correction(0.5, True)}),
    "clipped": (TopK(0.02), {"clip": 0.5, "correction": Correction(0.5, True)}),
    "dense": (NoCompression(), {"scope": "bucket"}),
    "dense-clipped": (NoCompression(), {"scope": "bucket", "clip": 0.5}),
    "dense-half": (NoCompression(), {"scope": "bucket", "clip": 0.5}),
    "dense-corrected": (NoCompression(), {"scope": "bucket", "clip": 0.5, "correction": Correction(0.5, False)}),
}
# Of a dense bfloat16 gradient the interpreter would cut off what a GPU rounds.
DTYPES = {"default": torch.bfloat16, "undoable": torch.bfloat16, "dense-half": torch.float16}


ODD = [None, ("a", float("nan")), ("small", float("inf"))]


@pytest.mark.parametrize(
    ("name", "odd"), [(name, ODD[i]) for number, name in enumerate(METHODS) for i in (0, 2 - number % 2)], ids=str
)
def test_the_same_steps(name, odd, caplog):
    compressor, options = METHODS[name]
    dtype = DTYPES.get(name, torch.float32)
    with plain():
        known = reducer(torch.device("cpu"), compressor, dtype=dtype, **options)
        assert isinstance(known.completion, Immediate)
    ours = reducer(DEVICE, compressor, dtype=dtype, **options)
    assert isinstance(ours.completion, Deferred)
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


def preconditioned(device, **options):
    """A reducer of matrices and a tensor that travels dense, for Adam."""
    shapes = {"a": (50, 40), "small": (40,), "b": (20, 15), "c": (35, 20)}
    tensors = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    options |= {"precondition": True, "beta": "own", "scope": "layer", "optimizer": torch.optim.AdamW(tensors.values())}
    plan = resolve(compressor=TopK(0.02), collective=AllGather(), **options)
    parameters = [Parameter.of(name, tensor) for name, tensor in tensors.items()]
    channel = Channel(None, Wire(), 20.0, device)
    one = Reducer(parameters, plan, channel, dense_names=plan.dense_names(tensors), device=device)
    one.rules = lambda: dict.fromkeys(shapes, AdamRule(0.01, (0.9, 0.99), 1e-8))
    return one


@pytest.mark.each_value
@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("odd", [None, ("a", float("nan")), ("small", float("inf"))], ids=str)
def test_the_same_preconditioned_steps(odd, transactional):
    with plain():
        known = preconditioned(torch.device("cpu"), transactional=transactional)
        assert isinstance(known.completion, Immediate)
    ours = preconditioned(DEVICE, transactional=transactional)
    assert isinstance(ours.completion, Deferred)
    for number in range(4):
        grads = gradients(number, torch.float32, odd if number == 1 else None)
        with plain():
            expected = step(known, torch.device("cpu"), grads)
        result = step(ours, DEVICE, grads)
        assert torch.equal(result.isnan(), expected.isnan())
        assert result.isnan().any() == (odd is not None and number == 1)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-6, equal_nan=True)
    with plain():
        mine, theirs = kept(ours), kept(known)
    assert theirs["small"][0].any()  # what rounding left
    for name in SIZES:
        for one, other in zip(mine[name], theirs[name], strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
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
    with patch("sparsync.wire.device.MAGIC", 77):
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


@pytest.mark.parametrize("kind", ["unit", "preconditioned"])
def test_a_bad_step_that_can_be_undone_shows_in_every_bucket(kind):
    """In those that were written before the last one was bad, too: another optimizer may apply them."""
    if kind == "preconditioned":
        ours = preconditioned(DEVICE, transactional=True)
    else:
        ours = reducer(DEVICE, TopK(0.02), transactional=True)
    assert isinstance(ours.completion, Deferred)
    for number, odd in enumerate([None, ("a", float("nan")), None]):
        result = step(ours, DEVICE, gradients(number, torch.float32, odd))
        first = [own[0].isnan().item() for own in named(result, BUCKETS).values()]
        assert first == 4 * [odd is not None]
    ours.check()
    assert ours.stats.total.skipped == 1
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
    ours = reducer(DEVICE, TopK(0.1), collective=DeferrableHalf())
    assert isinstance(ours.completion, Deferred)
    grads = gradients(0, torch.float32)
    result = step(ours, DEVICE, grads)[: SIZES["b"]]
    assert result.any()
    assert torch.equal(result + ours.residual("b").cpu(), grads["b"])
    ours.close()


OTHERS = ("sequence", "flags", "checksum", "index")
FAILED = pytest.mark.parametrize("cause", ["compress", "header", *FIELDS])


@FAILED
def test_from_a_failed_exchange_on_nothing_is_applied_and_all_is_kept(cause):
    ours, results = reducer(DEVICE, TopK(0.02)), []
    came = {name: torch.zeros(SIZES[name]) for name in KEPT}
    for number in range(3):
        with failing(cause) if number == 1 else nullcontext():
            results.append(named(step(ours, DEVICE, whole_numbers(number), THREE)))
        for name in KEPT:
            if not (cause == "compress" and (number, name) == (1, "b")):  # what was never taken cannot be kept
                came[name] += whole_numbers(number)[name]
    assert all(part.any() for part in results[0].values())
    assert {name for name, part in results[1].items() if part.any()} == {"c"}
    assert not any(part.any() for part in results[2].values())
    for _ in range(2):  # and so for good
        with pytest.raises((SparsyncError, RuntimeError), match=CAUSES):
            step(ours, DEVICE, whole_numbers(3), THREE)
    saved = ours.state_dict()["residuals"]
    for name in KEPT:
        applied = sum(result[name] for result in results)
        assert torch.equal(applied + ours.residual(name).cpu(), came[name])
        assert torch.equal(applied + saved[name].cpu(), came[name])
    ours.close()


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("compressor", "options"),
    [
        (TopK(0.02), {"wire": Wire("fp16", "ef")}),
        (TopK(0.02), {"wire": Wire("sign", "int")}),
        (TopK(0.02), {"wire": Wire("bf16", "int"), "collective": DeferrableHalf()}),
        (TopK(0.02), {"collective": DenseAllReduce()}),
        (NoCompression(), {"scope": "bucket", "correction": Correction(0.0)}),
    ],
    ids=["fp16", "sign", "rejected", "dense sum", "all is sent"],
)
@pytest.mark.parametrize("odd", [None, ("a", float("nan"))], ids=str)
def test_what_a_failed_exchange_sent_comes_home_bit_for_bit_and_once(compressor, options, odd):
    ours, came = reducer(DEVICE, compressor, **options), []
    for number in range(2):
        grads = gradients(number, torch.float32)
        came.append({name: grad.clone() for name, grad in grads.items()})
        if odd and number == 0:
            grads[odd[0]][7] = odd[1]
            came[0][odd[0]][7] = 0  # never enters
        with patch("sparsync.collectives.comm.channel.Channel.verify", fail_first(number)):
            result = step(ours, DEVICE, grads, THREE)
        assert result.isnan().any() if odd and number == 0 else not result.any()
    with pytest.raises(Mismatch, match="not a message of format"):
        ours.check()
    for name in KEPT:
        assert torch.equal(ours.residual(name).cpu(), came[0][name] + came[1][name])
    ours.close()


def fail_first(number):
    """The very first exchange brings none of our messages."""
    verify = Channel.verify

    def verified(channel, rows):
        if channel.sequence == 0:
            rows[:, 0] ^= 1
        return verify(channel, rows)

    return verified if number == 0 else verify


@pytest.mark.parametrize("odd", ["c", "b", "a"])
def test_a_step_that_fails_and_is_not_finite_is_not_applied_at_all(odd):
    """Wherever the bad entry is, the optimizer sees it; so what came before the failure comes home too."""
    ours, applied = reducer(DEVICE, TopK(0.02)), {name: torch.zeros(SIZES[name]) for name in KEPT}
    came = {name: torch.zeros(SIZES[name]) for name in KEPT}
    for number in range(3):
        grads = whole_numbers(number, odd=(odd, float("inf")) if number == 1 else None)
        with failing("header") if number == 1 else nullcontext():
            result = named(step(ours, DEVICE, grads, THREE))
        seen = any(part.isnan().any() for part in result.values())
        assert seen == (number == 1)
        for name in KEPT:
            came[name] += grads[name].nan_to_num(posinf=0.0)
            applied[name] += 0 if seen else result[name]
    with pytest.raises(Mismatch, match="not a message of format"):
        ours.check()
    for name in KEPT:
        assert torch.equal(applied[name] + ours.residual(name).cpu(), came[name])
    ours.close()


@FAILED
def test_a_failed_step_that_can_be_undone_is_undone_as_a_whole(cause):
    """The optimizer sees NaN, and skips what came before the failure with the rest."""
    ours = reducer(DEVICE, TopK(0.02), transactional=True, correction=Correction(0.5, True))
    step(ours, DEVICE, whole_numbers(0), THREE)
    before = kept(ours)
    with failing(cause):
        result = named(step(ours, DEVICE, whole_numbers(1), THREE))
    assert all(result[name].isnan().all() for name in ("a", "b", "small"))
    with pytest.raises((SparsyncError, RuntimeError), match=CAUSES):
        step(ours, DEVICE, whole_numbers(2), THREE)
    saved = ours.state_dict()
    for name in KEPT:
        for kind, was, now in zip(("residuals", "velocities"), before[name], kept(ours)[name], strict=True):
            assert torch.equal(now, was)
            assert torch.equal(saved[kind][name].cpu(), was)
    assert ours.stats.total.skipped == 1
    ours.close()


def case_failing(rank, size, cause, asks_early):
    """Rank 1 fails in step 1; rank 0 may ask how it went before the others do."""
    ours, results = reducer(DEVICE, TopK(0.02), group=dist.group.WORLD), []
    assert isinstance(ours.completion, Deferred)
    try:
        with fenced():
            for number in range(4):
                with failing(cause) if (rank, number) == (1, 1) else nullcontext():
                    results.append(named(step(ours, DEVICE, whole_numbers(number, rank), THREE)))
                if asks_early and (rank, number) == (0, 1):
                    ours.check()
    except (SparsyncError, RuntimeError):
        with pytest.raises(SparsyncError) as error:
            ours.check()
    residuals = {name: ours.residual(name).clone() for name in KEPT}
    ours.close()
    return results, residuals, str(error.value)


@pytest.mark.parametrize(
    "cause", ["compress", "header", "count", "value", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_two_ranks_stop_alike_and_keep_everything(two_ranks, cause):
    answers = two_ranks.run(case_failing, cause=cause, asks_early=False)
    (results, _, error), (other, _, told) = answers
    assert error == told
    assert len(results) == len(other) == 3
    for mine, theirs in zip(results, other, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in SIZES)
    assert {name for name, part in results[1].items() if part.any()} == {"c"}
    assert not any(part.any() for part in results[2].values())
    for name in KEPT:
        came = sum(whole_numbers(number, rank)[name] for number in range(3) for rank in range(2))
        if cause == "compress" and name == "b":
            came -= whole_numbers(1, 1)[name]
        residual = sum(residuals[name] for _, residuals, _ in answers)
        assert torch.equal(2 * sum(result[name] for result in results) + residual, came)


# ---- two rounds in an exchange --------------------------------------------------------------------------------------


@pytest.fixture
def ranks(request):
    """Runs a case on as many ranks as it is asked for, likewise."""
    if not INTERPRETED:
        pytest.skip("two ranks cannot share a GPU over NCCL")
    worlds = request.getfixturevalue("worlds")
    return lambda size, case, **arguments: worlds[size].run(case, **arguments)


def case_balanced(rank, size, options):
    """The same steps decided on the device and by the host."""
    options = {"collective": Balanced(1.0), "group": dist.group.WORLD, **options}
    with plain():
        known = reducer(torch.device("cpu"), TopK(0.05), defers=False, **options)
    ours, results = reducer(DEVICE, TopK(0.05), **options), []
    assert isinstance(known.completion, Immediate)
    assert isinstance(ours.completion, Deferred)
    for number in range(3):
        grads = whole_numbers(number, rank, ("a", float("nan")) if (rank, number) == (1, 1) else None)
        results.append(step(ours, DEVICE, grads))
        with plain():
            assert_same(results[number], step(known, torch.device("cpu"), grads))
    with plain():
        theirs, entries = kept(known), known.stats.total.entries
    mine = kept(ours)
    assert ours.newest_stats().total.entries == entries
    for name in KEPT:
        assert torch.equal(mine[name][0], theirs[name][0]), name
    with plain():
        known.close()
    ours.close()
    return results, mine


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"wire": Wire("fp32", "int")}),
        (3, {"wire": Wire("sign", "ef"), "scope": "global"}),
        (3, {"wire": Wire("levels", "ef"), "transactional": True}),
        (5, {"wire": Wire("fp16", "ef"), "scope": "global"}),
    ],
    ids=["2", "3", "3-undoable", "5"],
)
def test_balanced_ranks_take_the_same_steps_as_with_the_host(ranks, size, options):
    (results, _), *others = ranks(size, case_balanced, options=options)
    for other, _ in others:
        for one, two in zip(results, other, strict=True):
            assert_same(one, two)


def failing_round(cause):
    """This rank fails at the second bucket: it cannot compress it, or a bit of what it sends is flipped on its way to
    rank 0, or to all."""
    if cause == "compress":
        return failing(cause)
    kind, name, place = {
        "to an owner": (ScatterMessages, "pack_parts", (0, -1)),
        "from an owner": (GatherMessage, "pack_sums", (-1,)),
        "count": (GatherMessage, "pack_sums", (ENTRIES,)),
    }[cause]
    made = getattr(kind, name)

    def flipped(self, *arguments):
        message = made(self, *arguments)
        message[place] ^= 4 * (self.layout.id == 1)
        return message

    return patch.object(kind, name, flipped)


def case_failing_round(rank, size, cause):
    """Rank 1 fails in step 1."""
    ours, results = reducer(DEVICE, TopK(0.02), group=dist.group.WORLD, collective=Balanced()), []
    assert isinstance(ours.completion, Deferred)
    with suppress(SparsyncError, RuntimeError):
        for number in range(4):
            with failing_round(cause) if (rank, number) == (1, 1) else nullcontext():
                results.append(named(step(ours, DEVICE, whole_numbers(number, rank), THREE)))
    with pytest.raises(SparsyncError) as error:
        ours.check()
    residuals = {name: ours.residual(name).clone() for name in KEPT}
    ours.close()
    return results, residuals, str(error.value)


@pytest.mark.parametrize("cause", ["compress", "to an owner", "from an owner", "count"])
def test_whichever_round_fails_all_ranks_stop_alike_and_keep_everything(ranks, cause):
    answers = ranks(2, case_failing_round, cause=cause)
    (results, _, error), (other, _, told) = answers
    assert error == told
    assert ("failed to compress" if cause == "compress" else "its checksum is another one") in error
    assert len(results) == len(other) == 3
    for mine, theirs in zip(results, other, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in SIZES)
    assert {name for name, part in results[1].items() if part.any()} == {"c"}
    assert not any(part.any() for part in results[2].values())
    for name in KEPT:
        came = sum(whole_numbers(number, rank)[name] for number in range(3) for rank in range(2))
        if cause == "compress" and name == "b":
            came -= whole_numbers(1, 1)[name]
        residual = sum(residuals[name] for _, residuals, _ in answers)
        assert torch.equal(2 * sum(result[name] for result in results) + residual, came)


def test_a_rank_that_hears_of_a_failure_first_tells_the_others(two_ranks):
    (results, _, error), (other, _, told) = two_ranks.run(case_failing, cause="compress", asks_early=True)
    assert error == told
    assert "rank 1: failed to compress bucket 1: ValueError: no memory" in error
    assert len(results) == len(other) == 2


def case_other_exchange(rank, size):
    """Rank 1 has made an exchange more than rank 0 when step 1 begins."""
    ours, results = reducer(DEVICE, TopK(0.02), group=dist.group.WORLD), []
    for number in range(2):
        ours.channel.sequence += (rank, number) == (1, 1)
        results.append(step(ours, DEVICE, whole_numbers(number, rank)))
    with pytest.raises(Mismatch) as error:
        ours.check()
    ours.close()
    return results, str(error.value)


def test_the_device_sees_that_ranks_are_not_at_the_same_exchange(two_ranks):
    for results, error in two_ranks.run(case_other_exchange):
        assert "their sequence differs" in error
        assert results[0].any()
        assert not results[1].any()  # before any host has heard of it


def damaging_last_header():
    """A bit of what this rank gets in the last exchange of a step is flipped."""
    verify = Channel.verify

    def verified(channel, rows):
        if channel.unit.startswith("dense"):
            rows[0, ENTRIES] ^= 1
        return verify(channel, rows)

    return patch("sparsync.collectives.comm.channel.Channel.verify", verified)


def case_damaged_here_alone(rank, size):
    """In step 1 a message arrives damaged at rank 1, and whole at rank 0."""
    ours, results = reducer(DEVICE, TopK(0.02), group=dist.group.WORLD), []
    with suppress(SparsyncError, RuntimeError):
        for number in range(4):
            with damaging_last_header() if (rank, number) == (1, 1) else nullcontext():
                results.append(named(step(ours, DEVICE, whole_numbers(number, rank), THREE)))
    with pytest.raises(SparsyncError) as error:
        ours.check()
    state = ours.state_dict()
    ours.close()
    return results, type(error.value).__name__, str(error.value), state["step"]


def test_a_device_that_has_stopped_says_so_in_its_next_header(two_ranks):
    """So rank 0, which has completed the step, applies nothing of the next one."""
    (results, kind, error, steps), (other, told, same, behind) = two_ranks.run(case_damaged_here_alone)
    assert (kind, error) == (told, same)
    assert kind == "Damaged"
    assert error.endswith("steps committed: 2, by rank 0; behind: rank 1 with 1")
    assert (steps, behind) == (2, 1)
    assert results[1]["small"].any()
    assert not other[1]["small"].any()
    for later in (*results[2:], *other[2:]):
        assert not any(part.any() for part in later.values())


class Twice(AllGather):
    """Verifies headers of their own before those of the messages."""

    def reduce(self, sent, layout, channel, state):
        channel.verify(channel.gather_headers(sent, layout, state))
        return super().reduce(sent, layout, channel, state)


def test_a_collective_that_verifies_twice_is_told_so():
    one = reducer(DEVICE, TopK(0.02), collective=Twice())
    for number in range(2):
        step(one, DEVICE, whole_numbers(number))
    with pytest.raises((RuntimeError, SparsyncError), match="must do it once in each"):
        step(one, DEVICE, whole_numbers(2))


@pytest.mark.parametrize("moments", [False, True])
def test_local_steps_are_told_of_a_silent_device_before_the_deadline(moments):
    """Futures are there at once, and the device would be waited for without a limit."""
    training = Training(0, every=3, moments=moments, deadline=2.0, device=pairs.DEVICE, **GLOBAL)
    assert isinstance(training.outer.fragments[0]._reducer.completion, Deferred)
    for _ in range(5):
        training.step()
    with patch.object(Report, "there", return_value=False), pytest.raises(PeerLost, match="no answer within 2 s"):
        training.step()
    training.outer.detach()
