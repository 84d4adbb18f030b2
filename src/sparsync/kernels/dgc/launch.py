"""DGC's kernels, launched in order; and what they need beside the candidates."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

from sparsync.kernels.candidates.launch import State
from sparsync.kernels.device import on_device_of
from sparsync.kernels.dgc.reference import seed_of
from sparsync.kernels.launcher import ONE_AT_A_TIME
from sparsync.kernels.memory import Memory
from sparsync.kernels.strips import BLOCK, RangeRow, SampleRow, SegmentRow, table
from sparsync.kernels.topk import launch as topk
from sparsync.kernels.topk.launch import DIGIT, MAGNITUDE, REGISTERS, TopKSearch
from sparsync.layout import Layout, Segment, run_table
from sparsync.sparse import SparseGrad

PIECE = 4096  # entries of the sample that a program reads
DIGITS = -(-MAGNITUDE // DIGIT)  # of a magnitude

# (segment) -> (entries to draw, rank of the threshold among them, least count that is accepted); none are drawn where
# all is sent
Plan = Callable[[Segment], tuple[int, int, int]]


class DGCSample:
    """Tables of the sample, and buffers for its entries and what is found in them.

    Args:
        search: of the same gradient.
        plan: how many entries to draw from a segment, and what for.
        seed: shared by all ranks.
    """

    def __init__(self, search: TopKSearch, plan: Plan, seed: int) -> None:
        self.search = search
        space, device = search.space, search.space.device
        pieces: list[SegmentRow] = []
        rows: list[SampleRow] = []
        owners: list[int] = []
        sizes: list[int] = []
        ends, shifts = [], []
        first = runs_before = 0
        for i, segment in enumerate(space.layout.segments):
            wanted, rank, least = plan(segment)
            parts = ceil(wanted / PIECE)
            pieces.append(SegmentRow(rank, wanted, len(owners), parts, PIECE, first))
            owners += [i] * parts
            sizes += [min(PIECE, wanted - PIECE * j) for j in range(parts)]
            first += wanted
            runs = segment.runs()
            starts, stops, _ = run_table(runs, torch.device("cpu"))
            rows.append(SampleRow(seed_of(seed, segment.name), runs_before, len(runs), least))
            ends.append(stops)
            lengths = torch.tensor([stop - start for start, stop in runs], dtype=torch.int64, device="cpu")
            shifts.append(starts - stops + lengths)
            runs_before += len(runs)
        most = max(len(segment.runs()) for segment in space.layout.segments)
        self.halvings = most.bit_length() if most > 1 else 0  # of the search for a position's run
        self.count = len(owners)
        self.pieces, self.rows, self.owners = (table(rows, device) for rows in (pieces, rows, owners))
        self.ends, self.shifts = torch.cat(ends).to(device), torch.cat(shifts).to(device)
        self.sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
        self.drawn = torch.zeros(first, dtype=torch.float32, device=device)
        segments = len(pieces)
        self.ranges = torch.zeros((DIGITS + 1) * segments * len(RangeRow._fields), dtype=torch.int64, device=device)
        self.sums = torch.zeros(DIGITS * segments << DIGIT, dtype=torch.int32, device=device)
        self.rungs = torch.zeros(segments * 32, dtype=torch.int32, device=device)


def sample_of(memory: Memory, search: TopKSearch, plan: Plan, seed: int) -> DGCSample:
    """Return the sample that lives beside this memory's search."""
    return memory.workspace.get(DGCSample, (id(search), seed), lambda: DGCSample(search, plan, seed))


def select(
    grad: Tensor,
    memory: Memory,
    layout: Layout,
    state: State,
    codec: str,
    scales: Tensor | None,
    plan: Plan,
    seed: int,
    step: int,
) -> SparseGrad:
    """Send what reaches a threshold: the pass, the threshold from a sample of what it left, and the entries above.

    Args:
        codec: how values travel: fp32, fp16, bf16, sign or levels.
        scales: of every segment, what its gradient is multiplied by.
        plan: of every segment, the sample to draw; always the same one for this memory.
        seed: shared by all ranks.
        step: number of the step; a CUDA graph repeats its own.
    """
    with on_device_of(grad):
        space, search = topk.begin(grad, memory, layout, state, scales)
        sample = sample_of(memory, search, plan, seed)
        with ONE_AT_A_TIME:
            if sample.count:
                _draw(memory, sample, step)
            _pick_thresholds(memory, sample)
        return topk.end(memory, space, search, codec)


def _draw(memory: Memory, sample: DGCSample, step: int) -> None:
    """Read the sample's entries, and count the digits of its threshold."""
    from sparsync.kernels.dgc import triton as kernels
    from sparsync.kernels.topk.radix_select_triton import count_digits

    space = sample.search.space
    kernels.draw[(sample.count,)](
        memory.after, sample.owners, sample.pieces, sample.sizes, sample.rows, sample.ends, sample.shifts,
        space.segments, sample.ranges, sample.drawn, step, sample.halvings, BLOCK=PIECE, num_warps=8,
    )  # fmt: skip
    for digit in range(DIGITS):
        count_digits[(min(topk.DIGIT_PROGRAMS, sample.count),)](
            memory.after, space.indices, sample.drawn, sample.sizes, sample.owners, sample.pieces, space.strips,
            sample.ranges, sample.sums, digit, 0, 0, sample.count, 0, len(space.layout.segments),
            BLOCK=BLOCK, BLOCKS=1, PIECE=BLOCK, INDEXED=False, num_warps=8, maxnreg=REGISTERS,
        )  # fmt: skip


def _pick_thresholds(memory: Memory, sample: DGCSample) -> None:
    """Pick the threshold that is kept, first from the candidates, then from the residual."""
    from sparsync.kernels.dgc import triton as kernels

    search = sample.search
    space, strips = search.space, search.space.strip_count
    segments = len(space.layout.segments)
    kernels.count_rungs[(space.regions,)](
        space.values, space.counts, space.owners, space.segments, sample.ranges, sample.sums, sample.rungs, segments,
        PIECE=2 * BLOCK, num_warps=8,
    )  # fmt: skip
    kernels.pick_threshold[(segments,)](
        space.counts, space.found, space.segments, sample.rows, space.state, space.histogram, space.choice,
        search.ranges, sample.ranges, sample.sums, sample.rungs, search.fallbacks, space.peaks, space.shares,
        search.index_bits, segments, num_warps=4,
    )  # fmt: skip
    kernels.count_rungs_of_residual[(min(topk.PROGRAMS, strips),)](
        memory.after, space.strips, search.ranges, sample.ranges, sample.sums, sample.rungs, strips, segments,
        BLOCK=BLOCK, BLOCKS=space.blocks, num_warps=4,
    )  # fmt: skip
    kernels.pick_threshold_of_residual[(segments,)](
        space.segments, sample.rows, search.ranges, sample.ranges, sample.sums, sample.rungs, search.index_bits,
        segments, num_warps=4,
    )  # fmt: skip
