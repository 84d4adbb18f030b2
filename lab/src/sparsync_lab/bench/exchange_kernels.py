"""What the kernels of one rank take for an exchange with P workers, whose messages are at hand: there is no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from sparsync.collectives import AllGather, Balanced
from sparsync.collectives.base import shape_of
from sparsync.collectives.partition import IndexPartition
from sparsync.kernels.balanced.launch import LargestSums
from sparsync.layout import Layout, Span
from sparsync.sparse import SparseGrad
from sparsync.wire import Wire
from sparsync.wire.device import DeviceMessage
from sparsync.wire.device_parts import GatherMessage, ScatterMessages
from sparsync_lab.bench.clock import Clock
from sparsync_lab.bench.wire import WARM_UP
from sparsync_lab.bench.wire_kernels import sent_on

DISTINCT = 4  # gradients that are made; more workers send these again
WIRE = Wire("sign", "ef")
BUDGET = 1 / 60
STAGES = ("pack", "add_up", "choose", "pack_sums", "mean")
Call = Callable[[], object]


@dataclass(frozen=True)
class ExchangeRow:
    """Milliseconds on the device of every stage that a collective has, medians; ``sent``: entries of one worker."""

    collective: str
    workers: int
    entries: int
    sent: int
    stages: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.stages.values())


def measure_exchange(entries: int, workers: int, device: torch.device, rounds: int) -> list[ExchangeRow]:
    """Time both collectives, stage by stage in turn, at the densities that a 60th of dense's bytes allows."""
    clock, rng, rows = Clock(device), torch.Generator().manual_seed(0), []
    for name, collective, prepare in (("allgather", AllGather(), _gather), ("balanced", Balanced(2.0), _balanced)):
        layout = _layout_within(collective, entries, workers)
        sents = [sent_on(layout, rng, device) for _ in range(min(workers, DISTINCT))]
        stages = prepare(layout, sents, workers, device)
        times: dict[str, list[float]] = {stage: [] for stage in stages}
        for _ in range(WARM_UP + rounds):
            for stage, call in stages.items():
                times[stage].append(clock.time(call)[0])
        found = {stage: median(taken[WARM_UP:]) for stage, taken in times.items()}
        rows.append(ExchangeRow(name, workers, entries, layout.capacity, found))
    return rows


def _layout_within(collective: AllGather | Balanced, entries: int, workers: int) -> Layout:
    """Return the layout of the largest density that is within the budget, and at most 5 %."""
    dense = 8 * entries * (workers - 1) / workers

    def cut(density: float) -> Layout:
        return Layout.cut([Span("gradient", 0, entries)], numel=entries, scope="layer", density=density)

    low, high = 1e-5, 0.05
    for _ in range(20):
        middle = (low * high) ** 0.5
        fits = collective.traffic(cut(middle), WIRE, workers).mean_bytes <= BUDGET * dense
        low, high = (middle, high) if fits else (low, middle)
    return cut(low)


def _zeros(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which exchange has failed, and the number of this one."""
    return torch.zeros((), dtype=torch.int32, device=device), torch.zeros((), dtype=torch.int32, device=device)


def _gather(layout: Layout, sents: Sequence[SparseGrad], workers: int, device: torch.device) -> dict[str, Call]:
    fine, number, out = *_zeros(device), torch.zeros(layout.numel, device=device)
    message = DeviceMessage(WIRE, layout, shape_of(layout, torch.float32), workers, device)
    rows = torch.stack([message.pack(sents[rank % len(sents)], number).clone() for rank in range(workers)])
    return {
        "pack": lambda: message.pack(sents[0], number),
        "mean": lambda: message.write_mean(rows, fine, out, fine, number),
    }


def _balanced(layout: Layout, sents: Sequence[SparseGrad], workers: int, device: torch.device) -> dict[str, Call]:
    partition, (fine, number) = IndexPartition(layout, workers, 2.0), _zeros(device)
    there, back = partition.shapes(torch.float32)
    scatter = ScatterMessages(WIRE, layout, there, workers, workers, device, fine)
    gather = GatherMessage(WIRE, layout, back, workers, device, fine)
    size = workers * partition.room
    sums = LargestSums(
        size, partition.kept, partition.rows, layout.numel, workers, WIRE.values, 1, scatter.places, device
    )
    longest = max(size, layout.capacity)
    indices, values = torch.zeros(2, longest, dtype=torch.int64, device=device), torch.zeros(2, longest, device=device)
    stays, left = zip(indices.unbind(), values.unbind(), strict=True)

    def add_up(received: Tensor, owner: int) -> None:
        scatter.add_up(received, owner, fine, number, sums.values, sums.rows)

    def pack_sums(owner: int) -> Tensor:
        return gather.pack_sums(sums.rows, sums.values, sums.count, sents[0], owner, number)

    packed = [scatter.pack_parts(sent, number, stays).clone() for sent in sents]
    answers, received = [], None
    for owner in range(workers):
        received = torch.stack([packed[rank % len(packed)][owner] for rank in range(workers)])
        add_up(received, owner)
        sums.choose(owner, *left, fine, number)
        answers.append(pack_sums(owner).clone())
    rows, out, last = torch.stack(answers), torch.zeros(layout.numel, device=device), workers - 1
    assert received is not None
    return {
        "pack": lambda: scatter.pack_parts(sents[0], number, stays),
        "add_up": lambda: add_up(received, last),
        "choose": lambda: sums.choose(last, *left, fine, number),
        "pack_sums": lambda: pack_sums(last),
        "mean": lambda: gather.write_mean(rows, fine, out, fine, number),
    }
