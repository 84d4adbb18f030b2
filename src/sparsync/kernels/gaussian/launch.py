"""The Gaussian-k kernels, launched in order; and their buffers, which stay from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import is_
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from sparsync.kernels.candidates.launch import CHUNK, EntryLists, State
from sparsync.kernels.device import on_device_of
from sparsync.kernels.gaussian.reference import LADDER, ROUNDS, STEPS
from sparsync.kernels.memory import Memory
from sparsync.kernels.strips import BLOCK, SegmentRow, Strips, blocks_for
from sparsync.kernels.threshold.launch import take_out
from sparsync.kernels.topk import launch as topk
from sparsync.kernels.topk.launch import RadixRanges
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad

PARTIALS = 4096  # of a segment's strips that are summed at a time
BLOCKS = 8  # of a strip, 16 at most
ROOM = 4096  # entries of a region: a segment's list is cut into these
# What the first threshold is multiplied by, in two steps, to make those that may be counted, in ascending order. Two
# more stand for nothing: kernels count in powers of 2.
FACTORS = ((0.5, 0.5, 0.5, 1, 1.5, 1.5, 0, 0), (0.5, 1, 1.5, 1, 1, 1.5, 0, 0))


RUNGS = ((*LADDER[1:-1], 0, 0), (1,) * 8)  # the same of a threshold that is held
HELD = ("factor", "fallbacks")  # of a segment's state


@dataclass(frozen=True)
class GaussianKind:
    """Which Gaussian-k.

    Args:
        two_sided: which quantile of the normal distribution.
        refine: the k largest go instead of a mask that is more than 10 % off.
        carried: the mask is that of a threshold which is looked for around the last one; it may lack a third of k.
        masks: that the loop makes at most.
    """

    two_sided: bool
    refine: bool
    carried: bool
    masks: int


class GaussianLists(EntryLists):
    """Lists of what lies above a threshold, and what that threshold is found from.

    Args:
        layout: of the flat gradient.
        kind: which Gaussian-k.
        device: where it is.
    """

    def __init__(self, layout: Layout, kind: GaussianKind, device: torch.device) -> None:
        blocks = blocks_for(layout.numel, BLOCKS)
        strips = Strips((segment.runs() for segment in layout.segments), blocks)
        rows = _regions_of(layout, strips)
        super().__init__(layout, device, blocks, strips, rows, len(rows))
        self.kind = kind
        self.search = RadixRanges(layout, device) if kind.refine else None
        self.longest = max(row.strips for row in rows)  # strips of a segment
        doubles = partial(torch.zeros, device=device, dtype=torch.float64)
        self.sums, self.thresholds = doubles(2 * self.strip_count), doubles(len(rows))
        self.factors = torch.tensor(RUNGS if kind.carried else FACTORS, device=device, dtype=torch.float64)
        self.ladder = torch.tensor((LADDER, STEPS), device=device, dtype=torch.float64)
        self.fitted, self.brackets = doubles(len(rows)), doubles(2 * len(rows))
        self.carried, self.fallen = doubles(len(rows)), torch.zeros(len(rows), device=device, dtype=torch.int64)
        self._bags: list[dict[str, Tensor]] = []
        quantiles = [_quantile(row.k, row.numel, kind.two_sided) for row in rows]
        self.quantiles = torch.tensor(quantiles, device=device, dtype=torch.float64)
        words = partial(torch.zeros, device=device, dtype=torch.int32)
        self.bounds, self.counts_above = words(len(rows) * len(FACTORS[0])), words(self.strip_count * 3)

    def adopt(self, state: State) -> None:
        """Make ``state`` views of our tables, filling these from ``state`` where it holds other tensors by now."""
        names = [segment.name for segment in self.layout.segments]
        if not self.kind.refine or (self._bags and all(map(is_, map(state.__getitem__, names), self._bags))):
            return
        for field, table in zip(HELD, (self.carried, self.fallen), strict=True):
            table.copy_(torch.stack([state[name][field].to(self.device) for name in names]))
        both = zip(self.carried.unbind(), self.fallen.unbind(), strict=True)
        self._bags = [dict(zip(HELD, own, strict=True)) for own in both]
        state.update(zip(names, self._bags, strict=True))


def _regions_of(layout: Layout, strips: Strips) -> list[SegmentRow]:
    """Cut the list into regions; return every segment's row."""
    rows: list[SegmentRow] = []
    regions_before = entries = 0
    for segment, (first_strip, own_strips) in zip(layout.segments, strips.groups, strict=True):
        room = min(segment.capacity, ROOM)
        regions = -(-segment.capacity // room)
        row = SegmentRow(
            segment.k, segment.capacity, regions_before, regions, room, entries, segment.numel, first_strip, own_strips
        )
        rows.append(row)
        regions_before, entries = regions_before + regions, row.end
    return rows


def _quantile(k: int, numel: int, two_sided: bool) -> float:
    """Return how many deviations above the mean the first threshold is."""
    tail = k / numel / (2 if two_sided else 1)
    return NormalDist().inv_cdf(1 - tail) if k < numel else 0.0


def lists_of(memory: Memory, layout: Layout, kind: GaussianKind, device: torch.device) -> GaussianLists:
    """Return the buffers that live beside this memory; they are made anew when the layout changes."""
    made_for = (id(layout), kind, device)
    return memory.workspace.get(GaussianLists, made_for, lambda: GaussianLists(layout, kind, device))


def select(
    grad: Tensor,
    memory: Memory,
    layout: Layout,
    kind: GaussianKind,
    state: State,
    codec: str,
    scales: Tensor | None = None,
) -> SparseGrad:
    """Send ``GaussianK``'s entries, in three passes: one adds, two only read. ``refine`` reads segments whose mask is
    off again, once for each of a few digits of the limit and once to take out what reaches it. A threshold that is
    carried on takes three more passes, and hardly ever those.

    Args:
        kind: which Gaussian-k.
        codec: how values travel: fp32, fp16, bf16, sign or levels.
        scales: of every segment, what its gradient is multiplied by.
    """
    with on_device_of(grad):
        space = lists_of(memory, layout, kind, grad.device)
        space.adopt(state)
        _add(grad, memory, space, scales)
        _search(memory.after, space)
        _gather(memory.after, space)
        _refine(memory, space, codec)
        take_out(memory, space, codec, space.chunks, CHUNK, 4)
        return space.sent


def _add(grad: Tensor, memory: Memory, space: GaussianLists, scales: Tensor | None) -> None:
    """Add the gradient to the residual, and sum up entries and squares."""
    from sparsync.kernels.gaussian import triton as kernels

    velocity = memory.velocity
    space.launch(
        kernels.add, (space.strip_count,),
        grad, memory.before, memory.after,
        velocity.before if velocity else grad, velocity.after if velocity else grad, velocity.beta if velocity else 0.0,
        scales if scales is not None else space.values, space.strips, space.sums, space.indices, space.out_indices,
        space.out_values, space.total, space.strip_count, space.out_indices.numel(), space.entries,
        BLOCK=BLOCK, BLOCKS=space.blocks, MOMENTUM=velocity is not None, SCALED=scales is not None,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _search(after: Tensor, space: GaussianLists) -> None:
    """Find where the loop ends, or the threshold that is held, of every segment."""
    from sparsync.kernels.gaussian import held_triton as held
    from sparsync.kernels.gaussian import triton as kernels

    parts = (len(space.layout.segments),)
    piece = min(PARTIALS, max(128, 1 << (space.longest - 1).bit_length()))
    sums: dict[str, Any] = {"BLOCK": piece, "num_warps": 4 if piece < 1024 else 8, "enable_fp_fusion": False}
    space.launch(
        kernels.moments, parts,
        space.sums, space.segments, space.quantiles, space.factors, space.thresholds, space.fitted, space.carried,
        space.bounds, space.strip_count,
        CARRIED=space.kind.carried, **sums,
    )  # fmt: skip
    _count(after, space)
    if not space.kind.carried:
        space.launch(
            kernels.walk, parts,
            space.segments, space.thresholds, space.counts_above, space.choice, space.strip_count,
            MASKS=space.kind.masks, **sums,
        )  # fmt: skip
        return
    for turn in range(ROUNDS):
        space.launch(
            held.narrow, parts,
            space.segments, space.thresholds, space.counts_above, space.ladder, space.brackets, space.bounds,
            space.strip_count, FIRST=turn == 0, **sums,
        )  # fmt: skip
        _count(after, space)
    space.launch(
        held.settle, parts,
        space.segments, space.fitted, space.counts_above, space.ladder, space.brackets, space.carried, space.choice,
        space.strip_count, **sums,
    )  # fmt: skip


def _count(after: Tensor, space: GaussianLists) -> None:
    """Count what lies above the bounds."""
    from sparsync.kernels.gaussian import triton as kernels

    space.launch(
        kernels.count_above, (space.strip_count,),
        after, space.strips, space.bounds, space.counts_above, space.strip_count,
        BLOCK=BLOCK, BLOCKS=space.blocks, num_warps=4,
    )  # fmt: skip


def _gather(after: Tensor, space: GaussianLists) -> None:
    """List what lies above the last threshold."""
    from sparsync.kernels.gaussian import gather_triton as kernels

    space.launch(
        kernels.gather, (space.strip_count,),
        after, space.strips, space.segments, space.choice, space.rotation, space.counts, space.indices, space.values,
        BLOCK=BLOCK, BLOCKS=space.blocks, num_warps=4,
    )  # fmt: skip
    search = space.search
    space.launch(
        kernels.close_list, (len(space.layout.segments),),
        space.segments, space.counts, space.found, space.choice, space.given, space.peaks, space.shares, space.rotation,
        search.ranges if search else space.choice, search.fallbacks if search else space.choice,
        space.fallen,
        search.index_bits if search else 0,
        BLOCK=256, REFINE=search is not None, CARRIED=space.kind.carried, num_warps=4,
    )  # fmt: skip


def _refine(memory: Memory, space: GaussianLists, codec: str) -> None:
    """Take the k largest out of the residual where the mask was off."""
    from sparsync.kernels.gaussian import gather_triton as kernels

    search = space.search
    if search is None:
        return
    segments = len(space.layout.segments)
    topk.radix_select(memory.after, space, search)
    space.launch(
        kernels.note_limits, (segments,),
        space.choice, search.ranges, search.sums, search.rounds, segments, num_warps=4,
    )  # fmt: skip
    topk.take_out(memory, space, search, codec)
