"""The fused kernels, launched in order."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsync.kernels.floors import Floor, guess
from sparsync.kernels.memory import Memory
from sparsync.kernels.workspace import BLOCK, CHUNK, CODECS, PASS_WARPS, SCALED, TAKE, Workspace, on_device_of
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad


def workspace_of(memory: Memory, layout: Layout, device: torch.device) -> Workspace:
    """The workspace that lives beside this memory; made anew when the layout changes."""
    known = memory.workspace.get("fused")
    if known is None or known.layout is not layout:
        known = memory.workspace["fused"] = Workspace(layout, device)
    return known


def select(
    grad: Tensor,
    memory: Memory,
    layout: Layout,
    state: dict[str, dict[str, Tensor]],
    codec: str,
    scales: Tensor | None = None,
    zero: bool = False,
) -> SparseGrad:
    """``ThresholdK`` in one pass and a look at its candidates.

    Args:
        codec: how values travel: fp32, fp16, bf16, sign or levels.
        scales: of every segment, what its gradient is multiplied by.
        zero: clear the gradient in the same pass.
    """
    from sparsync.kernels import fused

    with on_device_of(grad):
        space = workspace_of(memory, layout, grad.device)
        if space.adopt(state):
            _first_floors(grad, memory, space, scales)
        collect(grad, memory, space, scales, zero)
        space.launch(
            fused.decide, (len(layout.segments),),
            memory.after, space.counts, space.found, space.segments, space.samples, space.state, space.histogram,
            space.given, space.choice, space.peaks, space.shares, space.turn, BLOCK=CHUNK, num_warps=4,
        )  # fmt: skip
        if codec in SCALED:
            pieces = (space.regions * space.chunks,)
            lists = (space.values, space.found, space.owners, space.segments, space.choice, space.peaks)
            space.launch(fused.peak, pieces, *lists, space.regions, BLOCK=CHUNK, num_warps=4)
            space.launch(fused.share, pieces, *lists, space.shares, space.regions, BLOCK=CHUNK, num_warps=4)
        _finish(memory, space, codec)
        return space.sent()


def collect(grad: Tensor, memory: Memory, space: Workspace, scales: Tensor | None, zero: bool) -> None:
    """The pass over the gradient, and the histogram of its candidates."""
    from sparsync.kernels import fused

    speed, strips = memory.velocity, space.strip_count
    space.launch(
        fused.collect, (strips,), grad, memory.before, memory.after,
        speed.before if speed else grad, speed.after if speed else grad, speed.beta if speed else 0.0,
        scales if scales is not None else space.scales, space.strips, space.segments, space.state, space.turn,
        space.counts, space.places, space.values, space.out_places, space.out_values, space.total, strips,
        space.layout.capacity, space.candidates,
        BLOCK=BLOCK, BLOCKS=space.blocks, MOMENTUM=speed is not None, SCALED=scales is not None, ZERO=zero,
        num_warps=PASS_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    space.launch(
        fused.count, (space.regions,),
        space.values, space.counts, space.owners, space.segments, space.state, space.histogram,
        BLOCK=2 * BLOCK, num_warps=8,
    )  # fmt: skip


def _finish(memory: Memory, space: Workspace, codec: str) -> None:
    from sparsync.kernels import fused

    speed = memory.velocity
    masking = speed is not None and speed.masking
    space.launch(
        fused.finish, (1 + space.regions * space.takers,),
        memory.after, speed.after if speed and masking else memory.after, space.places, space.values, space.found,
        space.owners, space.segments, space.spans, space.given, space.choice, space.peaks, space.shares,
        space.out_places, space.out_values, space.total, space.flags, space.regions, space.takers,
        space.span_count, space.candidates,
        BLOCK=TAKE, CODEC=CODECS[codec], MASKING=masking, num_warps=TAKE // 32, enable_fp_fusion=False,
    )  # fmt: skip


def _first_floors(grad: Tensor, memory: Memory, space: Workspace, scales: Tensor | None) -> None:
    """Floors that are not known yet, or were made for another k, from a sample. This looks at the device's state."""
    rows = space.state.tolist()
    for i, (segment, row) in enumerate(zip(space.layout.segments, rows, strict=True)):
        if segment.k >= segment.numel:
            rows[i] = [0, 0, 0, 0]  # all is sent: a floor of sparser days would hold it back
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
        floor = Floor(guess(total, runs, segment.k), segment.k, segment.k // 2, segment.k)
        rows[i] = [floor.bits, floor.k, floor.left, floor.inflow]
    space.state.copy_(torch.tensor(rows, device=space.device))
