"""The Gaussian-k kernels, launched in order."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsync.kernels.memory import Memory
from sparsync.kernels.workspace import CHUNK, CODECS, on_device_of
from sparsync.kernels.workspace_gaussian import BLOCK, GaussianSpace
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad

PARTIALS = 4096  # of a segment's strips that are summed at a time


def space_of(memory: Memory, layout: Layout, two_sided: bool, device: torch.device) -> GaussianSpace:
    """The workspace that lives beside this memory; made anew when the layout changes."""
    known = memory.workspace.get("gaussian")
    if known is None or known.layout is not layout or known.two_sided != two_sided:
        known = memory.workspace["gaussian"] = GaussianSpace(layout, two_sided, device)
    return known


def select_gaussian(
    grad: Tensor, memory: Memory, layout: Layout, two_sided: bool, codec: str, scales: Tensor | None = None
) -> SparseGrad:
    """``GaussianK`` in three passes: one adds, two only read.

    Args:
        two_sided: which quantile of the normal distribution.
        codec: how values travel: fp32, fp16, bf16 or sign.
        scales: of every segment, what its gradient is multiplied by.
    """
    with on_device_of(grad):
        space = space_of(memory, layout, two_sided, grad.device)
        _add(grad, memory, space, scales)
        _search(memory.after, space)
        _gather(memory.after, space)
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
    space.launch(
        gaussian.tally, (len(space.layout.segments),),
        space.segments, space.counts, space.found, space.choice, space.given, space.peaks, space.shares, space.turn,
        BLOCK=256, num_warps=4,
    )  # fmt: skip


def _take(memory: Memory, space: GaussianSpace, codec: str) -> None:
    """Take what was gathered out of the residual."""
    from sparsync.kernels import fused

    pieces = space.regions * space.chunks
    if codec == "sign":
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
