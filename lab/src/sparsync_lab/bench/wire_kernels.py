"""What the kernels that read messages take, and how much of that is the checksum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from sparsync.collectives.base import shape_of
from sparsync.collectives.comm.device_status import DeviceStatus
from sparsync.layout import Layout, Span
from sparsync.sparse import SparseGrad
from sparsync.wire import HEADER, Wire
from sparsync.wire.device import DeviceMessage
from sparsync_lab.bench.clock import Clock
from sparsync_lab.bench.wire import WARM_UP, WireBench, random_entries

FORMATS = (("int", "fp32"), ("ef", "fp32"), ("ef", "sign"))


@dataclass(frozen=True)
class KernelRow:
    """One format's figures, of one rank: milliseconds on the device, medians.

    ``pack_ms``: its own message. ``headers_ms``: what it takes to check the headers of all ranks alone, ``check_ms``
    with the checksums of all messages. ``decode_ms``: to read all messages and write their mean.
    """

    indices: str
    values: str
    words: int
    pack_ms: float
    headers_ms: float
    check_ms: float
    decode_ms: float

    @property
    def share(self) -> float:
        """What the checksum adds, as a share of what reading messages takes without it."""
        return (self.check_ms - self.headers_ms) / (self.headers_ms + self.decode_ms)


def measure_kernels(
    bench: WireBench,
    workers: int,
    device: torch.device,
    progress: Callable[[int], None] = lambda done: None,
    formats: Sequence[tuple[str, str]] = FORMATS,
) -> list[KernelRow]:
    """Time all formats in turn, round after round, with cold caches."""
    spans = [Span("gradient", 0, bench.entries)]
    layout = Layout.cut(spans, numel=bench.entries, scope="layer", density=bench.density)
    shape, clock = shape_of(layout, torch.float32), Clock(device)
    rng = torch.Generator().manual_seed(0)
    sents = [sent_on(layout, rng, device) for _ in range(workers)]
    out, status = torch.zeros(bench.entries, device=device), DeviceStatus(workers, device)
    kinds = [DeviceMessage(Wire(v, i), layout, shape, workers, device) for i, v in formats]
    fine, number = (torch.zeros((), dtype=torch.int32, device=device) for _ in range(2))
    every = [torch.stack([kind.pack(sent, number).clone() for sent in sents]) for kind in kinds]
    heads = [rows[:, :HEADER] for rows in every]
    times: list[list[list[float]]] = [[[] for _ in range(4)] for _ in kinds]
    for _ in range(WARM_UP + bench.rounds):
        for kind, rows, headers, own in zip(kinds, every, heads, times, strict=True):
            status.begin()
            calls = (
                partial(kind.pack, sents[0], number),
                partial(status.check_messages, headers, 1),
                partial(status.check_messages, rows, 1),
                partial(kind.write_mean, rows, fine, out, status.bad, number),
            )
            for call, taken in zip(calls, own, strict=True):
                taken.append(clock.time(call)[0])
        progress(1)
    middles = [[median(taken[WARM_UP:]) for taken in own] for own in times]
    return [KernelRow(i, v, kind.words, *own) for (i, v), kind, own in zip(formats, kinds, middles, strict=True)]


def sent_on(layout: Layout, rng: torch.Generator, device: torch.device) -> SparseGrad:
    """Return a full message's random entries, on the device."""
    sent = random_entries(layout, rng)
    assert sent.indices is not None
    parts = (sent.indices, sent.values, sent.count, sent.flags, sent.where)
    indices, values, count, flags, where = (part.to(device) for part in parts)
    return SparseGrad(indices, values, count, layout.numel, flags, where)
