"""DGC's kernels, launched in order."""

from __future__ import annotations

from torch import Tensor

from sparsync.kernels import launch_exact
from sparsync.kernels.draws import DIGITS, Plan, Sample
from sparsync.kernels.draws import PIECE as DRAWN
from sparsync.kernels.launch_exact import REGISTERS, begin, end
from sparsync.kernels.memory import Memory
from sparsync.kernels.search import Search
from sparsync.kernels.workspace import BLOCK, on_device_of
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad


def sample_of(memory: Memory, search: Search, plan: Plan, seed: int) -> Sample:
    """The sample that lives beside this memory's search."""
    known = memory.workspace.get("sample")
    if known is None or known.search is not search or known.seed != seed:
        known = memory.workspace["sample"] = Sample(search, plan, seed)
    return known


def sampled(
    grad: Tensor,
    memory: Memory,
    layout: Layout,
    state: dict[str, dict[str, Tensor]],
    codec: str,
    scales: Tensor | None,
    plan: Plan,
    seed: int,
    step: int,
) -> SparseGrad:
    """``DGCK``: the pass, a threshold from a sample of what it left, and the entries that reach it.

    Args:
        codec: how values travel: fp32, fp16, bf16, sign or levels.
        scales: of every segment, what its gradient is multiplied by.
        plan: of every segment, the sample to draw; always the same one for this memory.
        seed: shared by all ranks.
        step: number of the step; a CUDA graph repeats its own.
    """
    with on_device_of(grad):
        space, search = begin(grad, memory, layout, state, scales)
        sample = sample_of(memory, search, plan, seed)
        if sample.count:
            _draw(memory, sample, step)
        _rule(memory, sample)
        return end(memory, space, search, codec)


def _draw(memory: Memory, sample: Sample, step: int) -> None:
    """The sample's entries, and the digits of its threshold."""
    from sparsync.kernels import exact
    from sparsync.kernels import sampled as kernels

    space = sample.search.space
    kernels.draw[(sample.count,)](
        memory.after, sample.owners, sample.pieces, sample.sizes, sample.rows, sample.ends, sample.shifts,
        space.segments, sample.ranges, sample.drawn, step, sample.halvings, BLOCK=DRAWN, num_warps=8,
    )  # fmt: skip
    for digit in range(DIGITS):
        exact.tally[(min(launch_exact.TALLIES, sample.count),)](
            memory.after, space.places, sample.drawn, sample.sizes, sample.owners, sample.pieces, space.strips,
            sample.ranges, sample.sums, digit, 0, 0, sample.count, 0, len(space.layout.segments),
            BLOCK=BLOCK, BLOCKS=1, PIECE=BLOCK, PLACED=False, num_warps=8, maxnreg=REGISTERS,
        )  # fmt: skip


def _rule(memory: Memory, sample: Sample) -> None:
    """The threshold that is kept, first from the candidates, then from the residual."""
    from sparsync.kernels import sampled as kernels

    search = sample.search
    space, strips = search.space, search.space.strip_count
    segments = len(space.layout.segments)
    kernels.climb[(space.regions,)](
        space.values, space.counts, space.owners, space.segments, sample.ranges, sample.sums, sample.rungs, segments,
        PIECE=2 * BLOCK, num_warps=8,
    )  # fmt: skip
    kernels.rule[(segments,)](
        space.counts, space.found, space.segments, sample.rows, space.state, space.histogram, space.choice,
        search.ranges, sample.ranges, sample.sums, sample.rungs, search.fallbacks, space.peaks, space.shares,
        search.index_bits, segments, num_warps=4,
    )  # fmt: skip
    kernels.climb_all[(min(launch_exact.PROGRAMS, strips),)](
        memory.after, space.strips, search.ranges, sample.ranges, sample.sums, sample.rungs, strips, segments,
        BLOCK=BLOCK, BLOCKS=space.blocks, num_warps=4,
    )  # fmt: skip
    kernels.rule_all[(segments,)](
        space.segments, sample.rows, search.ranges, sample.ranges, sample.sums, sample.rungs, search.index_bits,
        segments, num_warps=4,
    )  # fmt: skip
