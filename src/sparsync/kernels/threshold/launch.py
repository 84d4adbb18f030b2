"""The kernels of ``ThresholdK``, launched in order."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsync.kernels.candidates.launch import (
    CHUNK,
    COUNT_WARPS,
    COUNTED,
    TAKE,
    CandidateLists,
    EntryLists,
    State,
    candidates_of,
    collect,
)
from sparsync.kernels.codecs import CODEC_NUMBERS, SCALED
from sparsync.kernels.device import on_device_of
from sparsync.kernels.memory import Memory
from sparsync.kernels.precondition import came_in
from sparsync.kernels.threshold.reference import Threshold, estimate
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad
from sparsync.workspace import Workspace


def select(
    grad: Tensor,
    memory: Memory,
    layout: Layout,
    state: State,
    codec: str,
    scales: Tensor | None = None,
    zero: bool = False,
) -> SparseGrad:
    """Send about the k largest entries of every segment: one pass, and a look at its candidates.

    Args:
        codec: how values travel: fp32, fp16, bf16, sign or levels.
        scales: of every segment, what its gradient is multiplied by.
        zero: clear the gradient in the same pass.
    """
    from sparsync.kernels.threshold import triton as kernels

    with on_device_of(grad):
        space = candidates_of(memory, layout, grad.device)
        if space.adopt(state):
            grad = came_in(grad, memory, Workspace())  # before the pass, this time: thresholds are estimated from it
            _first_thresholds(grad, memory, space, scales)
        collect(grad, memory, space, scales, zero)
        space.launch(
            kernels.decide, (space.regions,),
            memory.after, space.values, space.counts, space.found, space.owners, space.segments, space.samples,
            space.state, space.histogram, space.tickets, space.given, space.choice, space.peaks, space.shares,
            space.rotation, BLOCK=COUNTED, SAMPLED=CHUNK, num_warps=COUNT_WARPS,
        )  # fmt: skip
        take_out(memory, space, codec, space.takers, TAKE, TAKE // 32)
        return space.sent


def take_out(memory: Memory, space: EntryLists, codec: str, takers: int, block: int, warps: int) -> None:
    """Take what reaches its segment's bound out of the residual.

    Args:
        takers: programs of a region.
        block, warps: entries that one takes out at once, and how.
    """
    from sparsync.kernels.threshold import triton as kernels

    if codec in SCALED:
        pieces = (space.regions * space.chunks,)
        lists = (space.values, space.found, space.owners, space.segments, space.choice, space.peaks)
        space.launch(kernels.find_peaks, pieces, *lists, space.regions, BLOCK=CHUNK, num_warps=4)
        space.launch(kernels.sum_shares, pieces, *lists, space.shares, space.regions, BLOCK=CHUNK, num_warps=4)
    velocity = memory.velocity
    masking = velocity is not None and velocity.masking
    space.launch(
        kernels.take_out, (1 + space.regions * takers,),
        memory.after, velocity.after if velocity and masking else memory.after, space.indices, space.values,
        space.found, space.owners, space.segments, space.spans, space.given, space.choice, space.peaks, space.shares,
        space.out_indices, space.out_values, space.total, space.flags, space.regions, takers, space.span_count,
        space.entries,
        BLOCK=block, CODEC=CODEC_NUMBERS[codec], HALF=space.layout.dtype == torch.float16, MASKING=masking,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def _first_thresholds(grad: Tensor, memory: Memory, space: CandidateLists, scales: Tensor | None) -> None:
    """Estimate thresholds that are not known yet, or were made for another k. This looks at the device's state."""
    rows = space.state.tolist()
    for i, (segment, row) in enumerate(zip(space.layout.segments, rows, strict=True)):
        if segment.k >= segment.numel:
            rows[i] = [0, 0, 0, 0]  # all is sent: a threshold of sparser days would hold it back
            continue
        if row[1] == segment.k:
            continue
        runs = segment.runs()
        total = torch.zeros_like(memory.before) if len(runs) > 1 else memory.before
        for start, stop in runs:
            came = grad[start:stop].float() * (scales[i] if scales is not None else 1.0)
            if memory.velocity is not None:
                came = memory.velocity.before[start:stop] * memory.velocity.beta + came
            part = (memory.before[start:stop] + came).nan_to_num(0.0, 0.0, 0.0)
            if len(runs) > 1:
                total[start:stop] = part
            else:
                total, runs = part, [(0, stop - start)]
        first = Threshold(estimate(total, runs, segment.k), segment.k, segment.k // 2, segment.k)
        rows[i] = [first.bits, first.k, first.left, first.inflow]
    space.state.copy_(torch.tensor(rows, dtype=torch.int64, device=space.device))
