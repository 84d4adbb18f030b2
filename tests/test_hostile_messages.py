"""Whatever a message holds, and whoever sealed it: no reader leaves its tensors, all end in our errors, and what a rank
keeps is what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsync import (
    AllGather,
    Balanced,
    BlockRandomK,
    Damaged,
    DenseAllReduce,
    GTopK,
    Mismatch,
    NoCompression,
    PeerFailed,
    RandomK,
    SharedIndexAllReduce,
    TopK,
)
from sparsync.collectives import Channel
from sparsync.collectives.balanced import BalancedMessages
from sparsync.collectives.base import shape_of
from sparsync.collectives.by_parts import ReduceByParts
from sparsync.collectives.partition import HostPartition
from sparsync.kernels import cpu
from sparsync.layout import Parameter
from sparsync.schedule import Constant
from sparsync.sparse import FAILED, NONFINITE, SparseGrad, _add_quotients
from sparsync.wire import CODECS, HEADER, Header, Wire, read_headers, seal
from sparsync.workspace import Workspace
from tests.failures.reducers import error_of, push_all
from tests.hostile_messages import Damage, damages, sealed
from tests.methods import reducer_of
from tests.test_host_messages import entries, layout_of, mean_of, message_of, outcome, plain

FORMATS = [(v, i) for v in CODECS for i in ("int", "ef")]
BLOCKS = [(v, "block") for v, codec in CODECS.items() if not codec.signs]  # which no loop reads, nor an owner
many = settings(max_examples=5 * settings().max_examples)
SIZES = ([1], [63, 2], [100, 23, 1], [400])
layouts = st.builds(
    layout_of, st.sampled_from(SIZES), st.sampled_from([0.02, 0.2, 1.0]), st.sampled_from(["layer", "global"])
)


@contextmanager
def bounds_checked() -> Iterator[None]:
    """Compile the loops that read messages so that an access outside their arrays raises."""
    from numba import njit

    from sparsync.kernels.balanced import cpu as balanced
    from sparsync.kernels.message import decode_cpu as loops

    assert cpu.available()
    readers = ("_low_bits", "_signed", "unpack_indices", "unpack_signs", "_add_signs", "_add_entries", "write_mean")
    with pytest.MonkeyPatch.context() as patch:
        for module, names in ((loops, readers), (balanced, ("_write", "_places"))):
            for name in names:  # those that call others last
                slow = njit(boundscheck=True, error_model="numpy")(getattr(module, name).py_func)
                patch.setattr(module, name, slow)
        yield


@pytest.fixture(autouse=True, scope="module")
def checked() -> Iterator[None]:
    pytest.importorskip("numba")
    with bounds_checked():
        yield


def outcome_of(act: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Return the pair that comes of it, or the error's text and nothing."""
    try:
        return act(*args)
    except Damaged as error:
        return str(error), None


def same(one: Any, two: Any) -> bool:
    """Whether two outcomes are the same error, or the same bits; NaN may be any."""
    if isinstance(one, str) or isinstance(two, str):
        return one == two
    return one[1] == two[1] and torch.equal(*(own[0].view(torch.float32).nan_to_num(7.0) for own in (one, two)))


@many
@given(st.sampled_from([*FORMATS, *BLOCKS]), layouts, damages(), st.integers(0, 99), st.integers(1, 3))
def test_any_message_is_read_alike_by_loops_and_without(coded, layout, damage, seed, workers):
    """As if its checksum were right: the same error, or the same numbers, all of them within the gradient."""
    wire, shape = Wire(*coded), shape_of(layout, torch.float32)
    whole = [message_of(wire, entries(layout, coded[0], seed + i), layout, shape) for i in range(workers + 1)]
    rows = torch.stack(whole[:workers])
    rows[seed % workers] = damage(rows[seed % workers], whole[-1])
    args = wire, rows, layout, shape, torch.float32
    assert same(outcome(mean_of, *args), outcome(plain, mean_of, *args))
    for row in rows:
        got, other = (outcome(decode, row, layout.segment_of, shape) for decode in (wire.decode, wire.decode_plain))
        if isinstance(got, str) or isinstance(other, str):
            assert got == other
            continue
        assert 0 <= int(got.count) <= shape.capacity
        assert ((got.indices >= 0) & (got.indices < shape.numel)).all()
        assert torch.equal(got.indices, other.indices)
        if (
            coded[1] == "block" and int(got.count) == shape.capacity
        ):  # each block within its segment, and no index twice
            assert got.indices.unique().numel() == shape.capacity
            assert (layout.segment_of(got.indices).bincount() == torch.tensor([c for c, _ in shape.slots])).all()
        assert torch.equal(got.values.nan_to_num(7.0), other.values.nan_to_num(7.0))


@many
@given(st.sampled_from([*FORMATS, *BLOCKS]), layouts, st.integers(-70, 70))
def test_a_message_of_another_length_is_refused(coded, layout, more):
    wire, shape = Wire(*coded), shape_of(layout, torch.float32)
    size = wire.bytes(shape) // 4
    rows = torch.zeros(2, max(0, size + more), dtype=torch.int32)
    if more:
        assert "words" in outcome(wire.decode, rows, layout.segment_of, shape)
        assert "words" in outcome(mean_of, wire, rows, layout, shape, torch.float32)
    if rows.shape[1] < HEADER:
        assert "words" in outcome(read_headers, rows)


def test_an_index_that_stands_twice_hides_no_overflow():
    layout = layout_of([40], 0.5)
    shape = shape_of(layout, torch.float32)
    message = message_of(Wire(), entries(layout, "fp32", 0), layout, shape)
    message[HEADER : HEADER + 2], message[HEADER + shape.capacity :] = 3, 0x7F7FFFFF
    for read in (mean_of, partial(plain, mean_of)):
        assert not read(Wire(), message.unsqueeze(0), layout, shape, torch.float32)[1]
    sent = Wire().decode_plain(message, layout.segment_of, shape)
    assert _add_quotients(torch.zeros(layout.numel), sent, 1).isinf().any()  # which is for GPUs


# ---- a whole step with a hostile peer --------------------------------------------------------------------------------


class HostileChannel(Channel):
    """Two ranks, of which the other one sends what we do, as ``damage`` leaves it; in this process."""

    def __init__(self, wire: Wire, damage: Damage) -> None:
        super().__init__(None, wire, 2.0)
        self.size, self.divisor, self.ranks, self.damage = 2, 2, range(2), damage
        self.changed = False
        self.monitor.store.ask(lambda store: store.set("cause/1", "rank 1: it lies"), 1.0)

    def _theirs(self, message: Tensor) -> Tensor:
        theirs = message.clone()
        if message.dtype == torch.int32 and message.numel() >= HEADER:
            theirs = self.damage(message.contiguous(), message.roll(1))
            self.changed = self.changed or not torch.equal(theirs, message)
        return theirs

    def all_gather(self, message: Tensor, room: Tensor | None = None) -> Tensor:
        return torch.stack([message, self._theirs(message)])

    def all_to_all(self, messages: Tensor, room: Tensor | None = None) -> Tensor:
        return self.all_gather(messages[0])

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.mul_(2)

    def send(self, message: Tensor, to: int) -> None:
        pass

    def receive(self, out: Tensor, source: int) -> Tensor:
        return out  # of which only the next call knows what we send

    def verify_pair(self, ours: Tensor, theirs: Tensor, source: int) -> Any:
        theirs.copy_(self._theirs(ours))
        return super().verify_pair(ours, theirs, source)


METHODS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "allgather": (TopK(), AllGather(), ("fp32", "fp16", "sign", "levels")),
    "balanced": (TopK(), Balanced(), ("fp32", "bf16", "sign", "levels")),
    "gtopk": (TopK(), GTopK(), ("fp32", "fp16", "sign", "levels")),
    "shared": (RandomK(), SharedIndexAllReduce(), ("fp32",)),
    "dense": (NoCompression(), DenseAllReduce(), ("fp32",)),
    "block": (BlockRandomK(), AllGather(), ("fp32", "fp16", "bf16")),
}
cases = st.sampled_from(
    [
        (name, values, i)
        for name, (_, _, some) in METHODS.items()
        for values in some
        for i in (("block",) if name == "block" else ("int", "ef"))
    ]
)


def reducer_with(name: str, values: str, indices: str, **options: Any) -> tuple[Any, HostileChannel]:
    """Return a reducer of two tensors whose peer is harmless as yet."""
    compressor, collective, _ = METHODS[name]
    channel = HostileChannel(Wire(values, indices), lambda message, other: message)
    parameters = [Parameter.of(name, torch.zeros(size)) for name, size in (("a", 300), ("b", 70))]
    options = {"scope": "layer", "density": Constant(0.1)} | options
    return reducer_of(parameters, compressor, collective, channel, **options), channel


@many
@given(cases, damages(), st.booleans(), st.booleans(), st.integers(0, 99))
def test_a_hostile_peer_ends_in_our_error_and_changes_nothing(case, damage, knows, transactional, seed):
    """Whatever it sends, with the checksum as it was or one that fits (it ``knows``): results stay ours, or all that
    was sent is back."""
    reducer, channel = reducer_with(*case, transactional=transactional)
    rng = torch.Generator().manual_seed(seed)
    first, second = ([("a", torch.randn(300, generator=rng)), ("b", torch.randn(70, generator=rng))] for _ in range(2))
    push_all(reducer, first)
    before = {name: kept.clone() for name in "ab" if (kept := reducer.residual(name)) is not None}
    channel.damage = sealed(damage) if knows else damage
    raised = error_of(push_all, reducer, second)[0] != "none"
    kind, text = error_of(reducer.check)
    state = reducer.state_dict()
    assert (raised, state["step"]) == ((True, 1) if kind != "none" else (False, 2))
    assert kind in ("none", "Damaged", "Mismatch", "PeerFailed"), text
    bad = raised or reducer.completion.bad
    assert bad or knows or not channel.changed
    for name, gradient in second if before else ():
        kept = state["residuals"][name]
        assert kept.isfinite().all()
        came_in = before[name] if transactional else before[name] + gradient
        # What a peer that knows the checksum sent is a number like others: taken out again it leaves its rounding.
        exact = transactional or not knows or case[0] not in ("balanced", "gtopk")
        if bad and exact:  # of a step that broke off, the second bucket's gradient may not have come in
            assert torch.equal(kept, came_in) or (raised and torch.equal(kept, before[name]))
    reducer.close()


def lie(**words: int) -> Damage:
    """Return what makes a sender say so in its header, checksum included."""

    def say(message: Tensor, other: Tensor) -> Tensor:
        message = message.clone()
        for name, number in words.items():
            message[Header._fields.index(name)] = number
        return seal(message)

    return say


@pytest.mark.parametrize("flags", [0, NONFINITE, FAILED])
@pytest.mark.parametrize("extra", [-2, 2, 2**31 - 1])
def test_a_culprit_that_does_not_exist_is_not_looked_up(flags: int, extra: int) -> None:
    reducer, channel = reducer_with("gtopk", "fp32", "int")
    channel.damage = lie(flags=flags, extra=extra)
    error_of(push_all, reducer, [("a", torch.randn(300)), ("b", torch.randn(70))])
    kind, text = error_of(reducer.check)
    assert (kind, text) == ("Damaged", f"a message was not read: it says that rank {extra} failed, of 2")
    reducer.close()


@pytest.mark.parametrize("where", [-1, 1, 2**31 - 1, -(2**31)])
def test_a_parameter_that_does_not_exist_is_not_looked_up(caplog: pytest.LogCaptureFixture, where: int) -> None:
    """The step is bad all the same, and nothing is lost."""
    reducer, channel = reducer_with("allgather", "fp32", "int")
    channel.damage = lie(flags=NONFINITE, where=where)
    result, _ = push_all(reducer, [("a", torch.randn(300)), ("b", torch.randn(70))])
    reducer.check()
    assert result[0].isnan()
    assert f"a parameter that does not exist ({where}) was not finite on rank 1" in caplog.text
    reducer.close()


@many
@given(damages(), st.booleans(), st.booleans(), st.integers(0, 20), st.integers(1, 40))
def test_sums_in_parts_with_a_hostile_peer(damage, knows, half, full, numel):
    """Whose values have no checksum: any numbers may come of it, but no other length, and no error but ours."""
    layout = layout_of([numel], 1.0, "global")
    channel = HostileChannel(Wire(), sealed(damage) if knows else damage)
    sent = SparseGrad.dense(torch.randn(layout.numel), *torch.tensor([0, -1], dtype=torch.int32))
    around = torch.full((layout.numel + 64,), 9.0)
    try:
        mean = ReduceByParts(half, full).reduce(sent, layout, channel, Workspace()).mean
    except (Damaged, Mismatch, PeerFailed):
        return
    mean.write(around[32:-32])
    assert (around[:32] == 9).all()
    assert (around[-32:] == 9).all()


@many
@given(st.sampled_from(FORMATS), layouts, damages(), st.integers(2, 5), st.integers(0, 99))
def test_owners_read_any_message_alike(coded, layout, damage, workers, seed):
    """Those of ``balanced``, to an owner and from all of them; with loops and without."""
    from sparsync.collectives.compiled_partition import CompiledPartition

    wire, sents = Wire(*coded), [entries(layout, coded[0], seed + i) for i in range(workers)]
    found = []
    for kind in (HostPartition, CompiledPartition):
        partition = kind(layout, workers, 1.0)
        parts, _ = partition.split(sents)
        ranks = [BalancedMessages(partition, sent, wire) for sent in sents]
        made = torch.stack([own.scatter_messages(part, 1) for own, part in zip(ranks, parts, strict=True)])
        rows = made[:, 0]
        hostile = torch.stack([damage(rows[0], rows[1]), *rows[1:]])
        answer, rest = outcome_of(ranks[0].gather_message, hostile, 0, 2)
        if rest is not None:
            assert ((rest[0] >= 0) & (rest[0] < layout.numel)).all()
        answers = [own.gather_message(made[:, i], i, 2)[0] for i, own in enumerate(ranks)]
        answers[seed % workers] = damage(answers[seed % workers], answers[0])
        around = torch.full((layout.numel + 64,), 9.0)
        error = outcome(write, ranks[0], torch.stack(answers), around[32:-32])
        assert (around[:32] == 9).all()
        assert (around[-32:] == 9).all()
        found.append((answer, error))
    (answer, error), (answer_2, error_2) = found
    assert answer == answer_2 if isinstance(answer, str) else torch.equal(answer, answer_2)
    assert isinstance(error, str) == isinstance(error_2, str)


def write(rank: BalancedMessages, answers: Tensor, out: Tensor) -> None:
    rank.mean(answers, len(answers)).write(out)
