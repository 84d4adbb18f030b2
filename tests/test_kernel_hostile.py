"""Whatever a message holds, kernels stay within their tensors, and refuse what the specification refuses."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from sparsync.collectives.base import shape_of
from sparsync.collectives.comm.device_status import DeviceStatus
from sparsync.collectives.comm.header_checks import HostChecks
from sparsync.collectives.comm.store_monitor import StoreMonitor
from sparsync.errors import Damaged, SparsyncError
from sparsync.sparse import write_mean
from sparsync.wire import Wire, seal
from sparsync.wire.device import DeviceMessage
from tests.hostile_messages import damages
from tests.pairs import DEVICE, MARKS, numbered, within_bounds  # noqa: F401
from tests.test_host_messages import entries, layout_of, message_of
from tests.test_kernel_balanced import small
from tests.test_kernel_message import outcome_of

pytestmark = MARKS
FORMATS = [("fp32", "int"), ("bf16", "ef"), ("sign", "int"), ("levels", "ef"), ("fp16", "int")]
few = settings(max_examples=settings().max_examples // 2, suppress_health_check=list(HealthCheck), deadline=None)


@few
@given(st.sampled_from(FORMATS), st.sampled_from([[63, 2], [300], [8192, 100]]), damages(), st.integers(0, 9))
def test_any_messages_are_summed_within_their_tensors(coded, sizes, damage, seed):
    layout = layout_of(sizes, 0.02 if max(sizes) > 1000 else 0.1)
    wire, shape = Wire(*coded), shape_of(layout, torch.float32)
    whole = torch.stack([message_of(wire, entries(layout, coded[0], seed + i), layout, shape) for i in range(2)])
    device = DeviceMessage(wire, layout, shape, 2, torch.device(DEVICE))
    rows = torch.stack([whole[0], damage(whole[1], whole[0])])
    failed, out = torch.zeros((), dtype=torch.int32, device=DEVICE), torch.zeros(layout.numel, device=DEVICE)
    device.write_mean(rows.to(DEVICE), failed, out, None, numbered(4))
    device.give_norm(rows.to(DEVICE), out.clone(), torch.ones(1, device=DEVICE), 1.0)
    assert not device.scratch.any()
    expected = torch.empty(layout.numel)
    try:
        terms = [wire.decode_plain(row, layout.segment_of, shape) for row in rows]
        write_mean(expected, terms, 2)
        twice = any(len(own := term.indices[: int(term.count)]) > len(own.unique()) for term in terms)
        if not int(failed) and not twice:  # kernels ask for more: entries that ascend, and as many as are marked
            assert torch.equal(out.cpu().nan_to_num(7.0), expected.nan_to_num(7.0))
    except Damaged:
        assert int(failed) == 4
    failed.zero_()
    device.write_mean(whole.to(DEVICE), failed, out, None, numbered(5))  # nothing was left behind
    write_mean(expected, [wire.decode_plain(row, layout.segment_of, shape) for row in whole], 2)
    assert torch.equal(out.cpu(), expected)
    assert not failed


@few
@given(st.sampled_from(FORMATS[:4]), damages(), st.booleans())
def test_owners_read_any_message_within_their_tensors(coded, damage, second):
    ranks, sents, made, answers = small(*coded)
    one, numel = ranks.own[0], ranks.partition.layout.numel
    out, wanted = torch.zeros(numel, device=DEVICE), torch.zeros(numel, device=DEVICE)
    one.gather.write_mean(answers, ranks.failed, wanted, None, numbered(2))
    assert not ranks.failed
    rows = (answers if second else made[:, 0]).clone()
    rows[1] = damage(rows[1].cpu(), rows[0].cpu()).to(DEVICE)
    if second:
        one.gather.write_mean(rows, ranks.failed, out, None, numbered(2))
    else:
        ranks.answer(0, rows, sents[0])
        assert ((one.indices >= 0) & (one.indices < numel)).all()
    ranks.failed.zero_()
    assert torch.equal(ranks.answer(0, made[:, 0].clone(), sents[0]), answers[0])
    one.gather.write_mean(answers, ranks.failed, out, None, numbered(2))
    assert torch.equal(out, wanted)
    assert not ranks.failed


@few
@given(st.sampled_from(FORMATS), damages(), st.booleans(), st.booleans())
def test_the_device_finds_in_headers_what_the_host_finds(coded, damage, knows, again):
    layout = layout_of([63, 2], 0.1)
    wire, shape = Wire(*coded), shape_of(layout, torch.float32)
    whole = torch.stack([message_of(wire, entries(layout, coded[0], 2 * i), layout, shape) for i in range(2)])
    rows = torch.stack([whole[0], damage(whole[1], whole[0])])
    rows = seal(rows) if knows else rows
    monitor = StoreMonitor(HashStore(), 0, 1, 2.0)
    monitor.store.ask(lambda store: store.set("cause/1", "it lies"), 1.0)
    try:
        found = any(header.flags & 1 for header in HostChecks(monitor).check(rows, 5))
    except SparsyncError:
        found = None
    status = DeviceStatus(2, torch.device(DEVICE))
    if again:
        status.check_messages(whole.to(DEVICE), 4)
    status.check_messages(rows.to(DEVICE), 5, again)
    outcome = outcome_of(status)
    assert outcome.failed_exchange == (5 if found is None else 0)
    assert found is None or outcome.bad == found
