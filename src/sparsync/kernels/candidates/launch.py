"""The pass that candidates come from, launched; and its buffers, which stay from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import is_

import torch
from torch import Tensor

from sparsync.kernels.launcher import Launcher
from sparsync.kernels.memory import Memory
from sparsync.kernels.precondition.places import any_stack, place_strips
from sparsync.kernels.sketch import Sketched
from sparsync.kernels.strips import BLOCK, STATE, ChoiceRow, SegmentRow, Strips, blocks_for, table
from sparsync.kernels.threshold.reference import BINS, room_for, sample_positions, target_for
from sparsync.layout import Layout, locate
from sparsync.sparse import SparseGrad

MOST_REGIONS = 128
BLOCKS = 2  # of a strip, 8 at most
PASS_WARPS = 4
CHUNK = 512  # candidates looked at at once
COUNTED, COUNT_WARPS = 2 * BLOCK, 8  # candidates counted at once, and how
TAKE = 256  # candidates a program takes out at once
CANDIDATES_A_REGION = 512

State = dict[str, dict[str, Tensor]]


class EntryLists:
    """Lists of what kernels found in a gradient, a segment's list in several regions; and the message made of them.

    Args:
        layout: of the flat gradient.
        device: where it is.
        blocks: of a strip.
        strips: the gradient, cut.
        rows: the segments, with their regions.
        counters: how many counters there are.
    """

    def __init__(
        self, layout: Layout, device: torch.device, blocks: int, strips: Strips, rows: list[SegmentRow], counters: int
    ) -> None:
        self.layout, self.device, self.launch, self.blocks = layout, device, Launcher(), blocks
        owners = [i for i, row in enumerate(rows) for _ in range(row.regions)]
        self.strips, self.segments, self.owners = (table(rows, device) for rows in (strips.rows, rows, owners))
        self.spans, self.span_count = table([span.start for span in layout.spans], device), len(layout.spans)
        self.strip_count, self.regions, self.entries = len(strips.rows), len(owners), rows[-1].end
        self.chunks = -(-max(row.room for row in rows) // CHUNK)  # of a region, at most
        parts = len(layout.segments)
        zeros = partial(torch.zeros, device=device, dtype=torch.int32)
        self.counts, self.found = zeros(counters * 32), zeros(self.regions)
        self.given, self.peaks, self.shares = zeros(parts), zeros(parts), zeros(parts, dtype=torch.int64)
        self.choice, self.rotation = zeros(parts * len(ChoiceRow._fields), dtype=torch.int64), zeros(1)
        index = torch.int32 if layout.numel < 2**31 else torch.int64
        self.indices = torch.full((self.entries + 1,), -1, device=device, dtype=index)  # the last: what is not finite
        self.values = torch.zeros(self.entries, dtype=torch.float32, device=device)
        self.out_indices = zeros(layout.capacity, dtype=torch.int64)
        self.out_values = torch.zeros(layout.capacity, dtype=torch.float32, device=device)
        self.total, self.flags = zeros((), dtype=torch.int64), zeros(2)
        # The message that the last kernel leaves behind.
        self.sent = SparseGrad(
            self.out_indices, self.out_values, self.total, layout.numel, self.flags[0], self.flags[1]
        )


class CandidateLists(EntryLists):
    """The lists of candidates, the thresholds they reach, and what the next ones are made of.

    Args:
        layout: of the flat gradient.
        device: where it is.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        blocks = blocks_for(layout.numel, BLOCKS)
        strips = _strips_of(layout, blocks)
        rows, samples = _regions_of(layout, strips)
        super().__init__(layout, device, blocks, strips, rows, sum(row.regions for row in rows))
        self.samples = samples.to(device)
        expected = max(-(-min(target_for(row.k), row.numel) // row.regions) for row in rows)
        self.takers = -(-expected * 5 // 4 // TAKE)  # programs of a region
        parts = len(rows)
        self.state = torch.zeros(parts, len(STATE), device=device, dtype=torch.int64)
        self.histogram = torch.zeros(parts * BINS, device=device, dtype=torch.int32)
        self.tickets = torch.zeros(parts, device=device, dtype=torch.int32)  # regions that are counted
        self.scales = torch.ones(parts, dtype=torch.float32, device=device)
        self._names = [segment.name for segment in layout.segments]
        self._bags: list[dict[str, Tensor]] = []

    def adopt(self, state: State) -> bool:
        """Make ``state`` views of our table, filling that from ``state`` where it holds other tensors by now.

        Returns whether it did: then some thresholds may not be known yet.
        """
        names = self._names
        if self._bags and all(map(is_, map(state.__getitem__, names), self._bags)):
            return False
        rows = [torch.stack([state[name][field].to(self.device) for field in STATE]) for name in names]
        self.state.copy_(torch.stack(rows))
        self._bags = [dict(zip(STATE, row, strict=True)) for row in (r.unbind() for r in self.state.unbind())]
        state.update(zip(names, self._bags, strict=True))
        return True


class CandidatePlaces:
    """Where the strips of a gradient that is preconditioned are among the moments."""

    def __init__(self, space: CandidateLists, tensors: Sequence[Sketched]) -> None:
        self.space, self.tensors, self.stacked = space, tensors, any_stack(tensors)
        self.table = table(place_strips(_strips_of(space.layout, space.blocks).rows, tensors), space.device)


def _strips_of(layout: Layout, blocks: int) -> Strips:
    """Return strips that each lie in one parameter."""
    return Strips(([(span.start, span.stop) for span in segment.spans] for segment in layout.segments), blocks)


def _regions_of(layout: Layout, strips: Strips) -> tuple[list[SegmentRow], Tensor]:
    """Cut the list into regions; return every segment's row, and the places of their samples."""
    rows: list[SegmentRow] = []
    samples: list[Tensor] = []
    regions_before = entries = sampled = 0
    for segment, (first_strip, own_strips) in zip(layout.segments, strips.groups, strict=True):
        # A region that no strip fills is lost to the others.
        regions = max(1, min(MOST_REGIONS, target_for(segment.k) // CANDIDATES_A_REGION, own_strips))
        room = -(-room_for(segment.k) // regions) + (64 if regions > 1 else 0)
        if segment.k >= segment.numel:
            regions, room = 1, segment.numel
        picked = locate(sample_positions(segment.numel, torch.device("cpu")), segment.runs())
        row = SegmentRow(
            segment.k, segment.capacity, regions_before, regions, room, entries, segment.numel,
            first_strip, own_strips, sampled, picked.numel(),
        )  # fmt: skip
        rows.append(row)
        samples.append(picked)
        regions_before, entries, sampled = regions_before + regions, row.end, sampled + picked.numel()
    return rows, torch.cat(samples)


def candidates_of(memory: Memory, layout: Layout, device: torch.device) -> CandidateLists:
    """Return the buffers that live beside this memory; they are made anew when the layout changes."""
    return memory.workspace.get(CandidateLists, (id(layout), device), lambda: CandidateLists(layout, device))


def collect(grad: Tensor, memory: Memory, space: CandidateLists, scales: Tensor | None, zero: bool) -> None:
    """Launch the pass over the gradient, which makes the update that ``memory`` asks for, and collects candidates.

    Args:
        scales: of every segment, what its gradient is multiplied by.
        zero: clear the gradient in the same pass.
    """
    from sparsync.kernels.candidates.triton import collect as kernel

    velocity, update, strips = memory.velocity, memory.update, space.strip_count
    kept, places, stacked = velocity or update, space.strips, False
    tables: tuple[Tensor | float, ...] = (*(6 * [space.scales]), 0.0)
    if update is not None:
        assert velocity is None
        made_for, make = (id(space), id(update.tensors)), partial(CandidatePlaces, space, update.tensors)
        own, t = memory.workspace.get(CandidatePlaces, made_for, make), update.tables
        places, stacked = own.table, own.stacked
        tables = (t.sizes, t.rates, t.eps, t.betas, t.shares, t.kept, t.limit)
    space.launch(
        kernel, (strips,), grad, memory.before, memory.after,
        kept.before if kept else grad, kept.after if kept else grad, velocity.beta if velocity else 0.0,
        scales if scales is not None else space.scales, places, *tables, space.strips, space.segments, space.state,
        space.rotation, space.counts, space.indices, space.values, space.out_indices, space.out_values, space.total,
        strips, space.layout.capacity, space.entries,
        BLOCK=BLOCK, BLOCKS=space.blocks, MOMENTUM=velocity is not None, SCALED=scales is not None, ZERO=zero,
        UPDATE=update is not None, STACKED=stacked, num_warps=PASS_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def count(space: CandidateLists) -> None:
    """Make the histogram of the candidates that ``collect`` has found."""
    from sparsync.kernels.candidates.histogram_triton import make_histogram

    space.launch(
        make_histogram, (space.regions,),
        space.values, space.counts, space.owners, space.segments, space.state, space.histogram,
        BLOCK=COUNTED, num_warps=COUNT_WARPS,
    )  # fmt: skip
