"""Tables and buffers of the fused kernels for one flat gradient: made once, then every step uses the same memory."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from operator import is_
from typing import Any

import torch
from torch import Tensor

from sparsync.kernels.floors import BINS, room_for, sample_positions, target_for
from sparsync.kernels.launcher import Launcher
from sparsync.kernels.memory import Memory
from sparsync.layout import Layout, locate
from sparsync.sparse import SparseGrad

MOST_REGIONS = 128
BLOCK = 1024  # entries
BLOCKS = 4  # of a program, 8 at most; a small gradient needs many programs instead
SMALL = 1 << 22
PASS_WARPS = 4
CHUNK = 512  # candidates looked at at once
TAKE = 256  # candidates a program takes out at once
CANDIDATES_A_REGION = 512
STATE = ("floor", "k", "left", "inflow")
CODECS = {"fp32": 0, "fp16": 1, "bf16": 2, "sign": 3, "levels": 4}
SCALED = ("sign", "levels")  # with one scale for all entries of a segment


@cache
def interpreted() -> bool:
    """Whether Triton's kernels are run by its interpreter, on the CPU: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable_on(device: torch.device) -> bool:
    """Whether Triton's kernels run there."""
    return (device.type == "cuda" or interpreted()) and _installed()


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device: make it this tensor's, where it is not."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call,no-any-return]


def usable(grad: Tensor, memory: Memory) -> bool:
    """Whether the fused kernels can take this gradient."""
    return usable_on(grad.device) and memory.after.dtype == torch.float32 and grad.is_contiguous() and grad.numel() > 0


class Workspace:
    """What the kernels need beside gradient and residual, on their device.

    Args:
        layout: of the flat gradient.
        device: where it is.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device, self.launch = layout, device, Launcher()
        self.blocks = 1 if layout.numel < SMALL else BLOCKS
        tables = _Tables(layout, BLOCK * self.blocks)
        self.strips, self.segments = _on(tables.strips, device), _on(tables.segments, device)
        self.owners, self.samples = _on(tables.owners, device), tables.samples.to(device)
        self.spans = _on([span.start for span in layout.spans], device)
        self.strip_count, self.span_count = len(tables.strips), len(layout.spans)
        self.chunks = -(-tables.room // CHUNK)
        self.takers = -(-tables.expected * 5 // 4 // TAKE)  # programs of a region
        self.regions, self.candidates = len(tables.owners), tables.candidates
        zeros = partial(torch.zeros, device=device, dtype=torch.int32)
        self.state = torch.zeros(len(layout.segments), len(STATE), device=device, dtype=torch.int64)
        self.counts = zeros(self.regions * 32)
        self.histogram = zeros(len(layout.segments) * BINS)
        self.given, self.peaks = zeros(len(layout.segments)), zeros(len(layout.segments))
        self.shares = torch.zeros(len(layout.segments), device=device, dtype=torch.int64)
        self.choice = torch.zeros(len(layout.segments) * 4, device=device, dtype=torch.int64)
        self.turn, self.found = zeros(1), zeros(self.regions)
        index = torch.int32 if layout.numel < 2**31 else torch.int64
        self.places = torch.full((self.candidates + 1,), -1, device=device, dtype=index)  # the last: what is not finite
        self.values = torch.zeros(self.candidates, device=device)
        self.out_places = torch.zeros(layout.capacity, device=device, dtype=torch.int64)
        self.out_values = torch.zeros(layout.capacity, device=device)
        self.total = torch.zeros((), device=device, dtype=torch.int64)
        self.flags = zeros(2)
        self.scales = torch.ones(len(layout.segments), device=device)
        self._names = [segment.name for segment in layout.segments]
        self._bags: list[dict[str, Tensor]] = []
        self._sent = SparseGrad(
            self.out_places, self.out_values, self.total, layout.numel, self.flags[0], self.flags[1]
        )

    def adopt(self, state: dict[str, dict[str, Tensor]]) -> bool:
        """Make ``state`` views of our table, filling that from ``state`` where it holds other tensors by now.

        Returns whether it did: then some floors may not be known yet.
        """
        names = self._names
        if self._bags and all(map(is_, map(state.__getitem__, names), self._bags)):
            return False
        rows = [torch.stack([state[name][field].to(self.device) for field in STATE]) for name in names]
        self.state.copy_(torch.stack(rows))
        self._bags = [dict(zip(STATE, row, strict=True)) for row in (r.unbind() for r in self.state.unbind())]
        state.update(zip(names, self._bags, strict=True))
        return True

    def sent(self) -> SparseGrad:
        """The message that ``finish`` left behind."""
        return self._sent


class _Tables:
    """The tables as lists: how a layout is cut into strips and regions."""

    def __init__(self, layout: Layout, size: int) -> None:
        self.strips: list[tuple[int, ...]] = []
        self.segments: list[tuple[int, ...]] = []
        self.owners: list[int] = []
        samples: list[Tensor] = []
        self.candidates = self.room = self.expected = sampled = 0
        for i, segment in enumerate(layout.segments):
            before = len(self.strips)
            for span in segment.spans:
                start = span.start // 128 * 128  # aligned, so that loads are wide
                for at in range(start, span.stop, size):
                    self.strips.append((at, max(at, span.start), min(at + size, span.stop), i))
            strips = len(self.strips) - before  # a region that no strip fills is lost to the others
            regions = max(1, min(MOST_REGIONS, target_for(segment.k) // CANDIDATES_A_REGION, strips))
            room = -(-room_for(segment.k) // regions) + (64 if regions > 1 else 0)
            if segment.k >= segment.numel:
                regions, room = 1, segment.numel
            picked = locate(sample_positions(segment.numel, torch.device("cpu")), segment.runs())
            row = (segment.k, segment.capacity, len(self.owners), regions, room, self.candidates)
            self.segments.append((*row, sampled, picked.numel(), segment.numel))
            self.owners += [i] * regions
            self.candidates += regions * room
            self.room = max(self.room, room)
            self.expected = max(self.expected, -(-min(target_for(segment.k), segment.numel) // regions))
            sampled += picked.numel()
            samples.append(picked)
        self.samples = torch.cat(samples)


def _on(rows: Sequence[object], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device).flatten()
