"""The Gaussian-k kernels, launched in order."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsync.kernels import launch_exact
from sparsync.kernels.memory import Memory
from sparsync.kernels.workspace import BLOCK, CHUNK, CODECS, SCALED, on_device_of
from sparsync.kernels.workspace_gaussian import GaussianSpace
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad

PARTIALS = 4096  # of a segment's strips that are summed at a time


def space_of(memory: Memory, layout: Layout, two_sided: bool, refine: bool, device: torch.device) -> GaussianSpace:
    """The workspace that lives beside this memory; made anew when the layout changes."""
    known = memory.workspace.get("gaussian")
    if known is None or known.layout is not layout or known.asked != (two_sided, refine):
        known = memory.workspace["gaussian"] = GaussianSpace(layout, two_sided, refine, device)
    return known


def select_gaussian(
    grad: Tensor,
    memory: Memory,
    layout: Layout,
    two_sided: bool,
    refine: bool,
    codec: str,
    scales: Tensor | None = None,
) -> SparseGrad:
    """``GaussianK`` in three passes: one adds, two only read. ``refine`` reads segments whose mask is off again, once
    for each of a few digits of the limit and once to take out what reaches it.

    Args:
        two_sided: which quantile of the normal distribution.
        refine: the k largest go instead of a mask that is more than 10 % off.
        codec: how values travel: fp32, fp16, bf16, sign or levels.
        scales: of every segment, what its gradient is multiplied by.
    """
    with on_device_of(grad):
        space = space_of(memory, layout, two_sided, refine, grad.device)
        _add(grad, memory, space, scales)
        _search(memory.after, space)
        _gather(memory.after, space)
        _refine(memory, space, codec)
        _take(memory, space, codec)
        return space.sent()


def _add(grad: Tensor, memory: Memory, space: GaussianSpace, scales: Tensor | None) -> None:
    from sparsync.kernels import gaussian

    speed = memory.velocity
    space.launch(
        gaussian.add, (space.strip_count,),
        grad, memory.before, memory.after,
        speed.before if speed else grad, speed.after if speed else grad, speed.beta if speed else 0.0,
        scales if scales is not None else space.values, space.strips, space.sums, space.places, space.out_places,
        space.out_values, space.total, space.strip_count, space.out_places.numel(), space.candidates,
        BLOCK=BLOCK, BLOCKS=space.blocks, MOMENTUM=speed is not None, SCALED=scales is not None,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _search(after: Tensor, space: GaussianSpace) -> None:
    """Where the loop ends, of every segment."""
    from sparsync.kernels import gaussian

    parts = (len(space.layout.segments),)
    piece = min(PARTIALS, max(128, 1 << (space.longest - 1).bit_length()))
    space.launch(
        gaussian.moments, parts,
        space.sums, space.segments, space.quantiles, space.factors, space.thresholds, space.bounds,
        space.strip_count,
        BLOCK=piece, num_warps=4 if piece < 1024 else 8, enable_fp_fusion=False,
    )  # fmt: skip
    space.launch(
        gaussian.count, (space.strip_count,),
        after, space.strips, space.bounds, space.tallies, space.strip_count,
        BLOCK=BLOCK, BLOCKS=space.blocks, num_warps=4,
    )  # fmt: skip
    space.launch(
        gaussian.walk, parts,
        space.segments, space.thresholds, space.tallies, space.choice, space.strip_count,
        BLOCK=piece, num_warps=4 if piece < 1024 else 8, enable_fp_fusion=False,
    )  # fmt: skip


def _gather(after: Tensor, space: GaussianSpace) -> None:
    from sparsync.kernels import gaussian

    space.launch(
        gaussian.gather, (space.strip_count,),
        after, space.strips, space.segments, space.choice, space.turn, space.counts, space.places, space.values,
        BLOCK=BLOCK, BLOCKS=space.blocks, num_warps=4,
    )  # fmt: skip
    digits = space.digits
    space.launch(
        gaussian.tally, (len(space.layout.segments),),
        space.segments, space.counts, space.found, space.choice, space.given, space.peaks, space.shares, space.turn,
        digits.ranges if digits else space.choice, digits.fallbacks if digits else space.choice,
        digits.index_bits if digits else 0,
        BLOCK=256, REFINE=digits is not None, num_warps=4,
    )  # fmt: skip


def _refine(memory: Memory, space: GaussianSpace, codec: str) -> None:
    """Take the k largest out of the residual where the mask was off."""
    from sparsync.kernels import gaussian

    digits = space.digits
    if digits is None:
        return
    segments = len(space.layout.segments)
    launch_exact.narrow(memory.after, space, digits)
    space.launch(
        gaussian.settle, (segments,),
        space.choice, digits.ranges, digits.sums, digits.rounds, segments, num_warps=4,
    )  # fmt: skip
    for action in (0, 1, 2) if codec in SCALED else (2,):
        launch_exact.send(memory, space, digits, codec, action)


def _take(memory: Memory, space: GaussianSpace, codec: str) -> None:
    """Take what was gathered out of the residual."""
    from sparsync.kernels import fused

    pieces = space.regions * space.chunks
    if codec in SCALED:
        lists = (space.values, space.found, space.owners, space.segments, space.choice, space.peaks)
        space.launch(fused.peak, (pieces,), *lists, space.regions, BLOCK=CHUNK, num_warps=4)
        space.launch(fused.share, (pieces,), *lists, space.shares, space.regions, BLOCK=CHUNK, num_warps=4)
    speed = memory.velocity
    masking = speed is not None and speed.masking
    space.launch(
        fused.finish, (1 + pieces,),
        memory.after, speed.after if speed and masking else memory.after, space.places, space.values, space.found,
        space.owners, space.segments, space.spans, space.given, space.choice, space.peaks, space.shares,
        space.out_places, space.out_values, space.total, space.flags, space.regions, space.chunks,
        space.spans.numel(), space.candidates,
        BLOCK=CHUNK, CODEC=CODECS[codec], MASKING=masking, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
